"""Checks tools and tool calls of all protocols, which name them differently."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from deltafront.service.door.json_body import show
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.calls import Tools

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
CHOICES = ("auto", "required", "none")


def function_of(path: str, given: Mapping[str, Any], schema: str = "parameters") -> Mapping[str, Any]:
    """Check a function, and return its name, description and parameters. Raises InvalidArgument.

    Args:
        schema: The key of its parameters.
    """
    name, description, parameters = given.get("name"), given.get("description"), given.get(schema)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(f"{path}.name", "must be 1 to 64 letters, digits, '_', '.' or '-'")
    if name in CHOICES:
        raise InvalidArgument(f"{path}.name", f"cannot be {name}")
    if not (description is None or isinstance(description, str)):
        raise InvalidArgument(f"{path}.description", "must be text")
    if parameters is not None:
        _check_parameters(f"{path}.{schema}", parameters)
    given = {"name": name, "description": description, "parameters": parameters}
    return {key: value for key, value in given.items() if value is not None}


def _check_parameters(path: str, schema: object) -> None:
    """Check the keys of a tool's parameter schema that tool-call formats read: type, properties, required.
    Raises InvalidArgument."""
    if not isinstance(schema, Mapping):
        raise InvalidArgument(path, "must be a JSON schema")
    if schema.get("type", "object") != "object":
        raise InvalidArgument(f"{path}.type", f"{show(schema['type'])} must be object")
    for name, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(name) or kind(), kind):
            raise InvalidArgument(f"{path}.{name}", f"must be {'a list' if kind is list else 'an object'}")


def choose(
    functions: Sequence[Mapping[str, Any]],
    choice: object,
    parallel: bool,
    named: bool = False,
    prefix: str = "",
) -> Tools | None:
    """Return the tools that the model may call; None without any. Raises InvalidArgument.

    Args:
        choice: `none`, `auto` or `required`; with `named` the name of one function.
        prefix: Stands before the fields' names in errors.
    """
    names = [function["name"] for function in functions]
    if named and choice not in names:
        raise InvalidArgument(f"{prefix}tool_choice", f"{show(choice)} must name a function of tools")
    if choice == "required" and not functions:
        raise InvalidArgument(f"{prefix}tool_choice", "is required without tools: send some")
    if len(set(names)) < len(names):
        raise InvalidArgument(f"{prefix}tools", "has two functions of one name")
    if choice == "none" or not functions:
        return None
    return Tools(tuple(functions), str(choice), parallel and not named)


def call_of(path: str, name: object, arguments: object, call_id: str) -> dict[str, Any]:
    """Make a tool call for the chat template, with its arguments as a JSON object. Raises InvalidArgument."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(f"{path}.name", "must be the name of a function")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def check_call_id(path: str, given: object) -> str:
    """Check the id of a tool call. Raises InvalidArgument."""
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise InvalidArgument(path, "must be the id of a call: 1 to 64 letters, digits, '_', '.', ':' or '-'")
    return given
