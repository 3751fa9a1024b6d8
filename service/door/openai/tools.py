"""Parses a chat's tools, and the tool calls in its earlier messages."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from deltafront.service.door.edges.tools import call_of, check_call_id, choose, function_of
from deltafront.service.door.json_body import MAX_VALUES, count_values
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.calls import Tools

_FIELDS = {"name", "description", "parameters", "strict"}


def read_tools(tools: list[Any], choice: object, parallel: bool) -> Tools | None:
    """Return the tools that the model may call; None if it may call none. Raises InvalidArgument."""
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    if isinstance(choice, Mapping):
        named = choice.get("function") if choice.get("type") == "function" else None
        return choose(functions, named.get("name") if isinstance(named, Mapping) else None, False, named=True)
    if choice not in ("none", "auto", "required"):
        raise InvalidArgument("tool_choice", "must be none, auto, required or a function of tools")
    return choose(functions, choice, parallel)


def _function(path: str, tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or function.keys() - _FIELDS:
        raise InvalidArgument(path, f"must be of type function, with {', '.join(sorted(_FIELDS))}")
    return function_of(f"{path}.function", function)


class ArgumentReader:
    """Parses the arguments of a body's tool calls. All arguments together may have at most the number of
    values that a body may have."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def read(self, path: str, given: object) -> dict[str, Any]:
        """Parse a call's arguments, which are JSON as text. Raises InvalidArgument."""
        text = given or "{}"
        if isinstance(text, str):
            self._left -= count_values(text.encode(), self._left)
        if self._left < 0:
            raise InvalidArgument(path, f"has too many values: all calls have at most about {MAX_VALUES}")
        try:
            arguments = from_json(text, allow_inf_nan=False)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidArgument(path, "must be a JSON object as text")
        return arguments


def read_calls(path: str, calls: object, reader: ArgumentReader) -> list[dict[str, Any]]:
    """Parse an assistant's tool calls, with arguments as JSON, for the chat template. Raises
    InvalidArgument."""
    if not isinstance(calls, list):
        raise InvalidArgument(path, "must be a list")
    return [_call(f"{path}[{index}]", call, reader) for index, call in enumerate(calls)]


def _call(path: str, call: object, reader: ArgumentReader) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) and call.get("type") == "function" else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidArgument(path, "must be a call of type function")
    arguments = reader.read(f"{path}.function.arguments", function.get("arguments"))
    number = check_call_id(f"{path}.id", call.get("id"))
    return call_of(f"{path}.function", function.get("name"), arguments, number)
