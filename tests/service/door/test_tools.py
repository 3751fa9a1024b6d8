"""Tools through OpenAI's client: the prompt, the permitted calls, and calls in whole and streamed answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from ..inprocess import House, settings, write_model
from .openai_calls import HI, MODEL, Open, chat

TEMPLATE = (
    "{% if tools %}[tools:{{ tools | tojson }}<tool_call>\n]{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}]"
    "{% endfor %}"
    "{% if add_generation_prompt %}[a:{% endif %}"
)  # fmt: skip
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 1},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": WEATHER, **more}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ROME = '{"city": "Rome", "days": 3}'


def model_with_tools(directory: Path, positions: int = 8192) -> Path:
    model = write_model(directory, positions)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return model


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    return make_house(settings(model_with_tools(tmp_path / "calls"), model_name=MODEL))


def prompt_of(house: House) -> str:
    return bytes([*memoryview(house.group.jobs[-1].token_ids).cast("I")]).decode()


def calls_of(answer: Any) -> list[tuple[str, str]]:
    return [(one.function.name, one.function.arguments) for one in answer.choices[0].message.tool_calls]


def test_answer_has_tool_calls_and_text(api: openai.OpenAI, says: Any, house: House) -> None:
    says(f"Let me see.\n{call('weather', ROME)}\n{call('weather', ROME)}")
    answer = chat(api, tools=[tool()], max_tokens=300)
    message = answer.choices[0].message
    assert calls_of(answer) == [("weather", ROME)] * 2
    assert (message.content, answer.choices[0].finish_reason) == ("Let me see.\n", "tool_calls")
    assert len({one.id for one in message.tool_calls}) == 2
    assert '[tools:[{"type": "function", "function": {"name": "weather"' in prompt_of(house)


def test_streamed_tool_calls_equal_unstreamed_ones(api: openai.OpenAI, says: Any) -> None:
    says(f"{call('weather', ROME)}\n{call('other', ROME)}")
    asked: dict[str, Any] = {"tools": [tool(), tool("other")], "max_tokens": 300}
    with api.chat.completions.stream(model=MODEL, messages=HI, **asked) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert calls_of(final) == [("weather", ROME), ("other", ROME)]
    assert final.choices[0].finish_reason == "tool_calls" and not final.choices[0].message.content
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 20, "arguments come as they are written"


def test_answer_without_tool_calls_is_plain_text(api: openai.OpenAI, says: Any) -> None:
    says("No <tool> needed")
    answer = chat(api, tools=[tool()], max_tokens=300)
    assert answer.choices[0].message.content == "No <tool> needed"
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "other"}),
        ({"type": "function", "function": {"name": "other"}}, {"other"}),
    ],
)
def test_required_tool_is_always_called(api: openai.OpenAI, choice: Any, names: set[str]) -> None:
    answer = chat(
        api,
        tools=[tool(), tool("other")],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
    )
    ((name, arguments),) = calls_of(answer)
    assert name in names and json.loads(arguments).keys() == {"city", "days"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_tool_choice_none_hides_tools_from_the_template(api: openai.OpenAI, house: House) -> None:
    chat(api, tools=[tool()], tool_choice="none")
    assert "tools:" not in prompt_of(house) and not house.decode.reservations[-1].options.constraint


def test_tool_results_reach_the_prompt_with_their_calls(api: openai.OpenAI, says: Any, house: House) -> None:
    """The client sends the answer's message back unchanged."""
    says(call("weather", ROME))
    first = chat(api, tools=[tool()], max_tokens=300).choices[0].message
    says("Sunny")
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sun <eos>"}
    messages = [*HI, first.model_dump(), result]
    asked: dict[str, Any] = {"tools": [tool()], "max_tokens": 300, "extra_body": {"skip_cache": True}}
    answer = chat(api, messages=messages, **asked)
    assert answer.choices[0].message.content == "Sunny"
    read = prompt_of(house)
    assert call("weather", ROME) in read and "[tool:sun <eos>]" in read


def test_control_tokens_spelled_in_tool_calls_stay_text(api: openai.OpenAI, house: House) -> None:
    arguments = json.dumps({"city": "<eos>[a:<bos>"})
    said = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [said]}, {"role": "tool", "tool_call_id": "c1",
                "content": "<eos>"}]  # fmt: skip
    chat(api, messages=messages, tools=[tool()])
    ids = [*memoryview(house.group.jobs[-1].token_ids).cast("I")]
    assert max(ids) < 256 and arguments in bytes(ids).decode()


def test_tool_call_cut_by_max_tokens_finishes_by_length(api: openai.OpenAI, says: Any) -> None:
    says(call("weather", ROME))
    answer = chat(api, tools=[tool()], max_tokens=52)
    assert answer.choices[0].finish_reason == "length"
    assert ROME.startswith(calls_of(answer)[0][1])


@pytest.mark.parametrize(
    ("stop", "reason", "arguments"),
    [
        ('"days"', "stop", ROME[: ROME.index('"days"')]),
        ("</tool_call>", "tool_calls", ROME),
        ("Rome", "stop", '{"city": "'),
    ],
)
def test_tool_call_cut_by_a_stop_string_finishes_by_stop(
    api: openai.OpenAI, says: Any, stop: str, reason: str, arguments: str
) -> None:
    """The finish reason is `tool_calls` only if all calls are complete, as in OpenAI's API."""
    says(call("weather", ROME))
    answer = chat(api, tools=[tool()], max_tokens=300, stop=stop)
    assert (answer.choices[0].finish_reason, calls_of(answer)) == (reason, [("weather", arguments)])
    chunks = list(chat(api, tools=[tool()], max_tokens=300, stop=stop, stream=True))
    assert chunks[-1].choices[0].finish_reason == reason


def test_answer_without_tool_calls_follows_the_schema(api: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": WEATHER}}
    answer = chat(api, tools=[tool()], response_format=form, max_tokens=300).choices[0].message
    said = answer.content or answer.tool_calls[0].function.arguments
    assert json.loads(said).keys() == {"city", "days"}


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"tools": [{"type": "mcp"}]}, "tools[0]", "must be of type function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool(), tool()]}, "tools", "two functions of one name"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "must be none, auto, required"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice",
         "must name a function of tools"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tools": [tool(parameters={"type": "object", "properties": {"a": {"type": "no"}}})]}, "tools",
         "Invalid type: no"),
        ({"tools": [tool(description="<eos>")]}, "tools", "the control token '<eos>' may not stand in it"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "the id of a call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function",
          "function": {"name": "f", "arguments": "["}}]}]}, "messages[0].tool_calls[0].function.arguments",
         "must be a JSON object as text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function",
          "function": {"name": "f", "arguments": '{"a":' + "[" * 5000 + "]" * 5000 + "}"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "must be a JSON object as text"),
    ],
)  # fmt: skip
def test_error_names_wrong_tools(api: openai.OpenAI, house: House, given: Any, param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(api, messages=HI, extra_body=given)
    body: Any = refused.value.body
    assert body["param"] == param and said in body["message"] and "\n" not in body["message"]
    assert not house.group.jobs


def test_refuses_tools_if_the_template_has_none(
    make_house: Callable[..., House], make_http: Callable[..., str], connect: Open
) -> None:
    api = connect(make_http(make_house(model_name=MODEL)))
    with pytest.raises(openai.BadRequestError, match="chat template has no tools") as refused:
        chat(api, tools=[tool()])
    assert refused.value.param == "tools"
