"""Tools, constraints, and answers parsed into reasoning, content and calls, over a gRPC channel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.client import (
    AsyncDeltafrontClient,
    DeltafrontClient,
    FinishReason,
    GenerateFinished,
    InvalidArgument,
    ParsedToken,
    Token,
    ToolCall,
)
from deltafront.service.request.calls import pack_ids

from ..inprocess import HANG_S, House, settings
from .openai_calls import HI, MODEL
from .test_structured import SCHEMA
from .test_tools import ROME, WEATHER, call, model_with_tools, prompt_of, tool

THINKING = f"<think>Hm</think>\n\nLet me see.\n{call('weather', ROME)}\n{call('weather', ROME)}"
PROTO_TOOL = pb.Tool(name="weather", parameters=json.dumps(WEATHER))
ASKED: dict[str, Any] = {"tools": [tool()], "max_tokens": 300, "skip_cache": True}


@pytest.fixture
def make_door(make_house: Callable[..., House], tmp_path: Path) -> Callable[..., House]:
    model = model_with_tools(tmp_path / "calls")
    return lambda *others: make_house(settings(model, model_name=MODEL, reasoning="think"), others)


@pytest.fixture
def house(make_door: Callable[..., House]) -> House:
    return make_door()


def parts_of(events: Sequence[Any]) -> list[Any]:
    kinds = (ParsedToken, GenerateFinished)
    return [part for event in events if isinstance(event, kinds) for part in event.answer_parts]


def told(events: Sequence[Any]) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Add up the parts of an answer: its reasoning, content and calls."""
    parts, calls = parts_of(events), dict[int, list[str]]()
    for piece in (piece for part in parts for piece in part.calls):
        if piece.call_id:
            calls[piece.index] = [piece.call_id, piece.name, ""]
        calls[piece.index][2] += piece.arguments
    reasoning, content = ("".join(text) for text in zip(*(part[:2] for part in parts), strict=True))
    return reasoning, content, tuple(ToolCall(*found) for found in calls.values())


def text_of(events: Sequence[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token | GenerateFinished))


def test_answer_is_parsed_and_streamed_beside_its_text(client: DeltafrontClient, says: Any) -> None:
    says(THINKING)
    events = list(client.generate(HI, **ASKED))
    reasoning, content, calls = told(events)
    assert (reasoning, content) == ("Hm", "\n\nLet me see.\n")
    assert [(one.name, one.arguments) for one in calls] == [("weather", ROME)] * 2
    assert events[-1].tool_calls == calls and len({one.call_id for one in calls}) == 2
    assert events[-1].reasoning_tokens == len("<think>Hm</think>")
    assert events[-1].reason is FinishReason.STOP and text_of(events) == THINKING
    assert len([part for part in parts_of(events) if part.calls]) > 20, "arguments come as they are written"


@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "other"}), ("other", {"other"})])
def test_required_tool_is_called(client: DeltafrontClient, choice: str, names: set[str]) -> None:
    wanted = {"tools": [tool(), tool("other")], "tool_choice": choice, "parallel_tool_calls": False}
    *_, finish = client.generate(HI, **{**ASKED, **wanted})
    (made,) = finish.tool_calls
    assert made.name in names and json.loads(made.arguments).keys() == {"city", "days"}


def test_tool_choice_none_hides_the_tools(client: DeltafrontClient, house: House) -> None:
    list(client.generate(HI, **{**ASKED, "tool_choice": "none", "max_tokens": 4}))
    assert "tools:" not in prompt_of(house) and not house.decode.reservations[-1].options.constraint


def test_tool_calls_and_results_reach_the_prompt(client: DeltafrontClient, says: Any, house: House) -> None:
    """An answer's calls are sent back as they came, or in OpenAI's form."""
    says(call("weather", ROME))
    *_, finish = client.generate(HI, **ASKED)
    (made,) = finish.tool_calls
    openais = {"id": made.call_id, "type": "function"}
    openais["function"] = {"name": made.name, "arguments": made.arguments}
    for sent in (made, openais):
        said = {"role": "assistant", "content": None, "tool_calls": [sent]}
        result = {"role": "tool", "tool_call_id": made.call_id, "content": "sun <eos>"}
        says("Sunny")
        events = list(client.generate([*HI, said, result], **ASKED))
        assert told(events)[1:] == ("Sunny", ()) and events[-1].tool_calls == ()
        assert call("weather", ROME) in prompt_of(house) and "[tool:sun <eos>]" in prompt_of(house)
        assert '[tools:[{"type": "function", "function": {"name": "weather"' in prompt_of(house)


def test_question_on_a_session_may_have_tools(client: DeltafrontClient, says: Any) -> None:
    *_, kept = client.prefill(HI, tools=[tool()])
    says(call("weather", ROME))
    asked = {name: value for name, value in ASKED.items() if name != "skip_cache"}
    *_, finish = client.generate(session_id=kept.session.session_id, append=HI, **asked)
    assert [made.arguments for made in finish.tool_calls] == [ROME]


@pytest.mark.parametrize("stop", ['"days"', None])
def test_tool_call_that_is_cut_off_is_not_among_the_tool_calls(
    client: DeltafrontClient, says: Any, stop: str | None
) -> None:
    says(f"{call('weather', ROME)}\n{call('weather', ROME)}")
    whole = len(call("weather", ROME))
    cut = {"max_tokens": whole + 60} if stop is None else {"stop": stop}
    events = list(client.generate(HI, **{**ASKED, **cut}))
    begun = told(events)[2]
    assert events[-1].tool_calls == begun[:-1]
    assert ROME.startswith(begun[-1].arguments) and begun[-1].arguments != ROME


def test_choice_is_one_of_the_texts_after_reasoning(client: DeltafrontClient, says: Any) -> None:
    says("<think>Hm</think>no form")
    asked: dict[str, Any] = {"choice": ["yes", 'nay "2"'], "max_tokens": 99, "skip_cache": True}
    reasoning, content, _calls = told(list(client.generate(HI, parse_answer=True, **asked)))
    assert (reasoning, content) == ("Hm", 'nay "2"')
    assert text_of(list(client.generate(HI, **asked))) == 'nay "2"', "only parsed answers reason first"


def stream(house: House, request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
    with grpc.insecure_channel(house.address) as channel:
        stub: Any = pb_grpc.DeltafrontServiceStub(channel)  # type: ignore[no-untyped-call]
        yield from stub.Generate(request, timeout=HANG_S)


def asking(**more: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(max_tokens=300)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    chat.MergeFrom(more.pop("chat", pb.ChatMessages()))
    return pb.GenerateRequest(
        prompt=pb.Prompt(messages=chat), sampling=sampling, request_id="r", skip_cache=True, **more
    )


RESUMED = {
    "call": {"chat": pb.ChatMessages(tools=[PROTO_TOOL], tool_choice="required")},
    "schema": {"constraint": pb.Constraint(json_schema=json.dumps(SCHEMA)), "parse_answer": True},
    "choice": {"constraint": pb.Constraint(choice=pb.Choice(texts=["x" * 40, "y" * 40]))},
}


@pytest.mark.parametrize("kind", RESUMED)
@pytest.mark.parametrize("tokens", [1, 6, 38])
def test_answer_resumed_at_another_door_keeps_its_grammar_and_parts(
    house: House, make_door: Callable[..., House], kind: str, tokens: int
) -> None:
    request = asking(**RESUMED[kind])
    house.decode.script = [*b"<think>Hm</think> no form"]
    whole = [event for event in stream(house, request) if event.WhichOneof("event") != "progress"]
    got = whole[:tokens]
    request.answered_ids = pack_ids([event.token.token_id for event in got])
    house.decode.script_from = whole[-1].finish.usage.prompt_tokens
    rest = [event for event in stream(make_door(house), request) if event.WhichOneof("event") != "progress"]
    assert house.decode.jobs[-1].answered_tokens == tokens
    assert [event.token for event in rest[:-1]] == [event.token for event in whole[tokens:-1]]
    first, second = whole[-1].finish, rest[-1].finish
    assert first.tool_calls == second.tool_calls and first.answer_parts == second.answer_parts
    assert first.reasoning_tokens == second.reasoning_tokens
    assert bool(first.tool_calls) == (kind == "call")


def test_tool_call_keeps_its_grammar_and_id_after_lost_connections(
    client: DeltafrontClient, house: House, impatient: None
) -> None:
    """The worker fails, and the connection is lost: the client resumes."""
    asked = {**ASKED, "tool_choice": "required", "request_id": "r"}
    events = list(client.generate(HI, **asked))
    house.losses[:] = [(45, grpc.StatusCode.UNAVAILABLE), (20, grpc.StatusCode.UNAVAILABLE)]
    house.decode.fail_after = [4]
    resumed = list(client.generate(HI, **asked))
    assert not house.losses and not house.decode.fail_after
    assert told(resumed) == told(events) and text_of(resumed) == text_of(events)
    assert resumed[-1].tool_calls == events[-1].tool_calls == told(events)[2]


def test_stream_without_parse_answer_is_unchanged_byte_for_byte(house: House, says: Any) -> None:
    says(THINKING)
    *tokens, last = (event for event in stream(house, asking()) if event.WhichOneof("event") != "progress")
    for event in tokens:
        token = event.token
        plain = pb.Token(index=token.index, text=token.text, token_id=token.token_id, logprob=token.logprob)
        assert event.SerializeToString() == pb.GenerateResponse(token=plain).SerializeToString()
    assert "".join(event.token.text for event in tokens) + last.finish.text == THINKING
    new = {"answer_parts", "tool_calls", "reasoning_tokens"}
    assert not {field.name for field, _value in last.finish.ListFields()} & new
    assert not house.decode.reservations[-1].options.constraint
    assert "tools:" not in prompt_of(house)


def test_tool_message_needs_no_call_id(client: DeltafrontClient, house: House) -> None:
    list(client.generate([*HI, {"role": "tool", "content": "sun"}], max_tokens=2))
    assert "[tool:sun]" in prompt_of(house)


def chat(**more: Any) -> dict[str, Any]:
    return {"chat": pb.ChatMessages(**more)}


def assistant(**made: Any) -> dict[str, Any]:
    said = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(**{"call_id": "c", "name": "f"} | made)])
    return chat(messages=[said])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (chat(tools=[pb.Tool(name="a b")]), "prompt.messages.tools[0].name: must be 1 to 64 letters"),
        (chat(tools=[pb.Tool(name="a", parameters="[")]),
         "prompt.messages.tools[0].parameters: must be a JSON object as text"),
        (chat(tools=[pb.Tool(name="a", parameters='{"type": "array"}')]),
         "prompt.messages.tools[0].parameters.type: 'array' must be object"),
        (chat(tools=[pb.Tool(name="a", parameters='{"properties": {"a": {"type": "no"}}}')]),
         "prompt.messages.tools: "),
        (chat(tools=[PROTO_TOOL, PROTO_TOOL]), "prompt.messages.tools: has two functions of one name"),
        (chat(tools=[PROTO_TOOL], tool_choice="any"),
         "prompt.messages.tool_choice: 'any' must name a function of tools"),
        (chat(tool_choice="required"), "prompt.messages.tool_choice: is required without tools"),
        (assistant(call_id="a b"), "prompt.messages[1].tool_calls[0].call_id: must be the id of a call"),
        (assistant(name=""), "prompt.messages[1].tool_calls[0].name: must be the name of a function"),
        (assistant(arguments="3"), "prompt.messages[1].tool_calls[0].arguments: must be a JSON object"),
        (chat(messages=[pb.ChatMessage(role="user", tool_calls=[pb.ToolCall()])]),
         "prompt.messages[1].tool_calls: needs the role assistant"),
        (chat(messages=[pb.ChatMessage(role="user", tool_call_id="c")]),
         "prompt.messages[1].tool_call_id: needs the role tool"),
        ({"constraint": pb.Constraint()}, "constraint: must be one schema, regex, grammar or choice"),
        ({"constraint": pb.Constraint(choice=pb.Choice())}, "constraint.choice: must be a list of texts"),
        ({"constraint": pb.Constraint(choice=pb.Choice(texts=["a", ""]))}, "constraint.choice: must be"),
        ({"constraint": pb.Constraint(choice=pb.Choice(texts=["x" * 300_000]))}, "constraint.choice: "),
        ({"constraint": pb.Constraint(json_schema="[")}, "constraint.json_schema: "),
        ({**chat(tools=[PROTO_TOOL]), "constraint": pb.Constraint(regex="a")},
         "constraint: must be a JSON schema"),
    ],
)  # fmt: skip
def test_error_names_the_field_of_a_wrong_chat(house: House, given: dict[str, Any], said: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stream(house, asking(**given)))
    status: Any = refused.value
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert status.details().startswith(said) and "\n" not in status.details()
    assert not house.group.jobs


def test_refuses_tools_if_the_template_has_none(make_house: Callable[..., House]) -> None:
    said = r"^prompt\.messages\.tools: this model's chat template has"
    with DeltafrontClient(make_house().address) as client, pytest.raises(InvalidArgument, match=said):
        list(client.generate(HI, **ASKED))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": [{"type": "mcp"}]}, r"tools\[0\]: must be of type function"),
        ({"tools": [tool(parameters={"a": {1}})]}, r"prompt\.messages\.tools\[0\]\.parameters: is not JSON"),
        ({"tools": [tool(5)]}, r"prompt\.messages\.tools\[0\]\.name: "),  # type: ignore[arg-type]
        ({"tool_choice": {"type": "function"}}, "tool_choice: must be auto"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, r"prompt\.messages\.parallel_tool_calls: "),
        ({"choice": "yes"}, r"constraint\.choice: must be a list of texts"),
        ({"choice": ["yes", 5]}, r"constraint\.choice: "),
        ({"choice": ["yes"], "regex": "a"}, "constraint: must be one schema, regex, grammar or choice"),
        ({"json_schema": {"a": {1}}}, r"constraint\.json_schema: is not JSON"),
        ({"parse_answer": "yes"}, "parse_answer: "),
    ],
)
def test_client_refuses_wrong_types_before_it_connects(given: dict[str, Any], said: str) -> None:
    with (
        DeltafrontClient("127.0.0.1:1", retry_s=0) as client,
        pytest.raises(InvalidArgument, match=f"^{said}"),
    ):
        list(client.generate(HI, **given))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "tool_calls": "x"}, r"tool_calls: must be a list of calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, r"tool_calls\[0\]: must be a ToolCall"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {1}}}]},
         r"tool_calls\[0\]\.arguments: is not JSON"),
        ({"role": "assistant", "tool_calls": [{"id": 5, "function": {}}]}, r"tool_calls\[0\]\.call_id: "),
        ({"role": "user", "content": "a", "tool_calls": []}, "tool_calls: must be left out"),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, "tool_call_id: "),
    ],
)  # fmt: skip
def test_client_names_the_field_of_a_wrong_message(message: dict[str, Any], said: str) -> None:
    said = rf"^prompt\.messages\[0\]\.{said}"
    with DeltafrontClient("127.0.0.1:1", retry_s=0) as client, pytest.raises(InvalidArgument, match=said):
        list(client.generate([message]))


def test_client_refuses_tools_without_messages(client: DeltafrontClient) -> None:
    for ask in (client.prefill, client.generate):
        with pytest.raises(InvalidArgument, match="tools: need messages"):
            list(ask("a", tools=[tool()]))


def test_async_client_gets_parsed_calls(house: House, says: Any) -> None:
    says(call("weather", ROME))

    async def answer() -> list[Any]:
        async with AsyncDeltafrontClient(house.address) as client:
            return [event async for event in client.generate(HI, **ASKED)]

    events = asyncio.run(asyncio.wait_for(answer(), HANG_S))
    assert [made.arguments for made in told(events)[2]] == [ROME]
