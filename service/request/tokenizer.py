"""Text and chat messages to token ids and back, with the `tokenizers` library alone (no transformers).

Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a model directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

Message = Mapping[str, str]

_PIECE = 16_384
"""Characters that one thread tokenises of a long text."""
_SEAM = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
"""Where a long text may be cut: before a single space between two letters."""
_PROBES = ("ab cd ef", "It's a b", "3d Print x", "ends. Then we", "TWO words Of a")
_MARKED = re.compile("\N{ASTERISM}([^\N{ASTERISM}]+)\N{ASTERISM}")
"""What stands for a message's content where only its place matters."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class TemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


class TextTokenizer:
    """Thread-safe; encoding releases the interpreter lock, so call it in a thread."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, special: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._divisible = _splits_at_spaces(tokenizer)
        self._special = dict(special)
        self._template = None if template is None else _environment().from_string(template)

    @classmethod
    def load(cls, directory: Path) -> TextTokenizer:
        """Raises FileNotFoundError or ValueError for a directory without a usable tokenizer."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: the model directory has no tokenizer")
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config_path = directory / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name)))}
        return cls(tokenizer, _template(directory, config), special)

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
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=answer,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from None


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


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return None if template is None else str(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; for serving it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The dialect that chat templates are written in, without access to anything outside."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
