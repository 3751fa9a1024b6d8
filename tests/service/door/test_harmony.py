"""gpt-oss's channels become reasoning, content and tool calls: in the parser, and through OpenAI's client."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from deltafront.service.request.answers import AnswerPart
from deltafront.service.request.text.harmony import FINAL, MARKS, HarmonyParser, opening_of

from ..inprocess import House, settings, write_model
from .openai_calls import HI, MODEL, chat
from .test_tools import ROME, WEATHER, calls_of, tool

TEMPLATE = (
    "<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions to=assistant<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>Hm <b> é.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see. <|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}"
CALL_FIRST = f" to=functions.weather<|channel|>commentary json<|message|>{ROME}"
ANSWERS = [
    (f"{THOUGHT}{FINAL}Yes.", ("Hm <b> é.", "Yes.", [])),
    (f"{FINAL}Yes <|x", ("", "Yes <|x", [])),
    (f"{THOUGHT}{PREAMBLE}{CALL}", ("Hm <b> é.", "Let me see. ", [("weather", ROME)])),
    (f"{THOUGHT}{CALL_FIRST}<|call|>", ("Hm <b> é.", "", [("weather", ROME)])),
    ("<|channel|>analysis<|message|>cut sh", ("cut sh", "", [])),
    (CALL[:-4], ("", "", [("weather", ROME[:-4])])),
    ("<|channel|>commentary to=browser.search<|message|>cats", ("cats", "", [])),
    ("plain text", ("", "plain text", [])),
    ("", ("", "", [])),
]  # fmt: skip


def joined(parts: list[AnswerPart]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = list[list[str]]()
    for call in (call for part in parts for call in part.calls):
        if call.call_id:
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    text = ["".join(part[kind] for part in parts) for kind in (0, 1)]
    return text[0], text[1], [(name, arguments) for name, arguments in calls]


def parsed(text: str, edges: list[int], may_call: bool = True) -> tuple[str, str, list[tuple[str, str]]]:
    parser, parts = HarmonyParser("<|start|>assistant", may_call), list[AnswerPart]()
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    for number, piece in enumerate(pieces, start=1):
        parts += parser.push(piece, number, last=number == len(pieces))
    return joined(parts)


@pytest.mark.parametrize(("text", "told"), ANSWERS)
def test_channels_are_told_apart_at_any_chunk_boundary(text: str, told: Any) -> None:
    assert parsed(text, [*range(len(text) + 1), len(text)]) == told
    for cut in range(len(text) + 1):
        assert parsed(text, [0, cut, len(text)]) == told


def test_call_is_cut_off_if_its_arguments_are() -> None:
    for text, ended in ((CALL[:-1], False), (CALL, True), (THOUGHT, True)):
        parser = HarmonyParser("<|start|>assistant", may_call=True)
        parser.push(text, 9, last=True)
        assert parser.ended == ended


def test_call_without_tools_is_reasoning() -> None:
    assert parsed(CALL, [0, len(CALL)], may_call=False) == (ROME, "", [])


def test_answer_that_continues_a_message_begins_in_its_text() -> None:
    parser = HarmonyParser(opening_of("", continued=True), may_call=False)
    assert joined(parser.push(" more.", 2, last=True)) == ("", " more.", [])
    assert opening_of("<|start|>a<|end|><|start|>assistant", continued=False) == "<|start|>assistant"


def harmony_model(directory: Path) -> Path:
    model = write_model(directory)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKS])
    tokenizer.save(str(model / "tokenizer.json"))
    for name, more in (
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("config.json", {"vocab_size": tokenizer.get_vocab_size()}),
    ):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | more))
    return model


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    return make_house(settings(harmony_model(tmp_path / "model"), model_name=MODEL))


@pytest.fixture
def says(house: House) -> Callable[[str], None]:
    ids = {mark: 258 + number for number, mark in enumerate(MARKS)}
    pattern = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")

    def script(text: str) -> None:
        pieces = [[ids[part]] if part in ids else [*part.encode()] for part in pattern.split(text)]
        house.decode.script = [token for piece in pieces for token in piece] + [257]

    return script


def test_chat_returns_reasoning_and_content(api: openai.OpenAI, says: Any) -> None:
    says(f"{THOUGHT}{FINAL}Yes.")
    answer = chat(api, max_tokens=200)
    message: Any = answer.choices[0].message
    assert (message.reasoning, message.content) == ("Hm <b> é.", "Yes.")
    usage: Any = answer.usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    deltas = [chunk.choices[0].delta for chunk in chat(api, max_tokens=200, stream=True) if chunk.choices]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Hm <b> é."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_chat_calls_a_tool_and_reads_its_result(api: openai.OpenAI, says: Any, house: House) -> None:
    says(f"{THOUGHT}{CALL}")
    answer = chat(api, tools=[tool(), tool("other")], max_tokens=300)
    assert calls_of(answer) == [("weather", ROME)] and answer.choices[0].finish_reason == "tool_calls"
    prompt = [*memoryview(house.group.jobs[-1].token_ids).cast("I")]
    assert b'"name": "weather"' in bytes(token for token in prompt if token < 256)
    result = {"role": "tool", "tool_call_id": answer.choices[0].message.tool_calls[0].id, "content": "9 °C"}
    says(f"{FINAL}Warm.")
    said: Any = answer.choices[0].message.model_dump(include={"role", "tool_calls"})
    again = chat(api, messages=[*HI, said, result], tools=[tool(), tool("other")], max_tokens=300)
    assert again.choices[0].message.content == "Warm."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "other"}}])
def test_required_tool_is_called_in_its_channel(api: openai.OpenAI, choice: Any, says: Any) -> None:
    says("no")
    answer = chat(api, tools=[tool(), tool("other")], tool_choice=choice, max_tokens=2000)
    (name, arguments), *_ = calls_of(answer)
    assert name == "other" or choice == "required"
    assert json.loads(arguments).keys() == {"city", "days"}


def test_schema_binds_the_final_channel_alone(api: openai.OpenAI, says: Any) -> None:
    says(f"{THOUGHT}{FINAL}{ROME}")
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    message: Any = chat(api, response_format=schema, max_tokens=300).choices[0].message
    assert (message.reasoning, json.loads(message.content)) == ("Hm <b> é.", json.loads(ROME))
    says(f"{FINAL}free text")
    content = chat(api, response_format=schema, max_tokens=300).choices[0].message.content
    assert json.loads(content).keys() == {"city", "days"}
