"""Prevents control-token injection: text in messages never becomes a control token.

Control tokens mark turns and ends. A message that spells a control token must not be able to speak in another
role, so only the control tokens that the template writes may take effect. The tokenizer needs the whole text
at once, because words merge across the borders of messages. So we use an alias tokenizer, which treats
control tokens as plain text. Each control token has a secret alias in it, and the aliases replace the
template's control tokens.

To find the template's control tokens, the messages are rendered again with masked contents. The masks have
none of the characters with which control tokens begin and end.

In assistant messages, reasoning markers stay control tokens: the model was trained on such messages, and
templates look for the markers. Reasoning markers do not end a turn.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_REASONING = re.compile(r"(</?think>|</?seed:think>|\[/?THINK\])")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
TEMPLATE_READS_TOKENS = (
    "this model's chat template looks for control tokens in what messages say: leave them out"
)


class MaskingError(ValueError): ...


@dataclass(frozen=True)
class Masking:
    """A way to mask the texts of messages.

    Args:
        marker: The text before each control token that the template may see.
        visible: The control tokens that the template may see.
        safe: True if no change by the template can turn contents into a control token.
    """

    messages: Sequence[Mapping[str, Any]]
    unmask_table: Mapping[int, str | None]
    marker: str
    visible: frozenset[str] = frozenset()
    safe: bool = False

    def unmask(self, rendered: str) -> str:
        return rendered.translate(self.unmask_table)


class ControlTokens:
    """Finds and replaces control tokens: special tokens, and those in `also`, which a model does not flag
    as special.
    """

    def __init__(self, tokenizer: Tokenizer, also: Iterable[str] = ()) -> None:
        named, self._state = frozenset(also), tokenizer.to_str()
        state = json.loads(self._state)
        self._tokens: dict[str, dict[str, Any]] = {
            token["content"]: token
            for token in state["added_tokens"]
            if token["content"] and (token["special"] or token["content"] in named)
        }
        self._pattern = re.compile(any_of_pattern(self._tokens)) if self._tokens else None
        nonce = _letters(secrets.token_hex(16))  # no normaliser changes lower-case letters
        self._aliases = {
            token: f"{nonce}{_letters(format(number, 'x'))}z" for number, token in enumerate(self._tokens)
        }
        self.may_be_normalised = state["normalizer"] is not None and any(
            token["normalized"] for token in self._tokens.values()
        )
        """True if the normaliser may turn a text without control tokens into one with them."""

    def find(self, text: str) -> list[str]:
        return [match.group() for match in self._matches(text)]

    def parts(self, message: Mapping[str, Any]) -> list[str]:
        """Split a message's content at the control tokens that it may use: text, token, text and so on.

        Only assistant messages may use control tokens: those around reasoning.
        """
        content = message["content"]
        return _REASONING.split(content) if message["role"] == "assistant" else [content]

    def maskings(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Masking]:
        """Yield maskings, from the safest to the one that shows the template the most. Raises MaskingError
        if the contents already use all characters for masks.
        """
        ends = sorted({end for token in self._tokens for end in (token[0], token[-1])})
        contents = [self.parts(message) for message in messages]
        called = [text for message in messages for text in strings_of(message.get("tool_calls", ()))]
        used = set[str]().union(*(message["content"] for message in messages), *called)
        unused = (character for character in map(chr, chain(*_PRIVATE_USE)) if character not in used)
        free = list(islice(unused, len(ends) + 1))
        if len(free) <= len(ends):
            raise MaskingError("leave some characters of Unicode's private use out of what messages say")
        *masks, marker = free
        mask_table = {ord(end): mask for end, mask in zip(ends, masks, strict=True)}
        table: dict[int, str | None] = {ord(mask): end for end, mask in zip(ends, masks, strict=True)}
        table[ord(marker)] = None

        def masked(text: str) -> str:
            return text.translate(mask_table)

        def changed(change: Callable[[str], str]) -> list[Mapping[str, Any]]:
            return [map_message(change, *pair) for pair in zip(messages, contents, strict=True)]

        texts = [*called, *(text for parts in contents for text in parts[::2])]
        visible = frozenset(token for text in texts for token in self.find(text))
        yield Masking(changed(masked), table, marker, safe=True)
        yield Masking(changed(lambda text: self._replace(text, masked)), table, marker)
        marked = changed(lambda text: self._replace(text, lambda token: marker + token))
        yield Masking(marked, table, marker, visible)

    def with_aliases(self, rendered: str, masking: Masking, expected: Sequence[str]) -> str:
        """Replace the template's control tokens by aliases, and unmask the messages' contents.

        Args:
            expected: The control tokens that the template writes for harmless messages.

        Raises:
            MaskingError: The messages made the template write other control tokens.
        """
        first, *parts = rendered.split(masking.marker)
        text, found = [self._replace(first, self._aliases.__getitem__)], self.find(first)
        for part in parts:
            token = next(self._matches(part), None)
            end = 0 if token is None or token.start() else token.end()
            if end and part[:end] not in masking.visible:
                raise MaskingError(TEMPLATE_READS_TOKENS)
            text += [part[:end], self._replace(part[end:], self._aliases.__getitem__)]
            found += self.find(part[end:])
        if not masking.safe and found != expected:
            raise MaskingError(TEMPLATE_READS_TOKENS)
        return masking.unmask("".join(text))

    @cached_property
    def alias_tokenizer(self) -> Tokenizer:
        """The tokenizer that encodes control tokens as text, and aliases as control tokens."""
        state = json.loads(self._state)
        for token in state["added_tokens"]:
            token["special"] = token["content"] in self._tokens
        tokenizer = Tokenizer.from_str(json.dumps(state))
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens(
            [
                AddedToken(self._aliases[content], **{flag: token[flag] for flag in _FLAGS}, special=False)
                for content, token in self._tokens.items()
            ]
        )
        return tokenizer

    @cached_property
    def model_ids(self) -> npt.NDArray[np.uint32]:
        """The model's token ids, by the alias tokenizer's token ids."""
        vocabulary = self.alias_tokenizer.get_vocab()
        ids = {vocabulary[self._aliases[content]]: token["id"] for content, token in self._tokens.items()}
        model_ids = np.arange(max(vocabulary.values()) + 1, dtype=np.uint32)
        model_ids[list(ids)] = list(ids.values())
        return model_ids

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Find control tokens as the tokenizer does: from the left, the longest first, some only as whole
        words."""
        for match in () if self._pattern is None else self._pattern.finditer(text):
            neighbours = text[match.start() - 1 : match.start()] + text[match.end() : match.end() + 1]
            if not (self._tokens[match.group()]["single_word"] and re.search(r"\w", neighbours)):
                yield match

    def _replace(self, text: str, replacement: Callable[[str], str]) -> str:
        parts, end = [], 0
        for match in self._matches(text):
            parts += [text[end : match.start()], replacement(match.group())]
            end = match.end()
        return "".join([*parts, text[end:]])


def map_texts(change: Callable[[str], str], parts: Sequence[str]) -> str:
    """Apply `change` to a message's texts and join its parts. Parts at odd indices are tokens."""
    return "".join(part if place % 2 else change(part) for place, part in enumerate(parts))


def map_message(
    change: Callable[[str], str], message: Mapping[str, Any], parts: Sequence[str]
) -> Mapping[str, Any]:
    """Return a message with `change` applied to its texts: its content and the strings of its tool calls."""
    content, calls = map_texts(change, parts), message.get("tool_calls")
    if not calls:
        return {**message, "content": content}
    said = [{**call, "function": _mapped(change, call["function"])} for call in calls]
    return {**message, "content": content, "tool_calls": said}


def _mapped(change: Callable[[str], str], function: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": change(function["name"]), "arguments": _map_strings(change, function["arguments"])}


def _map_strings(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(change, inner) for key, inner in value.items()}
    return [_map_strings(change, inner) for inner in value] if isinstance(value, list) else value


def strings_of(value: Any) -> Iterator[str]:
    """Yield every string in JSON data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in strings_of(part))
    elif isinstance(value, list | tuple):
        yield from (text for part in value for text in strings_of(part))


def any_of_pattern(words: Iterable[str]) -> str:
    """Make a regex that matches any of the words: a trie, which looks at each letter once."""
    tails: dict[str, list[str]] = {}
    for word in words:
        tails.setdefault(word[:1], []).append(word[1:])
    branches = [re.escape(first) + any_of_pattern(rest) for first, rest in tails.items() if first]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in tails else ''}"


def _letters(hexadecimal: str) -> str:
    return hexadecimal.translate(str.maketrans("0123456789", "ghijklmnop"))
