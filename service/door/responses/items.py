"""Translates the items of the Responses API to messages of a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from deltafront.service.door.edges.tools import call_of, check_call_id
from deltafront.service.door.json_body import show
from deltafront.service.door.openai.tools import ArgumentReader
from deltafront.service.errors import InvalidArgument

Message = Mapping[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The key of the text in each kind of text part."""
_MAX_PARTS = 4096
_BETWEEN = "\n"
"""The separator between two parts of a text."""


def read_items(given: object) -> list[Message]:
    """Return the messages of the field `input`. Raises InvalidArgument."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidArgument("input", "must be text or a list of items")
    messages, reader = list[Message](), ArgumentReader()
    for index, item in enumerate(given):
        path = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise InvalidArgument(path, "must be an item")
        message = _message(path, item, reader)
        if message is not None:
            messages.append(message)
    return messages


def joined(messages: Iterable[Message]) -> list[Message]:
    """Make one message of consecutive texts and tool calls of the assistant."""
    runs = [(role, list(run)) for role, run in groupby(messages, itemgetter("role"))]
    return [one for role, run in runs for one in ([_one(run)] if role == "assistant" else run)]


def _one(run: Sequence[Message]) -> Message:
    contents = [message["content"] for message in run if message["content"]]
    calls = [call for message in run for call in message.get("tool_calls", ())]
    called = {"tool_calls": calls} if calls else {}
    return {"role": "assistant", "content": _BETWEEN.join(contents), **called}


def with_instructions(instructions: str | None, messages: list[Message]) -> list[Message]:
    """Put the instructions before the messages. System messages at the beginning become one, because many
    templates refuse a second one."""
    rest = [{"role": "system", "content": instructions}, *messages] if instructions else messages
    count = next((n for n, one in enumerate(rest) if one["role"] not in ("system", "developer")), len(rest))
    if count < 2:
        return rest
    said = "\n\n".join(one["content"] for one in rest[:count])
    return [{"role": "system", "content": said}, *rest[count:]]


def _message(path: str, item: Mapping[str, Any], reader: ArgumentReader) -> Message | None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidArgument(f"{path}.role", f"{show(role)} must be one of {', '.join(_ROLES)}")
        return {"role": role, "content": _text(f"{path}.content", item.get("content"))}
    if kind == "function_call":
        arguments = reader.read(f"{path}.arguments", item.get("arguments"))
        call_id = check_call_id(f"{path}.call_id", item.get("call_id"))
        call = call_of(path, item.get("name"), arguments, call_id)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        call_id = check_call_id(f"{path}.call_id", item.get("call_id"))
        return {
            "role": "tool",
            "tool_call_id": call_id,
            "content": _text(f"{path}.output", item.get("output")),
        }
    if kind == "reasoning":  # earlier reasoning is not prefilled
        return None
    known = "message, function_call, function_call_output and reasoning"
    raise InvalidArgument(f"{path}.type", f"{show(kind)} is not read here, but {known}")


def _text(path: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(path, "must be text or a list of parts")
    if len(content) > _MAX_PARTS:
        raise InvalidArgument(path, f"has {len(content)} parts: at most {_MAX_PARTS}")
    return _BETWEEN.join(_part(f"{path}[{index}]", part) for index, part in enumerate(content))


def _part(path: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXTS:
        raise InvalidArgument(
            f"{path}.type", f"{show(kind)} is not read here, but input_text and output_text"
        )
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise InvalidArgument(f"{path}.{_TEXTS[kind]}", "must be text")
    return text
