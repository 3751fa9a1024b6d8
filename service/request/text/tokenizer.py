"""Text and chat messages to token ids and back, with the `tokenizers` library alone (no transformers).

Reads tokenizer.json of a model directory, and what stands beside it
(`workers/model/directory/tokenizer_files.py`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Tokenizer

from ....workers.messages.requests import ID_BYTES
from ....workers.model.directory.chat_template import OURS, ChatTemplate
from ....workers.model.directory.json_files import ModelError, refuse_pointer
from ....workers.model.directory.tokenizer_files import AddedToken, TokenizerFiles
from ..calls import SpecialTokens
from .control_tokens import LOOKED_FOR, ControlTokens, Unhideable

Message = Mapping[str, str]

_PIECE = 16_384
"""Characters that one thread tokenises of a long text."""
_BATCH = 16
"""Pieces that are tokenised before somebody looks whether it is enough. Each takes 2 MB meanwhile."""
_LONGEST_PIECE = 1 << 22
"""Characters between two seams at most, or in all where the tokenizer needs the whole text: 400 MB."""
_PROBE = 4
"""Characters a token of a long piece's beginning, which is tokenised first."""
_PROBE_SLACK = 64
"""Tokens that its end may come to more than in the whole."""
_SEAM = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
"""Where a long text may be cut: before a single space between two letters."""
_PROBES = ("ab cd ef", "It's a b", "3d Print x", "ends. Then we", "TWO words Of a")
_MARKED = re.compile("\N{ASTERISM}([^\N{ASTERISM}]+)\N{ASTERISM}")
"""It stands for a message's content where only the place matters."""


class TemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


class TextTooLong(ValueError):
    """More tokens than asked for, or a text that cannot be tokenised in bounded memory."""


class Stopped(Exception):
    """Nobody waits for the ids any more."""


@dataclass(frozen=True)
class Limit:
    """tokens: more are of no use. stopped: asked now and then, whether to give up."""

    tokens: int = 1 << 62
    stopped: Callable[[], bool] = bool


NO_LIMIT = Limit()


class TextTokenizer:
    """Thread-safe; encoding releases the interpreter lock, so call it in a thread."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, special: Mapping[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self._divisible = _splits_at_spaces(tokenizer)
        self._special = dict(special)
        self._template = template
        self._variables: Mapping[str, Any] = {}
        self._control = ControlTokens(tokenizer, self._marks())
        self.longest_token = _longest_token(tokenizer)
        """Bytes of text that one token stands for at most."""

    @classmethod
    def load(cls, directory: Path) -> TextTokenizer:
        """Raises FileNotFoundError or ModelError for a directory without a usable tokenizer."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: the model directory has no tokenizer")
        files, tokenizer = TokenizerFiles.read(directory), _read(path)
        _add(tokenizer, files.added, path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, files.template, files.special)

    def with_variables(self, variables: Mapping[str, Any]) -> TextTokenizer:
        """The same, which gives the chat template these too (`chat_template_kwargs`).

        Raises TemplateError for one that a request may not set, and for text that holds a control token.
        """
        for name in variables:
            if name in OURS or name in self._special:
                raise TemplateError(f"{name} is not for a request to set")
        for text in _texts(variables):
            for found in self._control.spelt_in(text):
                raise TemplateError(f"the control token {found!r} may not stand in it")
        other = copy.copy(self)
        other._variables = dict(variables)
        return other

    @property
    def has_template(self) -> bool:
        """Whether the model takes messages."""
        return self._template is not None

    def encode(
        self,
        text: str,
        *,
        opening: bool,
        special_tokens: SpecialTokens = SpecialTokens.TEXT,
        limit: Limit = NO_LIMIT,
    ) -> bytes:
        """Little-endian uint32 ids. opening: this begins a sequence, so the model's BOS is added. Raises
        TextTooLong or Stopped."""
        control = self._control
        if special_tokens is SpecialTokens.PARSE or not (control.veiled or control.spelt_in(text)):
            return self._ids(self._tokenizer, text, opening, limit)
        return self._as_text(text, opening, limit)

    def encode_chat(self, messages: Sequence[Message], *, answer: bool, limit: Limit = NO_LIMIT) -> bytes:
        """A conversation from its beginning. answer: end with the assistant's opening. Raises TextTooLong,
        Stopped, and TemplateError, also for a template that leaves out what a message says."""
        return self._chat([], messages, answer, limit)

    def encode_chat_append(self, messages: Sequence[Message], *, limit: Limit = NO_LIMIT) -> bytes:
        """Messages that continue a conversation, without the opening that a template gives to a new one.

        They follow an invented conversation, the first that the template takes. Raises TextTooLong, Stopped,
        and TemplateError for a template that rewrites earlier messages, or leaves out what a message says.
        """
        refusal: TemplateError | None = None
        for before in _INVENTED:
            try:
                return self._chat(before, messages, True, limit)
            except TemplateError as error:
                refusal = error
        assert refusal is not None, "there are conversations to try"
        raise refusal

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _ids(self, tokenizer: Tokenizer, text: str, opening: bool, limit: Limit) -> bytes:
        pieces, found, tokens = _pieces(text) if self._divisible else iter([text]), list[bytes](), 0
        while batch := list(itertools.islice(pieces, _BATCH)):
            if limit.stopped():
                raise Stopped
            if tokens > limit.tokens:
                raise TextTooLong(f"is more than {limit.tokens} tokens: shorten it")
            for piece in batch:
                _check_piece(tokenizer, piece, limit.tokens)
            # The fast form keeps no offsets, which takes half the time, and uses a core for each piece.
            head = 1 if opening and not found else 0
            first = tokenizer.encode_batch_fast(batch[:head], add_special_tokens=True)
            rest = tokenizer.encode_batch_fast(batch[head:], add_special_tokens=False)
            packed = b"".join(_packed(encoding.ids) for encoding in (*first, *rest))
            found.append(packed)
            tokens += len(packed) // ID_BYTES
        return b"".join(found)

    def _as_text(self, text: str, opening: bool, limit: Limit) -> bytes:
        """Control tokens as what they spell, but for those that stand there as aliases."""
        ids = self._ids(self._control.second, text, opening, limit)
        return _packed(self._control.meant(np.frombuffer(ids, dtype="<u4")))

    def _chat(
        self, before: Sequence[Message], messages: Sequence[Message], answer: bool, limit: Limit
    ) -> bytes:
        """Encode messages behind earlier ones. Control tokens are the template's alone."""
        rendered, numbered = self._following(before, messages, answer)
        control = self._control
        if not control.veiled and control.spelt_in(rendered) == control.spelt_in(numbered):
            return self._ids(self._tokenizer, rendered, False, limit)
        head = len(self._render(before, False)) if before else 0
        own = control.spelt_in(numbered)
        try:
            for hidden in control.hidden([message["content"] for message in messages]):
                veiled = [
                    {**message, "content": content}
                    for message, content in zip(messages, hidden.contents, strict=True)
                ]
                added = self._render([*before, *veiled], answer)[head:]
                if hidden.shown(added) == rendered:
                    return self._as_text(control.aliased(added, hidden, own), False, limit)
        except Unhideable as error:
            raise TemplateError(str(error)) from None
        raise TemplateError(LOOKED_FOR)

    def _marks(self) -> set[str]:
        """Added tokens that the template writes around messages. Some models have theirs as ordinary ones."""
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        marks = {text for text in self._special.values() if text in added}
        for conversation in _INVENTED if self._template is not None else ():
            with contextlib.suppress(TemplateError):
                rendered = self._render(conversation, True)
                marks |= {token for token in added if token in rendered}
        return marks

    def _following(
        self, before: Sequence[Message], messages: Sequence[Message], answer: bool
    ) -> tuple[str, str]:
        """The text that messages add to the rendering of earlier ones, and what it adds if they say numbers.
        Raises TemplateError if something of a message is missing in it, or something of what was before is
        said again."""
        head = self._render(before, False) if before else ""
        whole = self._render([*before, *messages], answer)
        numbered = [_marked(message["role"], str(number)) for number, message in enumerate(messages)]
        added = self._render([*before, *numbered], answer)[len(head) :]
        shown = set(_MARKED.findall(added))
        if not whole.startswith(head) or any(message["role"] in shown for message in before):
            raise TemplateError("this model's chat template cannot append messages: append text instead")
        for number, message in enumerate(messages):
            if message["content"].strip() and str(number) not in shown:
                raise TemplateError(
                    f"this model's chat template leaves out a message of the role {message['role']!r} here: "
                    "say it in a user's message"
                )
        return whole[len(head) :], added

    def _render(self, messages: Sequence[Message], answer: bool) -> str:
        if self._template is None:
            raise TemplateError("this model has no chat template: send text instead of messages")
        try:
            return self._template.render(messages, answer, {**self._special, **self._variables})
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from None


def _read(path: Path) -> Tokenizer:
    try:
        refuse_pointer(path)
        return Tokenizer.from_file(str(path))
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}: download it again") from None


def _add(tokenizer: Tokenizer, added: Mapping[int, AddedToken], path: Path) -> None:
    """Those that only the files beside tokenizer.json have. Raises ModelError where they get other ids."""
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for number, token in added.items():
        if token.content not in there:
            tokenizer.add_tokens([tokenizers.AddedToken(**vars(token))])
            found = tokenizer.token_to_id(token.content)
            if found != number:
                raise ModelError(
                    f"{path} would number {token.content!r} as {found}, the files beside it say {number}: "
                    "they belong to different models"
                )


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, names of keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _marked(role: str, mark: str) -> Message:
    """A message without what it says."""
    return {"role": role, "content": f"\N{ASTERISM}{mark}\N{ASTERISM}"}


def _invented() -> list[list[Message]]:
    system, user, said = (_marked(role, role) for role in ("system", "user", "assistant"))
    return [[system, user], [system, user, said], [user], [user, said]]


_INVENTED = _invented()
"""Conversations that messages may follow; a template may refuse some."""


def _pieces(text: str) -> Iterator[str]:
    """The text in parts of about _PIECE characters, cut at seams."""
    start = 0
    while len(text) - start > 2 * _PIECE and (seam := _SEAM.search(text, start + _PIECE)):
        yield text[start : seam.start()]
        start = seam.start()
    yield text[start:]


def _check_piece(tokenizer: Tokenizer, piece: str, tokens: int) -> None:
    """Raises TextTooLong for a piece that is sure to be more than so many tokens, or too long in one."""
    if len(piece) <= _BATCH * _PIECE:
        return
    if len(piece) > _LONGEST_PIECE:
        raise TextTooLong(
            f"has {len(piece)} characters without a place to cut, and at most {_LONGEST_PIECE} can be "
            "tokenised in one: put single spaces between words"
        )
    beginning = piece[: _PROBE * tokens]
    if len(beginning) < len(piece):
        (probe,) = tokenizer.encode_batch_fast([beginning], add_special_tokens=False)
        if len(probe.ids) > tokens + _PROBE_SLACK:
            raise TextTooLong(f"is more than {tokens} tokens: shorten it")


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes, at least as many as a token of the vocabulary stands for. Normalisers may put up to four in the
    place of one."""
    state = json.loads(tokenizer.to_str())
    kinds = {part["type"] for part in _flat(state["pre_tokenizer"], "pretokenizers")}
    size = len if "ByteLevel" in kinds else lambda token: len(token.encode())
    longest = max(map(size, tokenizer.get_vocab()), default=1)
    return longest * (4 if _flat(state["normalizer"], "normalizers") else 1)


def _splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the parts of a text cut at seams have the ids of the whole.

    True for byte-level BPE: its words begin with their space, and neither normaliser, added tokens nor BOS
    reach across. Whatever is not recognised counts as False.
    """
    state = json.loads(tokenizer.to_str())
    normalizers = {part["type"] for part in _flat(state["normalizer"], "normalizers")}
    splitters = _flat(state["pre_tokenizer"], "pretokenizers")
    kinds = {part["type"] for part in splitters}
    tokens = state["added_tokens"]
    bare, closed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    return (
        normalizers <= {"NFC", "NFD", "NFKC", "NFKD"}
        and "ByteLevel" in kinds
        and kinds <= {"ByteLevel", "Digits", "Split"}
        and not any(part.get("add_prefix_space") for part in splitters)
        and not any(" " in token["content"] for token in tokens)
        and not any(token[reach] for token in tokens for reach in ("lstrip", "rstrip", "single_word"))
        and closed[-len(bare) :] == bare  # nothing follows the text
        and all(_words_keep_their_space(tokenizer, probe) for probe in _PROBES)
    )


def _words_keep_their_space(tokenizer: Tokenizer, text: str) -> bool:
    starts = {start for _, (start, _) in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
    return all(seam.start() in starts for seam in _SEAM.finditer(text))


def _flat(state: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    """A component of a tokenizer as its parts, in order."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for inner in state[parts] for part in _flat(inner, parts)]


def _packed(ids: npt.ArrayLike) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()
