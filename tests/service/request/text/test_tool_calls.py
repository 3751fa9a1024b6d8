"""For each format of tool calls, answers that follow the grammar are parsed into calls with valid
arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deltafront.service.request.answers import CallPart
from deltafront.service.request.calls import Tools
from deltafront.service.request.text.tool_calls import (
    FORMATS,
    MARKS,
    ToolCallParser,
    ToolFormat,
    format_of,
    tools_grammar,
)
from deltafront.tests.schemas import TOOLS
from deltafront.workers.model.grammars import GrammarError, Grammars

from ...inprocess import VOCABULARY, write_model

EOS = 257
LIKELY = frozenset(b'}]",')
BY_MARKER = pytest.mark.parametrize("form", FORMATS, ids=[form.marker for form in FORMATS])


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(write_model(tmp_path_factory.mktemp("model")), VOCABULARY, (EOS,))


def written(grammars: Grammars, grammar: str, seed: int, most: int = 600) -> tuple[str, bool]:
    """Return the output of a random model, and whether the answer ended."""
    state, chance, data = grammars.begin(grammar), random.Random(seed), bytearray()
    while not state.ended and len(data) < most:
        tokens = allowed(state)
        assert tokens
        ends = EOS in tokens and chance.random() < 0.5
        letters = [token for token in tokens if token in LIKELY or 97 <= token < 123] or tokens
        token = EOS if ends else chance.choice(letters)
        state.take(token)
        data += b"" if token == EOS else bytes([token])
    return data.decode("utf-8", "replace"), state.ended


def read(
    form: ToolFormat, text: str, cuts: list[int], tools: Sequence[Any] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """Parse an answer in pieces. Return its text and its calls (name, arguments)."""
    parser, said, calls, start = ToolCallParser(form, Tools(tuple(tools))), "", list[list[str]](), 0
    parts = list[str | CallPart]()
    for cut in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        parts += parser.push(text[start:cut])
        start = cut
    for part in [*parts, *parser.flush()]:
        if isinstance(part, str):
            said += part
        elif part.call_id:
            assert len(part.call_id) == 9 and part.index == len(calls)
            calls.append([part.name, ""])
        else:
            calls[part.index][1] += part.arguments
    assert parser.calls == len(calls)
    return said, [(name, arguments) for name, arguments in calls]


@BY_MARKER
@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.long)])
def test_required_calls_of_random_tools_match_their_schemas(
    grammars: Grammars, form: ToolFormat, count: int
) -> None:
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(TOOLS, st.integers(0, 999), st.lists(st.integers(0, 999), max_size=9), st.booleans())
    def check(tools: list[Any], seed: int, cuts: list[int], parallel: bool) -> None:
        grammar = tools_grammar(form, Tools(tuple(tools), "required", parallel), {}, None)
        text, ended = written(grammars, grammar, seed)
        said, calls = read(form, text, cuts, tools)
        assert not said.strip() and calls
        assert parallel or len(calls) == 1
        known = {tool["name"]: tool["parameters"] for tool in tools}
        for name, arguments in calls if ended else calls[:-1]:
            jsonschema.validate(json.loads(arguments), known[name])

    check()


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<tool_call>"}}\n</tool_call>'
TEXTS = [
    (5, f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.", 2),
    (5, "a < b <tool <tool_cal", "a < b <tool <tool_cal", 0),
    (4, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"a": "]"}}]', "", 2),
    (3, "Now[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}", "Now", 2),
    (6, '{"name": "f", "parameters": {"a": "x"}}', "", 1),
    (6, 'No. {"name": "f", "parameters": {}}', 'No. {"name": "f", "parameters": {}}', 0),
]


@pytest.mark.parametrize(("number", "text", "said", "count"), TEXTS)
@settings(max_examples=30, deadline=None, database=None)
@given(cuts=st.lists(st.integers(0, 999), max_size=12))
def test_parser_separates_text_from_tool_calls(
    number: int, text: str, said: str, count: int, cuts: list[int]
) -> None:
    found, calls = read(FORMATS[number], text, cuts)
    assert found.strip() == said and len(calls) == count
    assert all(name == "f" and isinstance(json.loads(arguments), dict) for name, arguments in calls)


@pytest.mark.parametrize(("number", "text", "said", "count"), TEXTS)
def test_automatic_grammar_lets_a_model_write_text_or_calls(
    grammars: Grammars, number: int, text: str, said: str, count: int
) -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    grammar = tools_grammar(FORMATS[number], Tools((tool,)), {}, None)
    state = grammars.begin(grammar, [*text.encode()])
    assert state.ended or EOS in allowed(state)


def allowed(state: Any) -> list[int]:
    bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")[:VOCABULARY]
    return [int(token) for token in np.flatnonzero(bits)]


@BY_MARKER
def test_grammar_permits_no_call_of_an_unknown_tool(grammars: Grammars, form: ToolFormat) -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    grammar = tools_grammar(form, Tools((tool,)), {}, None)
    start = form.trigger + form.first + form.head.replace("NAME", "g")
    with pytest.raises(GrammarError):
        grammars.begin(grammar, [*start.encode()])


def test_answer_without_calls_follows_its_schema(grammars: Grammars) -> None:
    tool = {"name": "f", "parameters": {}}
    for form in FORMATS[4:6]:
        grammar = tools_grammar(form, Tools((tool,)), {}, '{"const": 5}')
        assert allowed(grammars.begin(grammar)) == sorted({ord("5"), ord(form.trigger[0])})


def test_recognises_the_tool_format_by_the_template() -> None:
    assert [format_of(f"{{% if tools %}}{form.marker}{{% endif %}}") for form in FORMATS] == [*FORMATS]
    assert format_of("{{ messages }}") is None
    assert format_of("{% if tools %}<tool_call><|channel|>{% endif %}") is None


TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "stops": {"type": "array", "items": {"type": "string"}},
        "hotel": {"$ref": "#/$defs/Hotel"},
    },
    "required": ["city", "days"],
    "$defs": {"Hotel": {"type": "object", "properties": {"stars": {"type": "integer"}}}},
}
FUNCTION = {"name": "plan", "parameters": TRIP}
VALUES = st.fixed_dictionaries(
    {
        "city": st.sampled_from(["", "Rome", 'a "b"\n\n</par', "<tool_call>é</arg_val"]),
        "days": st.integers(0, 99),
    },
    optional={
        "unit": st.sampled_from(["C", "F"]),
        "note": st.sampled_from([None, "long\nnote"]),
        "stops": st.lists(st.sampled_from(["x", "<"]), max_size=2),
        "hotel": st.just({"stars": 3}),
    },
)
BY_PARAMETERS = pytest.mark.parametrize("form", FORMATS[:3], ids=["qwen3-coder", "glm-4.5", "glm-4.7"])


def rendered(form: ToolFormat, name: str, arguments: dict[str, Any]) -> str:
    """Write a call as the models' templates do: texts as they are, and other values as JSON."""
    assert form.parameters is not None
    call = form.trigger + form.head.replace("NAME", name)
    for key, value in arguments.items():
        said = value if isinstance(value, str) else json.dumps(value)
        call += form.parameters.key.replace("KEY", key) + said + form.parameters.end
    return call + form.parameters.tail


@BY_PARAMETERS
@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(arguments=VALUES, cuts=st.lists(st.integers(0, 999), max_size=12))
def test_tool_call_parameters_match_the_grammar_and_parse_as_json(
    grammars: Grammars, form: ToolFormat, arguments: dict[str, Any], cuts: list[int]
) -> None:
    ordered = {key: arguments[key] for key in TRIP["properties"] if key in arguments}  # type: ignore[attr-defined]
    call = rendered(form, "plan", ordered)
    text = f"Now.\n{call}{form.between}{call}"
    said, calls = read(form, text, cuts, [FUNCTION])
    assert said.strip() == "Now."
    assert [(name, json.loads(given)) for name, given in calls] == [("plan", ordered)] * 2
    state = grammars.begin(tools_grammar(form, Tools((FUNCTION,)), {}, None), [*text.encode()])
    assert state.ended or EOS in allowed(state)


@BY_PARAMETERS
@pytest.mark.parametrize("name", ["", "a\nb", "a>b", "</arg_key>", "x" * 129])
def test_refuses_parameter_names_that_a_call_cannot_hold(form: ToolFormat, name: str) -> None:
    function = {"name": "f", "parameters": {"properties": {name: {"type": "string"}}}}
    with pytest.raises(GrammarError, match="1 to 128 characters without"):
        tools_grammar(form, Tools((function,)), {}, None)


@BY_PARAMETERS
@pytest.mark.parametrize(
    "wrong", [{"city": "Rome", "days": 100}, {"days": 1}, {"city": "a", "days": 1, "x": 1}]
)
def test_grammar_permits_no_tool_parameters_outside_the_schema(
    grammars: Grammars, form: ToolFormat, wrong: dict[str, Any]
) -> None:
    grammar = tools_grammar(form, Tools((FUNCTION,), "required"), {}, None)
    with pytest.raises(GrammarError):
        grammars.begin(grammar, [*rendered(form, "plan", wrong).encode()])


LONG = {
    "a": 'say "x\\y" ' * 300,
    "b": {"c": ["</parameter>\n" * 300, 1.5] * 3},
    "d": "null" * 300,
    "e": [1] * 999,
}
LONG_TYPES = {"a": {"type": "string"}, "b": {"type": "object"}, "d": {"type": ["string", "null"]}, "e": {}}


@BY_MARKER
def test_parser_reads_each_character_of_arguments_few_times(
    form: ToolFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the characters that the reader of arguments is given, when each comes alone."""
    counted, make = list[int](), ToolFormat.arguments

    def counting(self: ToolFormat, schemas: Any, name: str) -> Any:
        reader = make(self, schemas, name)
        read = reader.read
        monkeypatch.setattr(reader, "read", lambda text: counted.append(len(text)) or read(text))
        return reader

    monkeypatch.setattr(ToolFormat, "arguments", counting)
    if form.parameters is None:
        text = form.trigger + form.first + form.head.replace("NAME", "f") + json.dumps(LONG) + form.tail
    else:
        text = rendered(form, "f", LONG)
    function = {"name": "f", "parameters": {"type": "object", "properties": LONG_TYPES}}
    _said, ((_name, arguments),) = read(form, text, list(range(len(text))), [function])
    assert json.loads(arguments) == LONG
    assert sum(counted) < 20 * len(text)


@BY_PARAMETERS
def test_nullable_text_is_streamed_once_it_cannot_be_null(form: ToolFormat) -> None:
    for value in ("nullable", None, "nul", "", "null and void"):
        text = rendered(form, "f", {"d": value})
        function = {"name": "f", "parameters": {"type": "object", "properties": LONG_TYPES}}
        _said, ((_name, arguments),) = read(form, text, list(range(len(text))), [function])
        assert json.loads(arguments) == {"d": value}
    parser = ToolCallParser(form, Tools((function,)))
    begun = parser.push(rendered(form, "f", {"d": "nullable"}).partition("able")[0] + "a")
    assert "".join(part.arguments for part in begun if isinstance(part, CallPart)) == '{"d": "nulla'


@BY_PARAMETERS
def test_string_in_a_json_parameter_may_spell_the_closing_mark(form: ToolFormat) -> None:
    end = form.parameters.end.strip() if form.parameters is not None else ""
    given = {"a": {"x": f'{end} "{end}\\', "y": [end]}, "b": 3}
    schema = {"type": "object", "properties": {"a": {"type": "object"}, "b": {"type": "integer"}}}
    text = rendered(form, "f", given)
    for cuts in ([], [*range(len(text))]):
        _said, ((_name, arguments),) = read(form, text, cuts, [{"name": "f", "parameters": schema}])
        assert json.loads(arguments) == given


@BY_PARAMETERS
def test_grammar_constrains_parameters_between_special_tokens(tmp_path: Path, form: ToolFormat) -> None:
    tokenizer = Tokenizer.from_file(str(write_model(tmp_path) / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    special = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    ids = tokenizer.encode(rendered(form, "plan", {"city": "a\nb", "days": 3}), add_special_tokens=False).ids
    grammar = tools_grammar(form, Tools((FUNCTION,), "required", False), special, None)
    assert Grammars(tmp_path, VOCABULARY + len(MARKS), (EOS,)).begin(grammar, ids).ended


EXAMPLES = [
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\n"
    "multiple lines\n"
    "</parameter>\n</function>\n</tool_call>",
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n</tool_call>",
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value></tool_call>",
]
"""Calls in the form that the models' own chat templates describe."""


@pytest.mark.parametrize(("form", "example"), [*zip(FORMATS[:3], EXAMPLES, strict=True)])
def test_parses_the_example_calls_of_the_models_chat_templates(form: ToolFormat, example: str) -> None:
    text = example.replace("{function-name}", "f").replace("example_function_name", "f")
    (call,) = read(form, text, list(range(len(text))))[1]
    assert call[0] == "f" and len(json.loads(call[1])) == 2
