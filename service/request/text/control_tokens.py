"""Control tokens mark turns and ends. Whoever spells one in a message must not speak as somebody else.

In a rendered conversation the template's own markers are control tokens, and what messages spell is text.
Both are one text to the tokenizer, since words merge across their borders. So a second tokenizer takes
control tokens for plain text and knows an alias for each, which nobody can guess. The alias is put where the
template wrote the token.

A rendering of hidden messages shows where that is: other characters stand for those that control tokens begin
and end with.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


LOOKED_FOR = "this model's chat template looks for control tokens in what messages say: leave them out"


class Unhideable(ValueError):
    """It cannot be told what of a rendering is the template's."""


@dataclass(frozen=True)
class Hidden:
    """Messages' contents without control tokens. signs: for `str.translate`, from what stands in them to what
    it stands for. mark: stands before the control tokens that were `left` for the template to see. certain:
    nothing can become a control token either."""

    contents: Sequence[str]
    signs: Mapping[int, str | None]
    mark: str
    left: frozenset[str]
    certain: bool

    def shown(self, rendered: str) -> str:
        return rendered.translate(self.signs)


class ControlTokens:
    """A tokenizer's special tokens, and those `beside` that only look like ordinary added ones."""

    def __init__(self, tokenizer: Tokenizer, beside: Iterable[str] = ()) -> None:
        named, self._state = frozenset(beside), tokenizer.to_str()
        state = json.loads(self._state)
        self._tokens: dict[str, dict[str, Any]] = {
            token["content"]: token
            for token in state["added_tokens"]
            if token["content"] and (token["special"] or token["content"] in named)
        }
        self._spelt = re.compile(_any_of(self._tokens)) if self._tokens else None
        nonce = _letters(secrets.token_hex(16))  # no normaliser changes lower-case letters
        self._aliases = {
            spelt: f"{nonce}{_letters(format(number, 'x'))}z" for number, spelt in enumerate(self._tokens)
        }
        self.veiled = state["normalizer"] is not None and any(
            token["normalized"] for token in self._tokens.values()
        )
        """Whether what spells none may be normalised to one, so that spelling tells nothing."""

    def spelt_in(self, text: str) -> list[str]:
        """In their order."""
        return [found.group() for found in self._found(text)]

    def hidden(self, contents: Sequence[str]) -> Iterator[Hidden]:
        """Ways to hide contents, from the safest to what shows a template most of them. Raises Unhideable if
        no characters are left to hide by."""
        ends = sorted({end for token in self._tokens for end in (token[0], token[-1])})
        used = set[str]().union(*contents)
        free = [sign for sign, _ in zip(_unused(used), range(len(ends) + 1), strict=False)]
        if len(free) <= len(ends):
            raise Unhideable("leave some characters of Unicode's private use out of what messages say")
        mark, guards = free[-1], dict(zip(map(ord, ends), free, strict=False))
        signs: dict[int, str | None] = {ord(mark): None}
        signs |= {ord(sign): end for sign, end in zip(free, ends, strict=False)}
        left = frozenset(spelt for one in contents for spelt in self.spelt_in(one))

        def guarded(text: str) -> str:
            return text.translate(guards)

        yield Hidden([guarded(one) for one in contents], signs, mark, frozenset(), True)
        yield Hidden([self._changed(one, guarded) for one in contents], signs, mark, frozenset(), False)
        marked = [self._changed(one, lambda token: mark + token) for one in contents]
        yield Hidden(marked, signs, mark, left, False)

    def aliased(self, rendered: str, hidden: Hidden, expected: Sequence[str]) -> str:
        """The text for `second`: the template's tokens as aliases, the messages' as they are spelt. expected:
        the template's tokens, were it not for what messages say. Raises Unhideable for a template that makes
        other tokens of that."""
        first, *parts = rendered.split(hidden.mark)
        shown, own = [self._changed(first, self._aliases.__getitem__)], self.spelt_in(first)
        for part in parts:
            token = next(self._found(part), None)
            end = 0 if token is None or token.start() else token.end()
            if end and part[:end] not in hidden.left:
                raise Unhideable(LOOKED_FOR)
            shown += [part[:end], self._changed(part[end:], self._aliases.__getitem__)]
            own += self.spelt_in(part[end:])
        if not hidden.certain and own != expected:
            raise Unhideable(LOOKED_FOR)
        return hidden.shown("".join(shown))

    @cached_property
    def second(self) -> Tokenizer:
        """The tokenizer that takes control tokens for text, and knows their aliases."""
        state = json.loads(self._state)
        for token in state["added_tokens"]:
            token["special"] = token["content"] in self._tokens
        tokenizer = Tokenizer.from_str(json.dumps(state))
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens(
            [
                AddedToken(self._aliases[spelt], **{flag: token[flag] for flag in _FLAGS}, special=False)
                for spelt, token in self._tokens.items()
            ]
        )
        return tokenizer

    def meant(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Ids of `second` as the model has them."""
        return self._meaning[ids]

    @cached_property
    def _meaning(self) -> npt.NDArray[np.uint32]:
        vocabulary = self.second.get_vocab()
        ids = {vocabulary[self._aliases[spelt]]: one["id"] for spelt, one in self._tokens.items()}
        meaning = np.arange(max(vocabulary.values()) + 1, dtype=np.uint32)
        meaning[list(ids)] = list(ids.values())
        return meaning

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """As the tokenizer finds them: from the left, the longest first; some only as words."""
        for found in () if self._spelt is None else self._spelt.finditer(text):
            beside = text[found.start() - 1 : found.start()] + text[found.end() : found.end() + 1]
            if not (self._tokens[found.group()]["single_word"] and re.search(r"\w", beside)):
                yield found

    def _changed(self, text: str, form: Callable[[str], str]) -> str:
        """With other forms of its control tokens."""
        parts, end = [], 0
        for found in self._found(text):
            parts += [text[end : found.start()], form(found.group())]
            end = found.end()
        return "".join([*parts, text[end:]])


def _unused(used: set[str]) -> Iterator[str]:
    return (sign for sign in map(chr, chain(*_PRIVATE_USE)) if sign not in used)


def _any_of(words: Iterable[str]) -> str:
    """A pattern for any of the words, the longest of those that begin alike; it looks at each letter once."""
    tails: dict[str, list[str]] = {}
    for word in words:
        tails.setdefault(word[:1], []).append(word[1:])
    forms = [re.escape(first) + _any_of(rest) for first, rest in tails.items() if first]
    if not forms:
        return ""
    return f"(?:{'|'.join(forms)}){'?' if '' in tails else ''}"


def _letters(hexadecimal: str) -> str:
    return hexadecimal.translate(str.maketrans("0123456789", "ghijklmnop"))
