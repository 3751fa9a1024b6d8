"""Converts tekken.json to a tokenizer.json. It is the only tokenizer in some of Mistral's repositories.

Its tokens are byte strings with ranks. The pair that merges into the token of the lowest rank merges first.
Control tokens have the first ids (mistral-common, `tokens/tokenizers/tekken.py`).
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltafront.workers.model.directory.model_files import ModelError, read_json

FILE = "tekken.json"
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]"
    "{% elif message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only system, user and assistant have messages here') }}{% endif %}"
    "{% endfor %}"
)
"""The chat template of version 7 of Mistral's tokenizers, without tools."""
_PLAIN = {*range(33, 127), *range(161, 173), *range(174, 256)}
"""Bytes that a byte-level vocabulary writes as the same character. The others become characters from 256
on."""


def tekken_of(directory: Path) -> Tekken:
    """Read a model's tekken.json, once per process, since it takes half a second. Raises ModelError."""
    path = directory / FILE
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read(path: Path, _changed_ns: int) -> Tekken:
    return Tekken(path)


class Tekken:
    """The content of a tekken.json. Raises ModelError if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_json(self.path)
        try:
            config = content["config"]
            listed = content.get("special_tokens")
            special = {int(one["rank"]): (one["token_str"], bool(one["is_control"])) for one in listed or []}
            before = int(config["default_num_special_tokens"])
            self._pattern = str(config["pattern"])
            vocabulary = content["vocab"][: int(config["default_vocab_size"]) - before]
            self._tokens = [base64.b64decode(one["token_bytes"]) for one in vocabulary]
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{self.path} cannot be read as a tokenizer: {error!r}") from None
        if not listed:
            raise ModelError(f"{self.path} lists no control tokens: take the model with its tokenizer.json")
        ranks = [one["rank"] for one in vocabulary]
        if [*special] != [*range(len(special))] or ranks != [*range(len(ranks))] or len(special) > before:
            raise ModelError(f"{self.path}: its tokens are not numbered from 0 without a gap")
        unused = {id_: (f"<SPECIAL_{id_}>", True) for id_ in range(len(special), before)}
        self.special = special | unused
        """The special tokens by id: the text, and whether it is a control token, which answers do not
        show."""

    @property
    def has_system_prompts(self) -> bool:
        return any(text == "[SYSTEM_PROMPT]" for text, _ in self.special.values())

    def added_tokens(self) -> list[dict[str, Any]]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": id_, "content": text, **flags, "special": is_control}
            for id_, (text, is_control) in self.special.items()
        ]

    def tokenizer_json(self) -> dict[str, Any]:
        letters, before = _letters(), len(self.special)
        texts = ["".join(letters[byte] for byte in token) for token in self._tokens]
        vocabulary = {text: id_ for id_, (text, _) in self.special.items()}
        vocabulary |= {text: before + rank for rank, text in enumerate(texts)}
        if len(vocabulary) != before + len(texts):
            raise ModelError(f"{self.path} has a control token's text as another token, too")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        byte_level["use_regex"] = False
        words = {"type": "Split", "pattern": {"Regex": self._pattern}, "behavior": "Isolated"}
        return {
            "version": "1.0",
            "added_tokens": self.added_tokens(),
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words | {"invert": False}, byte_level]},
            "post_processor": _begins(vocabulary),
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": _merges(texts),
                "ignore_merges": True,
            },
        }


def _letters() -> dict[int, str]:
    others = [byte for byte in range(256) if byte not in _PLAIN]
    moved = {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {byte: moved.get(byte, chr(byte)) for byte in range(256)}


def _merges(texts: list[str]) -> list[list[str]]:
    """List all pairs that merge into a token, in the order of the tokens' ranks."""
    known = frozenset(texts)
    return [
        [text[:cut], text[cut:]]
        for text in texts
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]


def _begins(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    def opened(sequence: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": kind}}
        return [{"SpecialToken": {"id": BOS, "type_id": kind}}, text]

    return {
        "type": "TemplateProcessing",
        "single": opened("A", 0),
        "pair": opened("A", 0) + opened("B", 1),
        "special_tokens": {BOS: {"id": BOS, "ids": [vocabulary[BOS]], "tokens": [BOS]}},
    }
