"""Tool calls in a model's own format: the grammar for answers, and the parser of tool calls in them.

The format is recognised by its marker in the model's chat template.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from deltafront.service.request.answers import CallPart
from deltafront.service.request.calls import Tools
from deltafront.service.request.text.detokenize import overlap
from deltafront.service.request.text.tool_parameters import ParameterFormat, ParameterReader, parameter_rules

LENIENT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": True}
"""Options for tools' parameters: llguidance ignores unknown keywords, because tools have all kinds of
schemas."""
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""The only length of ids that Mistral's templates accept."""


@dataclass(frozen=True)
class ToolFormat:
    """A model's format of tool calls: `trigger`, `head` with the tool's name, the arguments as JSON, and
    `tail`.

    Attributes:
        marker: The text by which a chat template is recognised.
        trigger: The text before the first call. Empty: an answer is either text or calls.
        between: The text between two calls.
        first, last: Texts around all calls, which then follow one trigger.
        parameters: Format of arguments that are not JSON. These arguments end the call, so there is no
            `tail`.
    """

    marker: str
    trigger: str
    head: str
    tail: str
    between: str
    first: str = ""
    last: str = ""
    parameters: ParameterFormat | None = None

    @cached_property
    def head_pattern(self) -> re.Pattern[str]:
        before, after = (re.escape(part) for part in self.head.split("NAME"))
        return re.compile(f"{before}([A-Za-z0-9_.-]+){after or '(?=<)'}")

    def schemas(self, tools: Tools) -> Mapping[str, Mapping[str, Any]]:
        """Return the tools' parameter schemas by name, without descriptions, which may be long; empty if
        arguments are JSON."""
        if self.parameters is None:
            return {}
        return {function["name"]: function.get("parameters") or {} for function in tools.functions}

    def arguments(self, schemas: Mapping[str, Mapping[str, Any]], name: str) -> JsonEnd | ParameterReader:
        """Return a new reader of the arguments of one call of the function `name`."""
        if self.parameters is None:
            return JsonEnd()
        return ParameterReader(self.parameters, schemas.get(name) or {})


FORMATS = (
    ToolFormat(
        "<parameter=", "<tool_call>", "\n<function=NAME>\n", "", "\n",
        parameters=ParameterFormat("<parameter=KEY>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
    ),
    ToolFormat(
        "{function-name}\n<arg_key>", "<tool_call>", "NAME\n", "", "\n",
        parameters=ParameterFormat("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    ),
    ToolFormat(
        "{function-name}<arg_key>", "<tool_call>", "NAME", "", "",
        parameters=ParameterFormat("<arg_key>KEY</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
    ),
    ToolFormat("[ARGS]", "[TOOL_CALLS]", "NAME[ARGS]", "", ""),
    ToolFormat("[TOOL_CALLS]", "[TOOL_CALLS]", '{"name": "NAME", "arguments": ', "}", ", ", "[", "]"),
    ToolFormat("<tool_call>", "<tool_call>", '\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n"),
    ToolFormat('"parameters": ', "", '{"name": "NAME", "parameters": ', "}", "; "),
)  # fmt: skip
"""Qwen3-Coder's, GLM's from 4.5 and from 4.7, Mistral's newer and older, Hermes' and Qwen's, Llama 3's."""
MARKS = (
    "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
"""Texts of these formats that are special tokens in some models."""
_OTHERS = ("<|channel|>",)
"""Markers of formats that are not read here: `harmony` reads gpt-oss's."""


def format_of(template: str) -> ToolFormat | None:
    """Find the format by the text of a chat template; None if the template has no tools or an unsupported
    format."""
    if "tools" not in template or any(mark in template for mark in _OTHERS):
        return None
    return next((form for form in FORMATS if form.marker in template), None)


def tools_grammar(form: ToolFormat, tools: Tools, special: Mapping[str, int], schema: str | None) -> str:
    """Make the grammar of an answer that may, or must, call tools.

    Args:
        special: Ids of the format's special tokens, which plain text cannot produce.
        schema: JSON that an answer without calls follows; None: it is free.
    """
    chosen = [one for one in tools.functions if tools.choice in ("auto", "required", one["name"])]
    calls = (_call(form, f"call_{number}", one, special) for number, one in enumerate(chosen))
    rules = [rule for call in calls for rule in call]
    one = " | ".join(f"call_{number}" for number in range(len(chosen)))
    begin = "" if form.first else _words(form.trigger, special)
    more = "" if not tools.parallel else f"({_words(form.between, special)} {begin} call)*"
    rules += [
        f"call: {one}",
        f"calls: {_words(form.first, special)} call {more} {_words(form.last, special)}",
    ]
    trigger = _words(form.trigger, special)
    if tools.choice != "auto":
        start = f"{trigger} calls"
    elif schema is not None:
        start = f"{trigger} calls | other"
        rules.append(f"other: %json {schema}")
    elif not form.trigger:
        start = "calls | OTHER"
        rules.append(r"OTHER: /([^{\s](.|\n)*)?/")
    elif form.trigger in special:
        start = f"TEXT | TEXT {trigger} calls"
        rules.append(r"TEXT: /(.|\n)*/")
    else:
        start = "TEXT | opening calls"
        rules += [r"TEXT: /(.|\n)*/", f"opening[lazy]: TEXT {trigger}"]
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _call(form: ToolFormat, name: str, function: Mapping[str, Any], special: Mapping[str, int]) -> list[str]:
    head, given = _words(form.head.replace("NAME", function["name"]), special), function.get("parameters")
    if form.parameters is not None:
        words = partial(_words, special=special)
        rest, rules = parameter_rules(form.parameters, name, given or {}, LENIENT, words)
        return [f"{name}: {head} {rest}", *rules]
    schema = {"type": "object", **(given or {}), "x-guidance": LENIENT}
    return [f"{name}: {head} %json {json.dumps(schema)} {_words(form.tail, special)}"]


def _words(text: str, special: Mapping[str, int]) -> str:
    """Write a text as Lark, with special tokens as ids."""
    pattern = "|".join(map(re.escape, special)) or "(?!)"
    parts = re.split(f"({pattern})", text)
    written = [f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part]
    return " ".join(written)


def random_id(_index: int) -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


def seeded_id(seed: str, index: int) -> str:
    """Make the id of a call from its index and a seed, so that a resumed answer's calls keep their ids."""
    return "".join(random.Random(f"{index} {seed}").choices(_ID_LETTERS, k=_ID_LENGTH))


class ToolCallParser:
    """Separates tool calls from text in a streamed answer that follows `tools_grammar`.

    Args:
        new_id: Makes the id of a call from its index.

    Attributes:
        calls: Number of calls that have begun.
    """

    def __init__(self, form: ToolFormat, tools: Tools, new_id: Callable[[int], str] = random_id) -> None:
        self._form = form
        self._new_id = new_id
        self._schemas = form.schemas(tools)
        self._held = ""
        self._calling: bool | None = None if not form.trigger else False
        """True if the next text belongs to a call; None before the answer has begun."""
        self._arguments: JsonEnd | ParameterReader | None = None
        self.calls = 0

    @property
    def ended(self) -> bool:
        """True if the arguments of the last call are complete, or no call has begun."""
        return self._arguments is None

    def push(self, text: str) -> list[str | CallPart]:
        """Take the next text, and return the text and pieces of calls that are certain."""
        self._held += text
        parts = list[str | CallPart]()
        while (part := self._next()) is not None:
            parts.append(part)
        return [part for part in parts if part]

    def flush(self) -> list[str]:
        """Return the rest of an answer that has ended. An unfinished call is dropped."""
        held, self._held = self._held, ""
        return [held] if held and not self._calling else []

    def _next(self) -> str | CallPart | None:
        if self._arguments is not None:
            return self._more_arguments(self._arguments)
        if self._calling is None:
            if not self._held.strip():
                return None
            self._calling = self._held.lstrip().startswith("{")
        return self._head() if self._calling else self._text()

    def _text(self) -> str | None:
        trigger = self._form.trigger
        before, found, after = self._held.partition(trigger) if trigger else (self._held, "", "")
        if found:
            self._calling, self._held = True, after
            return before.rstrip()
        ready = len(self._held) - overlap(self._held, trigger)
        if not ready:
            return None
        text, self._held = self._held[:ready], self._held[ready:]
        return text

    def _head(self) -> CallPart | None:
        found = self._form.head_pattern.search(self._held)
        if found is None:
            return None
        self._held, index = self._held[found.end() :], self.calls
        self._arguments, self.calls = self._form.arguments(self._schemas, found[1]), self.calls + 1
        return CallPart(index, self._new_id(index), found[1])

    def _more_arguments(self, arguments: JsonEnd | ParameterReader) -> CallPart | None:
        taken, length = arguments.read(self._held)
        self._held = self._held[length:]
        if arguments.ended:
            self._arguments = None
        return CallPart(self.calls - 1, arguments=taken) if taken else None


class JsonEnd:
    """Finds the end of a streamed JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.ended = False

    def read(self, text: str) -> tuple[str, int]:
        """Take the next text. Returns the part that belongs to the object, and its length."""
        length = self._find(text)
        return text[:length], length

    def _find(self, text: str) -> int:
        for place, character in enumerate(text):
            if self._quoted:
                closes = character == '"' and not self._escaped
                self._escaped = character == "\\" and not self._escaped
                self._quoted = not closes
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return place + 1
        return len(text)
