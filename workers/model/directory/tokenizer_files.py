"""Reads the files that accompany tokenizer.json, as transformers does, and finds the end-of-sequence
tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from deltafront.workers.model.directory.chat_template import ChatTemplate, check_template
from deltafront.workers.model.directory.model_files import (
    ModelError,
    broken,
    check_file,
    read_json,
    read_json_or_empty,
)
from deltafront.workers.model.weights import tekken

TOKENIZER = "tokenizer.json"
_CONFIG, _ADDED, _TEMPLATE = "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"
_SAID = "\N{ASTERISM}said\N{ASTERISM}"


@dataclass(frozen=True)
class AddedToken:
    """An added token, with the fields of `tokenizers.AddedToken`."""

    content: str
    special: bool = False
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of the files that accompany tokenizer.json.

    Attributes:
        special: Special tokens by name, such as `bos_token`.
        template: The chat template, if there is one.
        added: Added tokens by id.
    """

    special: dict[str, str]
    template: ChatTemplate | None
    added: Mapping[int, AddedToken]

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read the files that exist. Raises ModelError if one cannot be used."""
        config = _of_tekken(directory) | read_json_or_empty(directory / _CONFIG)
        named = read_json_or_empty(directory / "special_tokens_map.json")
        special = _named(config if "added_tokens_decoder" in config else {**config, **named})
        special = {**_named(named), **special}
        return cls(special, _template(directory, config), _added(directory, config, special))


def has_tokenizer(directory: Path) -> bool:
    return (directory / TOKENIZER).is_file() or (directory / tekken.FILE).is_file()


def tokenizer_json(directory: Path) -> str:
    """Return the content of tokenizer.json, converted from tekken.json if there is only that. Raises
    ModelError."""
    path = directory / TOKENIZER
    if is_tekken(directory):
        return json.dumps(tekken.tekken_of(directory).tokenizer_json())
    return _read_text(path)


def is_tekken(directory: Path) -> bool:
    return not (directory / TOKENIZER).is_file() and (directory / tekken.FILE).is_file()


def _of_tekken(directory: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json that corresponds to tekken.json."""
    if not is_tekken(directory):
        return {}
    names = {"bos_token": tekken.BOS, "eos_token": tekken.EOS}
    template = {"chat_template": tekken.CHAT_TEMPLATE}
    return names | (template if tekken.tekken_of(directory).has_system_prompts else {})


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(key), dict):
            tokens |= config[key]
    return {key: text for key, value in tokens.items() if (text := _text(value))}


def _text(token: Any) -> str:
    """Return the text of a token, which is a string or an object with `content`; empty for other values."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    path, source = _template_source(directory, config)
    if source is None:
        return None
    try:
        with broken(path):
            return ChatTemplate(str(source))
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"{path}: the chat template is broken in its line {error.lineno}: {error.message}: mend it, or "
            "take the file of another copy of this model"
        ) from None


def _template_source(directory: Path, config: Mapping[str, Any]) -> tuple[Path, Any]:
    path, source = directory / _CONFIG, config.get("chat_template")
    if (directory / _TEMPLATE).is_file():
        path = directory / _TEMPLATE
        source = _read_text(path)
    return path, _default(path, source) if isinstance(source, list) else source


def check_chat_template(directory: Path) -> None:
    """Raise ModelError if the chat template takes too much time or memory (`check_template`). Call this
    before anything renders it."""
    config = _of_tekken(directory) | read_json_or_empty(directory / _CONFIG)
    path, source = _template_source(directory, config)
    if source is None:
        return
    if reason := check_template(str(source), _named(config)):
        raise ModelError(f"{path}: the chat template cannot be used: {reason}")


def _read_text(path: Path) -> str:
    try:
        check_file(path)
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text: {error}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _default(path: Path, templates: list[Any]) -> str | None:
    try:
        return {entry["name"]: str(entry["template"]) for entry in templates}.get("default")
    except (TypeError, KeyError):
        raise ModelError(f"{path}: chat_template must be text, or objects of name and template") from None


def _added(
    directory: Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> Mapping[int, AddedToken]:
    """Return added tokens by id. added_tokens.json has no flags: a token there is special if the other files
    list it as such."""
    added: dict[int, AddedToken] = {}
    several = (config.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens"))
    listed = {_text(token) for tokens in several if isinstance(tokens, list) for token in tokens}
    named = listed.union(special.values())
    try:
        for content, number in read_json_or_empty(directory / _ADDED).items():
            is_named = content in named
            added[int(number)] = AddedToken(content, special=is_named, normalized=not is_named)
        for number, about in (config.get("added_tokens_decoder") or {}).items():
            flags = {key: about[key] for key in vars(AddedToken("")) if key in about}
            added[int(number)] = AddedToken(**flags)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{directory}: {_ADDED} or added_tokens_decoder is malformed: {error}") from None
    return dict(sorted(added.items()))


CHANNEL = "<|channel|>"
"""The marker of templates that write messages in gpt-oss's channels."""


def end_tokens(directory: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer. Raises ModelError.

    These are `eos_token` and the token that the chat template puts after an assistant's message. ChatML's
    `<|im_end|>` may appear only in the template.
    """
    path = directory / TOKENIZER
    if not has_tokenizer(directory):
        return ()
    files = TokenizerFiles.read(directory)
    mistrals = tekken.tekken_of(directory).added_tokens() if is_tekken(directory) else None
    state = read_json(path) if mistrals is None else {"added_tokens": mistrals}
    try:
        added = {token["content"]: int(token["id"]) for token in state.get("added_tokens") or []}
        beside = {token.content: id_ for id_, token in files.added.items()}
        ids = {**_vocabulary(state), **beside, **added}
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} is not a tokenizer: {error!r}") from None
    eos = files.special.get("eos_token", "")
    ends = (eos, _marker(files, {*added, *beside, eos} - {""}))
    return tuple(dict.fromkeys(ids[end] for end in ends if end in ids))


def _vocabulary(state: Mapping[str, Any]) -> dict[str, int]:
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
    if CHANNEL in files.template.source:  # `<|end|>` ends a message, and an answer may have several
        tokens = tokens - {"<|end|>"}
    return max((token for token in tokens if after.startswith(token)), key=len, default="")
