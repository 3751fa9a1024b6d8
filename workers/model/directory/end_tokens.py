"""The tokens that end an answer. Fine-tuned models often end with another token than config.json says;
ChatML's `<|im_end|>` may be in the chat template alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from .json_files import ModelError, read_json
from .tokenizer_files import TokenizerFiles

_SAID = "\N{ASTERISM}said\N{ASTERISM}"


def end_tokens(directory: Path) -> tuple[int, ...]:
    """Return the ids of `eos_token` and of the token behind an assistant's message in the chat template.
    Raises ModelError."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ()
    files, state = TokenizerFiles.read(directory), read_json(path)
    try:
        added = {token["content"]: int(token["id"]) for token in state.get("added_tokens") or []}
        ids = {**_vocabulary(state), **{token.content: id_ for id_, token in files.added.items()}, **added}
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} is not a tokenizer: {error!r}") from None
    eos = files.special.get("eos_token", "")
    markers = {*added, *(token.content for token in files.added.values()), eos} - {""}
    ends = (eos, _marker(files, markers))
    return tuple(dict.fromkeys(ids[end] for end in ends if end in ids))


def _vocabulary(state: Mapping[str, Any]) -> dict[str, int]:
    """A Unigram model lists pairs in the order of ids."""
    vocabulary = (state.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        return {piece: number for number, (piece, _score) in enumerate(vocabulary)}
    return dict(vocabulary)


def _marker(files: TokenizerFiles, tokens: set[str]) -> str:
    messages = ({"role": "user", "content": "\N{ASTERISM}"}, {"role": "assistant", "content": _SAID})
    if files.template is None:
        return ""
    try:
        rendered = files.template.render(messages, False, files.special)
    except jinja2.TemplateError:
        return ""
    _before, separator, after = rendered.rpartition(_SAID)
    after = after.lstrip() if separator else ""
    return max((token for token in tokens if after.startswith(token)), key=len, default="")
