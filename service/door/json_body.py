"""Reads JSON bodies in bounded time and memory, and refuses a wrong field by its name."""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, ValidationError
from pydantic_core import from_json

from deltafront.service.errors import InvalidArgument, NotFound, cut, shown

UNSUPPORTED = "is not supported by this server: leave it out"
MAX_VALUES = 1 << 17
"""JSON values of a conversation, approximately. Each takes much more memory than its bytes."""
_MAX_ENTRIES = 256
_LONGEST_NAME = 64
_SEPARATORS = (b",", b":", b"[", b"{")
_QUOTE = ord('"')
_STRING_OR_REST = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[^"]++', re.DOTALL)


class NamedNotFound(NotFound):
    """A request field names something that does not exist. param, openai_code: as in OpenAI's errors."""

    param: ClassVar[str]
    openai_code: ClassVar[str]


class UnknownModel(NamedNotFound):
    param, openai_code = "model", "model_not_found"

    def __init__(self, wanted: str, served: str) -> None:
        super().__init__(f"the model {shown(wanted)} is not served here, but {served!r} is")


class NotJson(InvalidArgument):
    """The body's content type is not JSON."""

    def __init__(self, content_type: str) -> None:
        said = content_type[:_LONGEST_NAME]
        super().__init__("", f"content-type {said!r} is not read here: send application/json")


STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_T = TypeVar("_T")
_F = TypeVar("_F", bound=BaseModel)
Long = Annotated[list[_T], FailFast()]
"""A list of any length. pydantic lists every error of other lists, which takes a minute for a million."""


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which JSON may write as 16.0, too."""


@dataclass(frozen=True)
class BodyRules:
    """Rules for fields that a body's class does not declare.

    Args:
        labels: Fields that are accepted without effect.
        no_op_values: Fields that this service or one of its endpoints does not support, with the accepted
            values, which change nothing.
        refusals: The error messages for other values of these fields.
        long_fields: Fields that may have any number of entries.
    """

    labels: Collection[str]
    no_op_values: Mapping[str, Sequence[object]]
    refusals: Mapping[str, str] = field(default_factory=dict)
    long_fields: Collection[str] = ()

    def read(self, kind: type[_F], body: bytes, model: str, max_values: int = 0) -> _F:
        """Parse a body as a `kind`. Raises InvalidArgument, or UnknownModel if the body names another
        model."""
        content = json_object(body, max_values or MAX_VALUES)
        self._check_sizes(content)
        given = {
            name: value for name, value in content.items() if value is not None and name not in self.labels
        }
        for name in [name for name in given if name in self.no_op_values and name not in kind.model_fields]:
            value = given.pop(name)
            if not any(_same(value, no_op) for no_op in self.no_op_values[name]):
                raise InvalidArgument(name, self.refusals.get(name, UNSUPPORTED))
        try:
            fields = kind.model_validate(given)
        except ValidationError as error:
            raise _invalid(error, list(kind.model_fields)) from None
        if given.get("model", model) != model:
            raise UnknownModel(given["model"], model)
        return fields

    def _check_sizes(self, content: Mapping[str, object]) -> None:
        """Refuse values with too many entries, because pydantic lists every error, which may take seconds.
        Raises InvalidArgument."""
        if len(content) > _MAX_ENTRIES:
            raise InvalidArgument("", f"the body has {len(content)} fields: at most {_MAX_ENTRIES}")
        for name, value in content.items():
            large = isinstance(value, list | dict) and len(value) > _MAX_ENTRIES
            if large and name not in self.long_fields:
                raise InvalidArgument(name, f"has {len(value)} entries: at most {_MAX_ENTRIES}")  # type: ignore[arg-type]


def pick(choices: Mapping[str, _T], key: object) -> _T | None:
    """Look up any JSON value. Returns None if it is not among the choices."""
    return choices.get(key) if isinstance(key, str) else None


def show(value: object) -> str:
    """Quote the beginning of any JSON value for an error message."""
    return shown(value) if isinstance(value, str) else cut(repr(value), _LONGEST_NAME)


def json_object(body: bytes, max_values: int) -> dict[str, Any]:
    """Parse a JSON object of a bounded number of values. Raises InvalidArgument."""
    _check_values(body, max_values)
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidArgument("", f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument("", "the body must be a JSON object")
    return content


def _same(value: object, no_op: object) -> bool:
    """Compare JSON values: 1 equals 1.0, but not true."""
    return value == no_op and isinstance(value, bool) == isinstance(no_op, bool)


def _check_values(body: bytes, max_values: int) -> None:
    """Refuse a body with too many values before it is parsed. Raises InvalidArgument."""
    if sum(map(body.count, _SEPARATORS)) > max_values and count_values(body, max_values) > max_values:
        raise InvalidArgument("", f"the body holds too many values: at most about {max_values}")


def count_values(body: bytes, enough: int) -> int:
    """Count JSON values, approximately, until there are more than `enough`."""
    values = 0
    for part in _STRING_OR_REST.finditer(body):
        values += 1 if body[part.start()] == _QUOTE else sum(map(part.group().count, _SEPARATORS))
        if values > enough:
            break
    return values


def _invalid(invalid: ValidationError, known: list[str]) -> InvalidArgument:
    """Make an error that names the first wrong field. For a union, report the branches that matched
    the most."""
    errors = invalid.errors(include_url=False)
    of_field = [error for error in errors if error["loc"][0] == errors[0]["loc"][0]]
    deepest = max(len(_path(error["loc"])) for error in of_field)
    first, *others = [error for error in of_field if len(_path(error["loc"])) == deepest]
    path = _path(first["loc"])
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "''"
    if first["type"] == "missing":
        return InvalidArgument(name, "is missing")
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(cut(name, _LONGEST_NAME), known, n=1)
        return InvalidArgument(name, f"is not known; did you mean {near[0]!r}?" if near else UNSUPPORTED)
    same = [error["msg"] for error in (first, *others) if _path(error["loc"]) == path]
    expected = " or ".join(message.removeprefix("Input should be ") for message in same)
    return InvalidArgument(name, f"must be {expected}" if first["msg"] != expected else expected)


def _path(loc: tuple[int | str, ...]) -> list[int | str]:
    return [part for part in loc if part not in ("str", "list[str]")]
