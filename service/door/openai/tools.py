"""Parses a chat's tools, and the tool calls in its earlier messages."""

import json
import re
from collections.abc import Mapping
from typing import Any

from deltafront.service.errors import InvalidArgument
from deltafront.service.request.calls import Tools

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_FIELDS = {"name", "description", "parameters", "strict"}


def read_tools(tools: list[Any], choice: object, parallel: bool) -> Tools | None:
    """Return the tools that the model may call; None without any. Raises InvalidArgument."""
    functions = tuple(_function(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    names = [function["name"] for function in functions]
    wanted = choice
    if isinstance(choice, Mapping):
        named = choice.get("function")
        wanted = (
            named.get("name") if choice.get("type") == "function" and isinstance(named, Mapping) else None
        )
        if wanted not in names:
            raise InvalidArgument("tool_choice", "must name a function of tools")
    elif choice not in ("none", "auto", "required"):
        raise InvalidArgument("tool_choice", "must be none, auto, required or a function of tools")
    if wanted == "required" and not functions:
        raise InvalidArgument("tool_choice", "is required without tools: send some")
    if len(set(names)) < len(names):
        raise InvalidArgument("tools", "has two functions of one name")
    if wanted == "none" or not functions:
        return None
    return Tools(functions, str(wanted), parallel and not isinstance(choice, Mapping))


def _function(path: str, tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or function.keys() - _FIELDS:
        raise InvalidArgument(path, f"must be of type function, with {', '.join(sorted(_FIELDS))}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(f"{path}.function.name", "must be 1 to 64 letters, digits, '_', '.' or '-'")
    if name in ("auto", "required", "none"):
        raise InvalidArgument(f"{path}.function.name", f"cannot be {name}")
    if not (parameters is None or isinstance(parameters, Mapping)):
        raise InvalidArgument(f"{path}.function.parameters", "must be a JSON schema")
    return {key: value for key, value in function.items() if key != "strict" and value is not None}


def read_calls(path: str, calls: object) -> list[dict[str, Any]]:
    """Parse an assistant's tool calls, with arguments as JSON, for the chat template. Raises
    InvalidArgument."""
    if not isinstance(calls, list):
        raise InvalidArgument(path, "must be a list")
    return [_call(f"{path}[{index}]", call) for index, call in enumerate(calls)]


def _call(path: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) and call.get("type") == "function" else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidArgument(path, "must be a call of type function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(f"{path}.function.name", "must be the name of a function")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidArgument(f"{path}.function.arguments", "must be a JSON object as text")
    known = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id(f"{path}.id", call.get("id")), **known}


def call_id(path: str, given: object) -> str:
    """Parse the id of a tool call. Raises InvalidArgument."""
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise InvalidArgument(path, "must be the id of a call: 1 to 64 letters, digits, '_', '.', ':' or '-'")
    return given
