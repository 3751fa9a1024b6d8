"""Turns the prompts and tools of both clients into the server's form of a conversation."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from deltafront.service.errors import InvalidArgument
from deltafront.service.request import calls
from deltafront.service.request.answers import ToolCall

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or messages in OpenAI's form, whose contents are text. `tool_calls` may hold an answer's
`tool_calls`."""
_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}
_KEYS_OF_ROLES = {"assistant": "tool_calls", "tool": "tool_call_id"}
"""The key that a message of this role may have beside role and content."""


def make_prompt(prompt: PromptLike, name: str, given: Mapping[str, Any]) -> calls.Prompt:
    """Make a prompt. Raises InvalidArgument for a list of anything but ids or whole messages.

    Args:
        name: The field's name in errors.
        given: The request's options.
    """
    special_tokens = given.get("special_tokens", "text")
    if special_tokens not in list(calls.SpecialTokens):
        raise InvalidArgument("special_tokens", f"{special_tokens!r} is not text or parse")
    if isinstance(prompt, str):
        return calls.Prompt(text=prompt, special_tokens=calls.SpecialTokens(special_tokens))
    if isinstance(prompt, bytes | bytearray):
        raise InvalidArgument(name, "is bytes: decode a text, and give token ids as numbers")
    parts = list(prompt)
    if any(isinstance(part, Mapping) for part in parts):
        messages = tuple(_message(f"{name}.messages", index, part) for index, part in enumerate(parts))
        variables = given.get("chat_template_kwargs") or {}
        return calls.Prompt(messages=messages, chat_template_kwargs=variables, tools=_tools(given))
    try:
        return calls.Prompt(token_ids=calls.pack_ids([operator.index(part) for part in parts]))  # type: ignore[arg-type]
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"{name}.token_ids", f"{error}: give whole numbers from 0 on") from None


def check_tools(given: Mapping[str, Any], last: calls.Prompt | None) -> None:
    """Refuse tools that the chat template cannot show to the model. Raises InvalidArgument.

    Args:
        last: The prompt or appended text before the answer.
    """
    if given.get("tools") and (last is None or last.messages is None):
        raise InvalidArgument("tools", "need messages: give the prompt, or what is appended, as messages")


def _message(path: str, index: int, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgument(path, "holds something else beside messages")
    path = f"{path}[{index}]"
    sent = {key: value for key, value in message.items() if value is not None}
    if sent.get("tool_calls"):
        sent.setdefault("content", "")
    for key in ("role", "content"):
        if not isinstance(sent.get(key), str):
            raise InvalidArgument(f"{path}.{key}", "must be text")
    for key in sent.keys() - {"role", "content", _KEYS_OF_ROLES.get(sent["role"])}:
        raise InvalidArgument(f"{path}.{key}", "must be left out")
    if "tool_calls" in sent:
        sent["tool_calls"] = _calls(f"{path}.tool_calls", sent["tool_calls"])
    return sent


def _calls(path: str, given: Any) -> list[Mapping[str, Any]]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidArgument(path, "must be a list of calls")
    return [_call(f"{path}[{index}]", call) for index, call in enumerate(given)]


def _call(path: str, call: Any) -> Mapping[str, Any]:
    if isinstance(call, ToolCall):
        return {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidArgument(path, "must be a ToolCall, or a call of type function in OpenAI's form")
    said = {key: function.get(key) for key in ("name", "arguments")}
    return {"id": call.get("id"), "function": said}


def _tools(given: Mapping[str, Any]) -> calls.Tools | None:
    tools, choice = given.get("tools") or (), given.get("tool_choice") or "auto"
    if not tools and choice == "auto":
        return None
    if not isinstance(choice, str):
        raise InvalidArgument("tool_choice", "must be auto, required, none or the name of a tool")
    functions = tuple(_function(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    return calls.Tools(functions, choice, given.get("parallel_tool_calls", True))


def _function(path: str, tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or function.keys() - _FUNCTION_KEYS:
        known = ", ".join(sorted(_FUNCTION_KEYS))
        raise InvalidArgument(path, f"must be of type function, whose function has only {known}")
    return function
