"""OpenAI's Responses API through its client: items, tools, output formats, events, and stored responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pydantic
import pytest

from deltafront.service.door import http_stream
from deltafront.service.door.http_door import HttpDoor
from deltafront.service.door.responses.answers import ResponseReply
from deltafront.service.door.responses.requests import read_response
from deltafront.service.door.responses.store import (
    KEPT_S,
    ResponseStore,
    StoredResponse,
    UnknownResponse,
    size_of,
)

from ..inprocess import HANG_S, House, settings, wait_until
from .openai_calls import JSON, MODEL, Open
from .test_tools import ROME, WEATHER, call, model_with_tools, prompt_of

TOOL: Any = {"type": "function", "name": "weather", "parameters": WEATHER}
ANSWER = f"<think>Hm</think>\n\nLet me see.\n{call('weather', ROME)}\n{call('weather', ROME)}"


class Trip(pydantic.BaseModel):
    city: str = pydantic.Field(pattern="^[a-z]{1,9}$")
    days: int = pydantic.Field(ge=0, le=9)


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    return make_house(settings(model_with_tools(tmp_path / "calls"), model_name=MODEL, reasoning="think"))


def ask(api: openai.OpenAI, given: Any = "hi", **options: Any) -> Any:
    body = {"extra_body": {"skip_cache": True}, "max_output_tokens": 300, **options}
    return api.responses.create(model=MODEL, input=given, **body)


def without_ids(response: Any) -> Any:
    left = response.model_dump(exclude={"id", "created_at", "deltafront"})
    for item in left["output"]:
        item.pop("id"), item.pop("call_id", None)
    return left


def test_response_has_reasoning_text_and_tool_calls(api: openai.OpenAI, says: Any) -> None:
    says(ANSWER)
    response = ask(api, tools=[TOOL])
    thought, message, *calls = response.output
    assert thought.content[0].text == "Hm" and response.output_text == "\n\nLet me see.\n"
    assert [(one.name, one.arguments) for one in calls] == [("weather", ROME)] * 2
    assert len({one.call_id for one in calls}) == 2 and message.status == "completed"
    assert response.usage.output_tokens == len(ANSWER) + 1
    assert response.usage.output_tokens_details.reasoning_tokens == len("<think>Hm</think>")


def test_tool_call_cut_by_a_stop_string_is_incomplete(api: openai.OpenAI, says: Any) -> None:
    says(call("weather", ROME))
    body = {"tools": [TOOL], "extra_body": {"skip_cache": True, "stop": '"days"'}}
    events = list(ask(api, stream=True, **body))
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.status for item in ended] == ["incomplete"]
    response = ask(api, **body)
    assert (response.status, response.output[0].status) == ("completed", "incomplete")


def test_thread_serialises_the_events_that_echo_the_tools(
    api: openai.OpenAI, says: Any, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("Sunny")
    dumps, seen = json.dumps, set[tuple[bool, bool]]()

    def noted(value: Any, **options: Any) -> str:
        seen.add(("response" in value, threading.current_thread().name == house.loop.name))
        return dumps(value, **options)

    monkeypatch.setattr(http_stream, "json", SimpleNamespace(dumps=noted))
    *_, last = ask(api, tools=[TOOL], stream=True)
    assert last.response.tools[0].parameters == WEATHER
    assert seen == {(True, False), (False, True)}


@pytest.mark.parametrize("said", [ANSWER, call("weather", ROME), "Sunny", "", "<think>a</think>"])
def test_streamed_response_equals_the_unstreamed_one(api: openai.OpenAI, says: Any, said: str) -> None:
    says(said)
    whole = ask(api, tools=[TOOL])
    events = list(ask(api, tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert without_ids(events[-1].response) == without_ids(whole)


def test_streamed_items_open_grow_and_close_in_order(api: openai.OpenAI, says: Any) -> None:
    says(ANSWER)
    events = list(ask(api, tools=[TOOL], stream=True))
    names = list(dict.fromkeys(event.type.removeprefix("response.") for event in events[2:-1]))
    assert names == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
        "function_call_arguments.delta", "function_call_arguments.done",
    ]  # fmt: skip
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == ["reasoning", "message", *["function_call"] * 2]
    assert added[1].content == [] and added[2].arguments == ""
    for kind in ("output_text", "function_call_arguments", "reasoning_text"):
        pieces: dict[str, str] = {}
        for event in events:
            if event.type == f"response.{kind}.delta":
                pieces[event.item_id] = pieces.get(event.item_id, "") + event.delta
            elif event.type == f"response.{kind}.done":
                assert pieces[event.item_id] == getattr(event, "text", None) or event.arguments


def test_prompt_has_the_input_items_in_order(api: openai.OpenAI, house: House) -> None:
    ask(
        api,
        [
            {"role": "developer", "content": "short"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Let me"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ROME},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": ROME},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "function_call_output", "call_id": "c2", "output": "rain"},
        ],
        instructions="Be nice",
        tools=[TOOL],
    )
    used = call("weather", ROME)
    assert prompt_of(house).endswith(
        f"[system:Be nice\n\nshort][user:hi][assistant:Let me{used}{used}][tool:sun][tool:rain][a:"
    )


def test_previous_response_id_continues_a_stored_response(
    api: openai.OpenAI, says: Any, house: House
) -> None:
    says(f"<think>Hm</think>Let me\n{call('weather', ROME)}")
    first = ask(api, tools=[TOOL], instructions="Be nice")
    says("Sunny")
    result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}
    second = ask(api, [result], tools=[TOOL], previous_response_id=first.id)
    assert prompt_of(house).endswith(f"[user:hi][assistant:Let me\n{call('weather', ROME)}][tool:sun][a:")
    assert "Be nice" not in prompt_of(house), "instructions are not carried over"
    ask(api, "more", previous_response_id=second.id)
    assert prompt_of(house).endswith("[tool:sun][assistant:Sunny][user:more][a:")
    assert api.responses.retrieve(second.id).output_text == "Sunny"
    assert second.previous_response_id == first.id
    api.responses.delete(second.id)
    for lost in (lambda: api.responses.retrieve(second.id), lambda: api.responses.delete(second.id)):
        with pytest.raises(openai.NotFoundError, match="its door is gone"):
            lost()


def test_any_door_continues_and_deletes_a_response(
    house: House, make_http: Any, http_doors: list[HttpDoor], connect: Open, says: Any
) -> None:
    async def elsewhere(response_id: str, owner: str, drop: bool) -> StoredResponse | None:
        return http_doors[0].responses.take(response_id, owner, drop)

    first, second = connect(make_http(house)), connect(make_http(house, elsewhere=elsewhere))
    says("Let me")
    made = ask(first)
    says("Yes")
    again = ask(second, "more", previous_response_id=made.id)
    assert again.output_text == "Yes"
    assert prompt_of(house).endswith("[user:hi][assistant:Let me][user:more][a:")
    assert ask(second, "more", previous_response_id=again.id).output_text == "Yes"
    assert second.responses.retrieve(made.id).output_text == "Let me"
    second.responses.delete(made.id)
    for client in (first, second):
        with pytest.raises(openai.NotFoundError):
            ask(client, previous_response_id=made.id)


@pytest.mark.parametrize("said", ["", "<think>a</think>", call("weather", ROME)])
def test_empty_and_incomplete_responses_can_be_continued(
    api: openai.OpenAI, says: Any, house: House, said: str
) -> None:
    says(said)
    first = ask(api, tools=[TOOL], max_output_tokens=60)
    says("Yes")
    assert ask(api, "more", previous_response_id=first.id).output_text == "Yes"
    assert prompt_of(house).endswith("[user:hi][assistant:][user:more][a:")


def test_store_false_stores_no_response(
    api: openai.OpenAI, make_house: Callable[..., House], make_http: Any, connect: Open, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("alpha\nbeta\n")
    house = make_house(model_name=MODEL, tokens_file=str(tmp_path / "tokens"))
    address = make_http(house)
    alpha, beta = (connect(address, token) for token in ("alpha", "beta"))
    theirs, nobodys = ask(alpha), ask(alpha, store=False)
    assert (theirs.store, nobodys.store) == (True, False)
    for client, number in ((beta, theirs.id), (alpha, nobodys.id), (alpha, "resp_x")):
        with pytest.raises(openai.NotFoundError) as refused:
            ask(client, previous_response_id=number)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id" and number in refused.value.message
    assert ask(alpha, previous_response_id=theirs.id).output_text


def test_response_follows_the_requested_format(api: openai.OpenAI) -> None:
    parsed = api.responses.parse(model=MODEL, input="hi", text_format=Trip).output_parsed
    assert isinstance(parsed, Trip)
    assert ask(api, text={"format": {"type": "json_object"}}).output_text[0] == "{"


def test_named_function_must_be_called(api: openai.OpenAI) -> None:
    named: Any = {"type": "function", "name": "other"}
    (used,) = ask(api, tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=named).output
    assert used.name == "other" and json.loads(used.arguments).keys() == {"city", "days"}


def test_response_cut_by_max_output_tokens_is_incomplete(api: openai.OpenAI) -> None:
    *_, last = ask(api, max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete" and last.response.status == "incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[-1].status == "incomplete"


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not run"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "send tools of type function"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "1 to 64"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "'allowed_tools' must be"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type",
         "'input_image' is not read"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference' is not"),
        ({"input": []}, "input", "is empty"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "'grammar' must be text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}},
         "text.format.schema", "Invalid type: no"),
        ({"top_logprobs": 21}, "top_logprobs", "must be less than or equal to 20"),
        ({"top_logprobs": -1}, "top_logprobs", "must be greater than or equal to 0"),
        ({"top_logprobs": True}, "top_logprobs", "must be a valid integer"),
        ({"background": True}, "background", "is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"input": "x" * 9000}, "input", "maximum context length"),
    ],
)  # fmt: skip
def test_refuses_invalid_responses_requests_before_prefill(
    api: openai.OpenAI, house: House, given: Any, param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(api, extra_body=given)
    assert refused.value.param == param and said in refused.value.message
    assert not house.group.jobs


def test_fault_in_mid_stream_ends_in_a_failed_response(
    api: openai.OpenAI, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.decode.fail_after = [2] * 9
    *_, last = ask(api, stream=True)
    assert last.type == "response.failed" and last.response.error.code == "unavailable"
    house.decode.fail_after = []

    def broken(*_given: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(ResponseReply, "end", broken)
    *_, last = ask(api, stream=True)
    assert last.type == "response.failed" and last.response.error.code == "internal_error"


def test_unsupported_response_paths_list_the_served_ones(address: str) -> None:
    answer = httpx.post(f"{address}/v1/responses/resp_1/cancel", headers=JSON)
    assert answer.status_code == 404 and "/v1/responses" in answer.json()["error"]["message"]


def test_response_store_evicts_the_oldest_by_bytes_and_age() -> None:
    now, said = [0.0], [{"role": "user", "content": "x" * 1000}]
    size = 2 * size_of(said) + size_of({})
    store = ResponseStore(10 * size, lambda: now[0])
    for number in range(20_000):
        assert store.begin(f"r{number}", "", said)
        store.complete(f"r{number}", {}, said)
        assert store.size <= 10 * size
    assert [number for number in range(20_000) if has(store, number)] == list(range(19_990, 20_000))
    assert not store.begin("large", "", [{"content": "x" * 11 * size}])
    store.drop("r19995")
    assert store.size == 9 * size and not has(store, 19_995)
    now[0] = KEPT_S
    assert not has(store, 19_999) and store.size == 0


def test_unfinished_response_takes_store_bytes_but_is_not_found() -> None:
    said = [{"role": "user", "content": "x" * 1000}]
    store = ResponseStore(2 * size_of(said))
    for number in range(3):
        assert store.begin(f"r{number}", "", said)
        assert not has(store, number)
    store.complete("r0", {}, [])
    assert not has(store, 0), "it had to go meanwhile"
    store.drop("r1")
    store.complete("r2", {}, [])
    assert has(store, 2)


def test_caller_evicts_its_own_responses_before_those_of_others() -> None:
    said = [{"role": "user", "content": "x" * 1000}]
    store = ResponseStore(10 * size_of(said))
    store.begin("r0", "alpha", said)
    store.complete("r0", {}, [])
    for number in range(1, 50):
        assert store.begin(f"r{number}", "beta", said)
        store.complete(f"r{number}", {}, [])
        assert store.size <= 10 * size_of(said)
    assert store.get("r0", "alpha")
    assert store.get("r49", "beta")
    for number in range(50):
        store.drop(f"r{number}")
    assert store.size == 0 and not store._owners


def test_disconnected_client_leaves_no_conversation_in_the_store(
    house: House, make_http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[ResponseStore] = []
    begin = ResponseStore.begin

    def noting(store: ResponseStore, *given: Any) -> bool:
        stores.append(store)
        return begin(store, *given)

    monkeypatch.setattr(ResponseStore, "begin", noting)
    house.decode.pause_at = 3
    body = {"model": MODEL, "input": "hi", "stream": True}
    with httpx.stream("POST", f"{make_http(house)}/v1/responses", json=body, timeout=HANG_S) as answer:
        lines = answer.iter_lines()  # if it is collected, httpx closes the connection
        next(lines)
        (store,) = stores
        assert store.size
    wait_until(lambda: not store.size, "it is kept")


def test_consecutive_assistant_items_become_one_message() -> None:
    said = [{"role": "assistant", "content": "x" * 400}] * 20_000
    body = json.dumps({"model": MODEL, "input": said}).encode()
    asked = read_response(body, MODEL, ResponseStore(1 << 28), "")
    ((role, content),) = [(one["role"], one["content"]) for one in asked.messages]
    assert role == "assistant" and len(content) == 20_000 * 401 - 1


def has(store: ResponseStore, number: int) -> bool:
    try:
        return store.get(f"r{number}", "").messages != []
    except UnknownResponse:
        return False
