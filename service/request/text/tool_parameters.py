"""Tool calls whose arguments are not JSON, but a series of marked parameters, with strings unquoted.

Qwen3-Coder and GLM use this format. The grammar has a function's parameters in the order of its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deltafront.service.request.text.detokenize import overlap
from deltafront.workers.model.grammars import GrammarError

Schema = Mapping[str, Any]

_NAME = re.compile(r"[^<>\r\n]{1,128}")
"""Names of parameters that cannot be confused with the marks around them."""
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""The rest of a JSON string, without its closing quote."""


@dataclass(frozen=True)
class ParameterFormat:
    """A model's format of one parameter: `key`, in which KEY stands for its name, then the value, then `end`.
    `tail` ends the call."""

    key: str
    end: str
    tail: str

    @cached_property
    def key_pattern(self) -> re.Pattern[str]:
        before, after = (re.escape(part) for part in self.key.split("KEY"))
        return re.compile(f"{before}(.+?){after}")

    @cached_property
    def quote_or_end(self) -> re.Pattern[str]:
        return re.compile(f'"|{re.escape(self.end)}')


def parameter_rules(
    form: ParameterFormat, name: str, schema: Schema, options: Schema, words: Callable[[str], str]
) -> tuple[str, list[str]]:
    """Make the Lark grammar of a function's parameters and the tail of its call.

    Args:
        name: Begins the names of rules.
        schema: The function's parameters.
        options: llguidance's, for values in JSON.
        words: Writes a text in Lark.

    Returns:
        The expression that follows the call's head, and the rules that this expression names.

    Raises:
        GrammarError: The model's calls cannot hold a parameter's name.
    """
    sequence, rules = list[str](), list[str]()
    required = schema.get("required") or ()
    for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
        if not _NAME.fullmatch(key):
            raise GrammarError(
                f"parameter {key[:40]!r}: this model's calls need names of 1 to 128 characters "
                "without '<', '>' and line breaks"
            )
        rule = f"{name}_{number}"
        sequence.append(rule if key in required else f"{rule}?")
        rules.append(f"{rule}: {words(form.key.replace('KEY', key))} {rule}_value")
        if _is_text(value):
            choices = _texts(value)
            if choices:
                said = " | ".join(json.dumps(choice) for choice in choices)
                rules.append(f"{rule}_value: ({said}) {words(form.end)}")
            else:
                # A rule with a special token may not be lazy, and need not: text cannot spell one.
                lazy = "[lazy]" if words(form.end) == json.dumps(form.end) else ""
                rules.append(rf"{rule}_value{lazy}: /(.|\n)*/ {words(form.end)}")
        else:
            inner = {**value} if isinstance(value, Mapping) else {}
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            whole = json.dumps({**shared, **inner, "x-guidance": dict(options)})
            rules.append(f"{rule}_value: %json {whole} {words(form.end)}")
    return " ".join([*sequence, words(form.tail)]), rules


def _is_text(schema: object) -> bool:
    """Return whether values of this schema are texts, which models write without quotes."""
    if not isinstance(schema, Mapping):
        return False
    if schema.get("enum"):
        return bool(_texts(schema))
    forms = [schema, *_list(schema.get("anyOf"))]
    kinds = [kind for form in forms if isinstance(form, Mapping) for kind in _list(form.get("type"))]
    return "string" in kinds


def _texts(schema: Schema) -> list[str]:
    """Return a schema's `enum` if all its values are texts, otherwise an empty list."""
    choices = _list(schema.get("enum"))
    texts = [choice for choice in choices if isinstance(choice, str)]
    return texts if len(texts) == len(choices) else []


def _list(kind: object) -> list[object]:
    return list(kind) if isinstance(kind, list) else [kind]


def _may_be_null(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") != "string" and not schema.get("enum")


class ParameterReader:
    """Turns a call's parameters, which come in pieces, into a JSON object. It reads each character of a value
    once, however many pieces the value has. `ended`: the call's tail was read."""

    def __init__(self, form: ParameterFormat, schema: Schema) -> None:
        self._form = form
        self._properties: Schema = schema.get("properties") or {}
        self._key: str | None = None
        self._count = 0
        self._begun = self._quoted = self._in_string = False
        self._value: list[str] = []
        """The pieces of the value that were read, but not returned."""
        self.ended = False

    def read(self, text: str) -> tuple[str, int]:
        """Take the next text. Returns what it adds to the object, and how many characters were read."""
        added, at = [] if self._begun else ["{"], 0
        self._begun = True
        while not self.ended:
            found = self._begin(text[at:]) if self._key is None else self._go_on(self._key, text[at:])
            if found is None:
                break
            added.append(found[0])
            at += found[1]
        return "".join(added), at

    def _begin(self, text: str) -> tuple[str, int] | None:
        if text.startswith(self._form.tail):
            self.ended = True
            return "}", len(self._form.tail)
        match = self._form.key_pattern.match(text)
        if match is None:
            return None
        self._key, self._count = match[1], self._count + 1
        return f"{', ' if self._count > 1 else ''}{json.dumps(match[1])}: ", match.end()

    def _go_on(self, key: str, text: str) -> tuple[str, int] | None:
        schema = self._properties.get(key)
        length, ended = self._find_end(text, in_json=not _is_text(schema))
        self._value.append(text[:length])
        if ended:
            self._key = None
            return self._last(self._take(), schema), length + len(self._form.end)
        if not length:
            return None
        return self._quote() if self._is_certainly_text(schema) else "", length

    def _find_end(self, text: str, in_json: bool) -> tuple[int, bool]:
        """Return how much of a text belongs to the value, and whether the value ends there. A string in JSON
        may spell the end."""
        at = 0
        while True:
            if self._in_string:
                inside = _IN_STRING.match(text, at)
                at = at if inside is None else inside.end()
                if not text.startswith('"', at):
                    return at, False  # a backslash at the end is read with the character that it escapes
                self._in_string, at = False, at + 1
            found = self._form.quote_or_end.search(text, at) if in_json else None
            ends = text.find(self._form.end, at) if found is None else found.start()
            if ends < 0:
                return len(text) - overlap(text, self._form.end), False
            if found is None or found[0] != '"':
                return ends, True
            self._in_string, at = True, found.end()

    def _is_certainly_text(self, schema: object) -> bool:
        if self._quoted or not _is_text(schema) or not _may_be_null(schema):
            return _is_text(schema)
        return not "null".startswith("".join(self._value))

    def _quote(self) -> str:
        quote, self._quoted = "" if self._quoted else '"', True
        return quote + _escaped(self._take())

    def _take(self) -> str:
        value = "".join(self._value)
        self._value.clear()
        return value

    def _last(self, value: str, schema: object) -> str:
        """Return the JSON of a value's last piece; of the whole value, if no piece was returned before."""
        if self._quoted:
            self._quoted = False
            return _escaped(value) + '"'
        if _is_text(schema) and not (value == "null" and _may_be_null(schema)):
            return json.dumps(value, ensure_ascii=False)
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
        return value


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
