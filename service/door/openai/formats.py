"""Parses the requested format of an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from collections.abc import Mapping
from typing import Any

from deltafront.service.errors import InvalidArgument, shown
from deltafront.service.request.calls import Constraint

_ANY_OBJECT = {"type": "object"}


def read_constraint(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> Constraint | None:
    """Return the constraint that either field requests. Raises InvalidArgument."""
    constraint = None if response_format is None else _of_format(response_format)
    if structured_outputs is None:
        return constraint
    if constraint is not None:
        raise InvalidArgument("structured_outputs", "contradicts response_format: give one of them")
    return _of_outputs(structured_outputs)


def _of_format(given: Mapping[str, Any]) -> Constraint | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        said = shown(kind) if isinstance(kind, str) else repr(kind)[:64]
        raise InvalidArgument("response_format.type", f"{said} must be text, json_object or json_schema")
    # llama.cpp's clients put a schema beside json_object.
    wrapped, path = given.get("json_schema"), "response_format.json_schema.schema"
    if kind == "json_object":
        wrapped, path = given, "response_format.schema"
    schema = wrapped.get("schema", _ANY_OBJECT) if isinstance(wrapped, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidArgument(path, "must be a JSON schema")
    return Constraint(json_schema=json.dumps(schema))


def _of_outputs(given: Mapping[str, Any]) -> Constraint | None:
    rules = {name: rule for name, rule in given.items() if rule is not None and rule is not False}
    if len(rules) != 1:
        raise InvalidArgument("structured_outputs", "must have one of json, regex, choice, grammar")
    ((name, rule),) = rules.items()
    path = f"structured_outputs.{name}"
    if name == "json" and isinstance(rule, Mapping):
        return Constraint(json_schema=json.dumps(rule))
    if name == "json_object" and rule is True:
        return Constraint(json_schema=json.dumps(_ANY_OBJECT))
    if name == "choice":
        return Constraint(choice=_choice(path, rule))
    if name in ("json", "regex", "grammar") and isinstance(rule, str):
        rules = {"json_schema" if name == "json" else name: rule}
        return Constraint(rules.get("json_schema"), rules.get("regex"), rules.get("grammar"))
    raise InvalidArgument(path, "is not one of json, json_object, regex, choice and grammar with its value")


def _choice(path: str, given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise InvalidArgument(path, "must be a list of texts")
    return tuple(given)
