"""Converts Anthropic's messages, whose contents are blocks, to messages of a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deltafront.service.door.edges.tools import call_of, check_call_id
from deltafront.service.door.json_body import pick, show
from deltafront.service.errors import InvalidArgument

_RETAIN_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
_MAX_BLOCKS = 4096
_BETWEEN = "\n"
"""The separator between two text blocks."""
_BILLING = "x-anthropic-billing-header:"
"""A block of Claude Code's system prompt that only Anthropic needs. It is dropped, because it differs with
each request and would prevent prefix hits."""
_THOUGHTS = ("thinking", "redacted_thinking")


class BlockReader:
    """Makes messages of a chat template from Anthropic's.

    Attributes:
        retain_s: Seconds for which `cache_control` asks to cache the prompt; None without it.
    """

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.retain_s: float | None = None

    def note_cache(self, path: str, given: object) -> None:
        """Set `retain_s` to at least the ttl of a `cache_control`, if one is given. Raises
        InvalidArgument."""
        if given is None:
            return
        retain_s = pick(_RETAIN_S, given.get("ttl") or "5m") if isinstance(given, Mapping) else None
        if retain_s is None:
            raise InvalidArgument(path, "must be of type ephemeral, with a ttl of 5m or 1h")
        self.retain_s = max(self.retain_s or 0.0, retain_s)

    def add_system(self, content: object) -> None:
        """Add the request's field `system` as a system message, without its billing header. Raises
        InvalidArgument."""
        texts = [text for text in self._texts("system", content) if not text.startswith(_BILLING)]
        if any(texts):
            self.messages.append({"role": "system", "content": _BETWEEN.join(texts)})

    def add(self, path: str, message: Mapping[str, Any]) -> None:
        """Add a message. Raises InvalidArgument."""
        role, content = message.get("role"), message.get("content")
        for name in message.keys() - {"role", "content"}:
            raise InvalidArgument(f"{path}.{name}", "is not known")
        if role == "user":
            self._add_user(f"{path}.content", content)
        elif role == "assistant":
            self._add_assistant(f"{path}.content", content)
        elif role == "system":
            text = _BETWEEN.join(self._texts(f"{path}.content", content))
            self.messages.append({"role": "system", "content": text})
        else:
            raise InvalidArgument(f"{path}.role", f"{show(role)} must be user or assistant")

    def _add_user(self, path: str, content: object) -> None:
        """Add a user's message. Tool results become separate messages, in the order of the blocks."""
        texts = list[str]()
        results = 0
        for at, block in self._blocks(path, content):
            if block["type"] == "tool_result":
                self._say(texts)
                self._add_result(at, block)
                results += 1
            else:
                texts.append(self._text(at, block, "text and tool_result"))
        if texts or not results:
            self._say(texts or [""])

    def _say(self, texts: list[str]) -> None:
        if texts:
            self.messages.append({"role": "user", "content": _BETWEEN.join(texts)})
            texts.clear()

    def _add_result(self, path: str, block: Mapping[str, Any]) -> None:
        text = _BETWEEN.join(self._texts(f"{path}.content", block.get("content") or ""))
        call_id = check_call_id(f"{path}.tool_use_id", block.get("tool_use_id"))
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _add_assistant(self, path: str, content: object) -> None:
        texts, calls = list[str](), list[Mapping[str, Any]]()
        for at, block in self._blocks(path, content):
            if block["type"] == "tool_use":
                given = block.get("input")
                if not isinstance(given, dict):
                    raise InvalidArgument(f"{at}.input", "must be a JSON object")
                call_id = check_call_id(f"{at}.id", block.get("id"))
                calls.append(call_of(at, block.get("name"), given, call_id))
            elif block["type"] not in _THOUGHTS:  # earlier reasoning is not prefilled
                texts.append(self._text(at, block, "text, thinking and tool_use"))
        called = {"tool_calls": calls} if calls else {}
        self.messages.append({"role": "assistant", "content": _BETWEEN.join(texts), **called})

    def _texts(self, path: str, content: object) -> list[str]:
        return [self._text(at, block, "text") for at, block in self._blocks(path, content)]

    def _text(self, path: str, block: Mapping[str, Any], kinds: str) -> str:
        if block["type"] != "text":
            raise InvalidArgument(f"{path}.type", f"{show(block['type'])} is not read here, but {kinds}")
        if not isinstance(block.get("text"), str):
            raise InvalidArgument(f"{path}.text", "must be text")
        return str(block["text"])

    def _blocks(self, path: str, content: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each block with its path. A plain text is one block."""
        if isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
        if not isinstance(content, list):
            raise InvalidArgument(path, "must be text or a list of blocks")
        if len(content) > _MAX_BLOCKS:
            raise InvalidArgument(path, f"has {len(content)} blocks: at most {_MAX_BLOCKS}")
        for index, block in enumerate(content):
            at = f"{path}[{index}]"
            if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
                raise InvalidArgument(at, "must be a block with a type")
            self.note_cache(f"{at}.cache_control", block.get("cache_control"))
            yield at, block
