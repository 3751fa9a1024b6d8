"""For each format of tool calls, answers that follow the grammar are parsed into calls with valid
arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltafront.service.request.calls import Tools
from deltafront.service.request.text.tool_calls import (
    FORMATS,
    CallPart,
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


def read(form: ToolFormat, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Parse an answer in pieces. Return its text and its calls (name, arguments)."""
    parser, said, calls, start = ToolCallParser(form), "", list[list[str]](), 0
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
@settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(TOOLS, st.integers(0, 999), st.lists(st.integers(0, 999), max_size=9), st.booleans())
def test_required_calls_of_random_tools_validate(
    grammars: Grammars, form: ToolFormat, tools: list[Any], seed: int, cuts: list[int], parallel: bool
) -> None:
    grammar = tools_grammar(form, Tools(tuple(tools), "required", parallel), {}, None)
    text, ended = written(grammars, grammar, seed)
    said, calls = read(form, text, cuts)
    assert not said.strip() and calls
    assert parallel or len(calls) == 1
    known = {tool["name"]: tool["parameters"] for tool in tools}
    for name, arguments in calls if ended else calls[:-1]:
        jsonschema.validate(json.loads(arguments), known[name])


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<tool_call>"}}\n</tool_call>'
TEXTS = [
    (2, f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.", 2),
    (2, "a < b <tool <tool_cal", "a < b <tool <tool_cal", 0),
    (1, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"a": "]"}}]', "", 2),
    (0, "Now[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}", "Now", 2),
    (3, '{"name": "f", "parameters": {"a": "x"}}', "", 1),
    (3, 'No. {"name": "f", "parameters": {}}', 'No. {"name": "f", "parameters": {}}', 0),
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
def test_call_of_an_unknown_tool_cannot_be_written(grammars: Grammars, form: ToolFormat) -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    grammar = tools_grammar(form, Tools((tool,)), {}, None)
    start = form.trigger + form.first + form.head.replace("NAME", "g")
    with pytest.raises(GrammarError):
        grammars.begin(grammar, [*start.encode()])


def test_answer_without_calls_follows_its_schema(grammars: Grammars) -> None:
    tool = {"name": "f", "parameters": {}}
    for form in FORMATS[1:3]:
        grammar = tools_grammar(form, Tools((tool,)), {}, '{"const": 5}')
        assert allowed(grammars.begin(grammar)) == sorted({ord("5"), ord(form.trigger[0])})


def test_recognises_the_tool_format_by_the_template() -> None:
    assert [format_of(f"{{% if tools %}}{form.marker}{{% endif %}}") for form in FORMATS] == [*FORMATS]
    assert format_of("{{ messages }}") is None
    assert format_of("{% if tools %}<tool_call><arg_key>{% endif %}") is None
