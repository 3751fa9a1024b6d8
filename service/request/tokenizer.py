"""Text and chat messages to token ids and back, with the `tokenizers` library alone (no transformers).

Reads tokenizer.json of a model directory, and what stands beside it (`workers/model/tokenizer_files.py`).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from tokenizers import Tokenizer

from ...workers.model.chat_template import OURS, ChatTemplate
from ...workers.model.files import ModelError, refuse_pointer
from ...workers.model.tokenizer_files import AddedToken, TokenizerFiles

Message = Mapping[str, str]

_PIECE = 16_384
"""Characters that one thread tokenises of a long text."""
_SEAM = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
"""Where a long text may be cut: before a single space between two letters."""
_PROBES = ("ab cd ef", "It's a b", "3d Print x", "ends. Then we", "TWO words Of a")
_MARKED = re.compile("\N{ASTERISM}([^\N{ASTERISM}]+)\N{ASTERISM}")
"""What stands for a message's content where only its place matters."""


class TemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


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
        added = self._tokenizer.get_added_tokens_decoder().values()
        controls = [token.content for token in added if token.special]
        for text in _texts(variables):
            if found := next((token for token in controls if token in text), None):
                raise TemplateError(f"the control token {found!r} may not stand in it")
        other = copy.copy(self)
        other._variables = dict(variables)
        return other

    @property
    def has_template(self) -> bool:
        """Whether the model takes messages."""
        return self._template is not None

    def encode(self, text: str, *, opening: bool) -> bytes:
        """Little-endian uint32 ids. opening: this begins a sequence, so the model's BOS is added."""
        pieces = _pieces(text) if self._divisible else [text]
        # The fast form keeps no offsets, which takes half the time, and uses a core for each piece.
        first = self._tokenizer.encode_batch_fast(pieces[:1], add_special_tokens=opening)
        rest = self._tokenizer.encode_batch_fast(pieces[1:], add_special_tokens=False)
        return b"".join(_packed(encoding.ids) for encoding in (*first, *rest))

    def encode_chat(self, messages: Sequence[Message], *, answer: bool) -> bytes:
        """A conversation from its beginning. answer: end with the assistant's opening. Raises TemplateError,
        also for a template that leaves out what a message says."""
        return self.encode(self._following([], messages, answer), opening=False)

    def encode_chat_append(self, messages: Sequence[Message]) -> bytes:
        """Messages that continue a conversation, without the opening that a template gives to a new one.

        They follow an invented conversation, the first that the template takes. Raises TemplateError for a
        template that rewrites earlier messages, or leaves out what a message says.
        """
        system, user, said = (_marked(role, role) for role in ("system", "user", "assistant"))
        refusal: TemplateError | None = None
        for before in ([system, user], [system, user, said], [user], [user, said]):
            try:
                rendered = self._following(before, messages, True)
            except TemplateError as error:
                refusal = error
            else:
                return self.encode(rendered, opening=False)
        assert refusal is not None, "there are conversations to try"
        raise refusal

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _following(self, before: Sequence[Message], messages: Sequence[Message], answer: bool) -> str:
        """What a rendering of messages adds to that of those before. Raises TemplateError if something of a
        message is missing in it, or something of what was before is said again."""
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
        return whole[len(head) :]

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


def _pieces(text: str) -> list[str]:
    """The text in parts of about _PIECE characters, cut at seams."""
    pieces, start = [], 0
    while len(text) - start > 2 * _PIECE and (seam := _SEAM.search(text, start + _PIECE)):
        pieces.append(text[start : seam.start()])
        start = seam.start()
    return [*pieces, text[start:]]


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


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()
