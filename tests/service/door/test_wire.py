"""Messages are unchanged after writing and reading, and newer peers' messages are accepted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.door import wire
from deltafront.service.door.edges.grpc_chat import read_request
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.answers import (
    AnswerPart,
    CallPart,
    Density,
    GenerateFinished,
    MethodInfo,
    ParsedToken,
    PrefillFinished,
    ProfileInfo,
    ProfileLevel,
    ServerInfo,
    Timings,
    ToolCall,
)
from deltafront.service.request.calls import (
    AttentionMethod,
    Constraint,
    GenerateRequest,
    PrefillRequest,
    Prompt,
    SamplingParams,
    Tools,
)
from deltafront.workers.messages.events import FinishReason, LayerDensity, Progress, Session, Token, Usage
from deltafront.workers.messages.requests import PageSelection

texts = st.text(max_size=8)
numbers = st.floats(allow_nan=False)
counts = st.integers(0, 1 << 40)
small = st.integers(0, (1 << 31) - 1)
moments = st.integers(1, 1 << 38).map(lambda n: n / 64)  # exact in microseconds and in binary
named = st.dictionaries(texts, numbers, max_size=3)


def maybe(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | strategy


constraints = st.sampled_from(["json_schema", "regex", "grammar"]).flatmap(
    lambda form: st.builds(Constraint, **{form: texts})
) | st.builds(Constraint, choice=st.lists(texts, max_size=3).map(tuple))
messages = st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=3).map(tuple)
whole_numbers = st.integers(-(1 << 53), 1 << 53)
json_values = st.recursive(
    st.none() | st.booleans() | whole_numbers | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
variables = st.dictionaries(texts, json_values, max_size=3)
prompts = (
    st.just(Prompt())
    | st.builds(Prompt, text=texts)
    | st.builds(Prompt, messages=messages, chat_template_kwargs=variables)
    | st.builds(Prompt, token_ids=st.binary(max_size=8))
)
common = {
    "prompt": maybe(prompts),
    "attention": st.builds(AttentionMethod, texts, named),
    "session_ttl": maybe(moments),
    "deadline": maybe(moments),
    "request_id": texts,
}
sampling_params = st.builds(
    SamplingParams, maybe(numbers), maybe(numbers), maybe(small), counts,
    st.lists(texts, max_size=3).map(tuple), maybe(small), st.booleans(),
)  # fmt: skip
requests = st.builds(
    GenerateRequest,
    **common,
    session_id=maybe(texts),
    append=maybe(prompts),
    sampling=sampling_params,
    page_selection=st.sampled_from(PageSelection),
    recompute_blocks=maybe(small),
    constraint=maybe(constraints),
    parse_answer=st.booleans(),
).filter(lambda request: request.prompt is None or request.session_id is None)

sessions = st.builds(Session, session_id=texts, expires=moments, tokens=counts)
usages = st.builds(
    Usage,
    prompt_tokens=counts,
    completion_tokens=counts,
    cached_tokens=counts,
    host_tokens=counts,
    disk_tokens=counts,
)
timings = st.builds(Timings, numbers, named, st.lists(named, max_size=3), numbers)
layers = st.dictionaries(small, numbers, max_size=3)
densities = st.just(Density()) | st.builds(
    Density, st.text(min_size=1, max_size=8), numbers, layers, numbers, numbers
)
tiles = st.builds(LayerDensity, layer=small, computed=numbers, causal=numbers)
progress = st.builds(
    Progress, tokens_done=counts, tokens_total=counts, tiles=st.lists(tiles, max_size=2).map(tuple)
)
tokens = st.builds(Token, index=counts, token_id=small, logprob=numbers, text=texts)
pieces = st.lists(st.builds(CallPart, small, texts, texts, texts), max_size=2).map(tuple)
parts = st.builds(AnswerPart, texts, texts, pieces)
parsed = st.builds(
    ParsedToken,
    index=counts,
    token_id=small,
    logprob=numbers,
    text=texts,
    answer_parts=st.lists(parts, min_size=1, max_size=2).map(tuple),
)
sent = st.sampled_from([FinishReason.STOP, FinishReason.STOP_STRING, FinishReason.LENGTH, FinishReason.OTHER])


@given(st.builds(PrefillRequest, **common))
def test_prefill_requests_survive_protobuf_encoding_and_decoding(request: PrefillRequest) -> None:
    assert wire.read(_sent(wire.write(pb.PrefillRequest, request))) == request


@given(requests)
def test_generate_requests_survive_protobuf_encoding_and_decoding(request: GenerateRequest) -> None:
    assert wire.read(_sent(wire.generate_request(request))) == request


@given(progress | st.builds(PrefillFinished, sessions, usages, timings, densities, texts))
def test_prefill_events_survive_protobuf_encoding_and_decoding(event: Progress | PrefillFinished) -> None:
    assert wire.read_response(_sent(wire.response(pb.PrefillResponse, event))) == event


@given(
    progress
    | tokens
    | parsed
    | st.builds(
        GenerateFinished,
        sent,
        texts,
        usages,
        timings,
        densities,
        maybe(sessions),
        numbers,
        texts,
        texts,
        counts,
        answer_parts=st.lists(parts, max_size=2).map(tuple),
        tool_calls=st.lists(st.builds(ToolCall, texts, texts, texts), max_size=2).map(tuple),
        reasoning_tokens=maybe(counts),
    )
)
def test_generate_events_survive_protobuf_encoding_and_decoding(
    event: Progress | Token | GenerateFinished,
) -> None:
    assert wire.read_response(_sent(wire.response(pb.GenerateResponse, event))) == event


methods = st.lists(st.builds(MethodInfo, texts, texts, named), max_size=2)
facts = (texts, texts, counts, counts, texts, methods, small, counts, texts, small, small)
lists = st.lists(small, max_size=3)
profiles = st.builds(
    ProfileInfo, texts, st.lists(st.builds(ProfileLevel, texts, named, numbers, counts), max_size=2), texts
)


selection = (lists, lists, small, small)
told = (texts, st.booleans(), sampling_params)


@given(st.builds(ServerInfo, *facts, *(counts,) * 4, small, *selection, st.none() | profiles, small, *told))
def test_server_info_survives_protobuf_encoding_and_decoding(info: ServerInfo) -> None:
    assert wire.read(_sent(wire.write(pb.GetServerInfoResponse, info))) == info


def _sent(message: object) -> object:
    return type(message).FromString(message.SerializeToString())  # type: ignore[attr-defined]


def test_every_message_field_has_a_field_of_its_dataclass() -> None:
    for message, plain in wire._KINDS.items():
        assert set(plain.__dataclass_fields__) == set(message.DESCRIPTOR.fields_by_name), plain
    assert {value.number for value in pb.FinishReason.DESCRIPTOR.values} == set(wire._READ_REASONS)
    assert {value.number for value in pb.PageSelection.DESCRIPTOR.values} == set(wire._READ_PAGE_SELECTIONS)


def test_client_ignores_fields_and_events_of_a_newer_server() -> None:
    finish = pb.Finish(text="x", reason=99)  # type: ignore[arg-type]
    event = wire.read_response(pb.GenerateResponse(finish=finish))
    assert isinstance(event, GenerateFinished)
    assert (event.reason, event.text) == (FinishReason.OTHER, "x")
    unknown_field = b"\xfa\x01\x01x"
    assert wire.read_response(pb.GenerateResponse.FromString(unknown_field)) is None
    assert wire.read_response(pb.PrefillResponse.FromString(unknown_field)) is None


def test_template_variables_are_sent_as_json() -> None:
    """Whole numbers stay integers, so that a template does not print `512.0`."""
    sent = Prompt(messages=(), chat_template_kwargs={"budget": 512, "list": [{"share": 0.5}, True, None]})
    found = wire.read(_sent(wire.write(pb.PrefillRequest, PrefillRequest(sent)))).prompt
    assert json.dumps(found.chat_template_kwargs, sort_keys=True) == json.dumps(
        sent.chat_template_kwargs, sort_keys=True
    )
    for value, says in ((object(), "Unexpected type"), (b"x", "Unexpected type")):
        with pytest.raises(InvalidArgument, match=rf"prompt\.messages\.chat_template_kwargs: {says}"):
            wire.write(
                pb.PrefillRequest, PrefillRequest(Prompt(messages=(), chat_template_kwargs={"x": value}))
            )
    endless = wire.write(
        pb.PrefillRequest, PrefillRequest(Prompt(messages=(), chat_template_kwargs={"x": float("inf")}))
    )
    with pytest.raises(InvalidArgument, match="chat_template_kwargs: is not JSON"):
        wire.read(endless)


def test_tools_and_calls_survive_protobuf_encoding_and_decoding() -> None:
    """Schemas and arguments are JSON as text, so that whole numbers stay whole."""
    schema = {"type": "object", "properties": {"a": {"maximum": 9, "multipleOf": 0.5}}}
    functions = ({"name": "f", "description": "d", "parameters": schema}, {"name": "g"})
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 3, "b": [1.5, None]}}}
    said = (
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "sun", "tool_call_id": "c"},
    )
    for tools in (Tools(functions), Tools(functions, "g", False), Tools(functions, "required", False)):
        request = GenerateRequest(Prompt(messages=said, tools=tools), append=Prompt(messages=said))
        found = read_request(_sent(wire.generate_request(request)))
        parallel = tools.parallel and tools.choice != "g"
        expected = replace(request.prompt or Prompt(), tools=replace(tools, parallel=parallel))
        assert found == replace(request, prompt=expected)


def test_refuses_a_request_with_both_prompt_and_session() -> None:
    both = GenerateRequest(prompt=Prompt(text="x"), session_id="d0.s")
    with pytest.raises(InvalidArgument, match="both a prompt and a session_id"):
        wire.generate_request(both)
