"""Anthropic's Messages API: prompts, whole and streamed answers, counts, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltafront.service.door.anthropic.answers import MessageReply, _content
from deltafront.service.door.edges.blocks import Block, BlockKind

from ..inprocess import HANG_S, House, settings
from .openai_calls import LONG, MODEL
from .test_tools import ROME, WEATHER, call, model_with_tools, prompt_of

Json = dict[str, Any]
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "weather", "description": "It", "input_schema": WEATHER}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    return make_house(settings(model_with_tools(tmp_path / "calls"), model_name=MODEL, reasoning="think"))


def post(address: str, path: str = "", headers: Json | None = None, **body: Any) -> httpx.Response:
    asked = {"model": MODEL, "max_tokens": 300, "messages": HI, **body}
    return httpx.post(f"{address}/v1/messages{path}", json=asked, headers=headers, timeout=HANG_S)


def message(address: str, **body: Any) -> Json:
    answer = post(address, **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_of(answer: httpx.Response) -> list[Json]:
    """Return the events without pings, after checking that each event's name is its object's type."""
    events = []
    for event in answer.text.strip(" \n").split("\n\n"):
        name, data = event.strip(" \n").split("\n")
        found = json.loads(data.removeprefix("data: "))
        assert name == f"event: {found['type']}"
        events.append(found)
    return [event for event in events if event["type"] != "ping"]


def assembled(events: list[Json]) -> Json:
    """Assemble a message from a stream, like Anthropic's clients."""
    begin, *middle, delta, stop = events
    assert begin["type"] == "message_start" and stop == {"type": "message_stop"}
    whole, texts = begin["message"], list[list[str]]()
    for event in middle:
        if event["type"] == "content_block_start":
            assert event["index"] == len(whole["content"])
            whole["content"].append(event["content_block"])
            texts.append([])
        elif event["type"] == "content_block_delta":
            (text,) = (value for key, value in event["delta"].items() if key != "type")
            texts[event["index"]].append(text)
        else:
            assert event == {"type": "content_block_stop", "index": len(texts) - 1}
    for block, pieces in zip(whole["content"], texts, strict=True):
        key = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[key] = json.loads("".join(pieces)) if key == "input" else "".join(pieces)
    return {**whole, **delta["delta"], "usage": delta["usage"]}


ANSWER = f"<think>Hm</think>\n\nLet me see.\n{call('weather', ROME)}\n{call('weather', ROME)}"


def test_message_has_thinking_text_and_tool_calls(address: str, says: Any) -> None:
    says(ANSWER)
    answer = message(address, tools=[TOOL])
    thought, text, *calls = answer["content"]
    assert thought == {"type": "thinking", "thinking": "Hm", "signature": ""}
    assert (text["type"], text["text"]) == ("text", "\n\nLet me see.\n")
    assert [(one["name"], one["input"]) for one in calls] == [("weather", json.loads(ROME))] * 2
    assert len({one["id"] for one in calls}) == 2
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["output_tokens"] == len(ANSWER) + 1


@pytest.mark.parametrize("said", [ANSWER, call("weather", ROME), "Sunny", "", "<think>a</think>"])
def test_streamed_message_equals_the_unstreamed_one(address: str, says: Any, said: str) -> None:
    says(said)
    asked: Json = {"tools": [TOOL], "skip_cache": True}
    whole = message(address, **asked)
    streamed = assembled(events_of(post(address, stream=True, **asked)))
    for answer in (whole, streamed):
        for block in answer["content"]:
            block.pop("id", None)
    kept = ("type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
    assert {key: streamed[key] for key in kept} == {key: whole[key] for key in kept}


def test_message_start_is_the_first_event_after_keep_alive_lines(address: str) -> None:
    lines = [line for line in post(address, stream=True).text.split("\n") if line.strip()]
    assert lines[0] == "event: message_start"


def test_prompt_has_system_text_tool_calls_and_results_in_order(address: str, house: House) -> None:
    used = {"type": "tool_use", "id": "c1", "name": "weather", "input": json.loads(ROME)}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sun"}]}
    message(
        address,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "Be nice", **EPHEMERAL},
        ],
        messages=[
            *HI,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "Hm", "signature": "x"}, used],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ],
        tools=[{**TOOL, **EPHEMERAL}],
    )
    assert prompt_of(house).endswith(
        f"[system:Be nice][user:hi][assistant:{call('weather', ROME)}][tool:sun][user:so?][a:"
    )
    assert '"function": {"name": "weather", "description": "It"' in prompt_of(house)


@pytest.mark.parametrize(("ttl", "retained"), [({}, 300), ({"ttl": "5m"}, 300), ({"ttl": "1h"}, 3600)])
def test_cache_control_retains_the_prompt(address: str, house: House, ttl: Json, retained: int) -> None:
    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", **ttl}}]
    message(address, messages=[{"role": "user", "content": marked}])
    key = house.decode.reservations[-1].key
    assert key is not None and key.retain_s == retained
    message(address, messages=[{"role": "user", "content": "other"}])
    key = house.decode.reservations[-1].key
    assert key is not None and key.retain_s == 0


def test_usage_counts_tokens_from_the_prefix_cache(address: str) -> None:
    asked: Json = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3}
    first, second = message(address, **asked)["usage"], message(address, **asked)["usage"]
    assert first["cache_read_input_tokens"] == 0 < second["cache_read_input_tokens"]
    total = second["input_tokens"] + second["cache_read_input_tokens"]
    assert total == first["input_tokens"]
    assert post(address, "/count_tokens", **asked).json() == {"input_tokens": total}


def test_answer_names_its_stop_sequence(address: str, says: Any) -> None:
    says("one two three")
    answer = message(address, stop_sequences=["three", "two"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
    assert [block["text"] for block in answer["content"]] == ["one "]
    assert message(address, max_tokens=2)["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any", "disable_parallel_tool_use": True}, {"weather", "other"}),
     ({"type": "tool", "name": "other"}, {"other"})],
)  # fmt: skip
def test_tool_choice_forces_the_call(address: str, says: Any, choice: Json, names: set[str]) -> None:
    says(call("other", ROME))
    (used,) = message(address, tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=choice)["content"]
    assert used["name"] in names and used["input"].keys() == {"city", "days"}


def test_tool_call_cut_by_max_tokens_has_partial_arguments(address: str, says: Any) -> None:
    says(call("weather", ROME))
    answer = message(address, tools=[TOOL], max_tokens=70)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {"city": "Rome"}


def test_message_matches_the_schema_of_output_config(address: str) -> None:
    answer = message(address, output_config={"format": {"type": "json_schema", "schema": WEATHER}})
    assert json.loads(answer["content"][0]["text"]).keys() == {"city", "days"}


def test_tool_call_cut_anywhere_has_an_object_as_input() -> None:
    whole = json.dumps({"a": "x\u00e9\n", "b": [1, -2.5e3, {"c": None}], "d": True})
    for said in [*(whole[:end] for end in range(len(whole) + 1)), '{"a": "\\ud800"}', "[" * 300]:
        assert isinstance(_content(Block(BlockKind.CALL, 0, "c", "f", [said]))["input"], dict)
    assert _content(Block(BlockKind.CALL, 0, "c", "f", [whole]))["input"] == json.loads(whole)


def test_accepts_the_fields_of_claude_code(address: str, house: House) -> None:
    message(
        address,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        temperature=1,
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"},
    )
    assert house.group.jobs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type: 'image' is not read here"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document' is not read"),
        ({"messages": [*HI, {"role": "assistant", "content": "{"}]}, "continues no message"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: 'web_search"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: must be 1 to 64"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "must name a function of tools"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: must be"),
        ({"temperature": -1}, "temperature: -1"),
        ({"max_tokens": None}, "max_tokens: is missing"),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "x", "ttl": "2h"}}]},
         "system[0].cache_control: must be"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "is not done here"),
        ({"mcp_servers": [{}]}, "mcp_servers: is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "prompt is too long: "),
        ({"messages": [{"role": "robot", "content": "x"}]}, "must be user or assistant"),
    ],
)  # fmt: skip
def test_refuses_invalid_messages_requests_before_prefill(
    address: str, house: House, given: Json, said: str
) -> None:
    answer = post(address, **given)
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error" and said in error["error"]["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert not house.group.jobs


def test_unknown_model_and_missing_workers_have_anthropics_errors(address: str) -> None:
    answer = post(address, model="claude-sonnet")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_fault_in_mid_stream_ends_it_with_an_error_event(
    address: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.decode.fail_after = [2] * 9
    *_, last = events_of(post(address, stream=True))
    assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
    house.decode.fail_after = []

    def broken(*_given: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(MessageReply, "end", broken)
    *_, last = events_of(post(address, stream=True))
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


def test_accepts_the_bearer_token_in_the_x_api_key_header(
    make_house: Callable[..., House], make_http: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("alpha\n")
    address = make_http(make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens")))
    assert post(address, headers={"x-api-key": "alpha"}, max_tokens=2).status_code == 200
    assert post(address, headers={"authorization": "Bearer alpha"}, max_tokens=2).status_code == 200
    for headers in ({}, {"x-api-key": "beta"}, {"authorization": "alpha"}):
        answer = post(address, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
