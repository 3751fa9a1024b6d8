"""Log-probabilities in the Responses API: those of chats, for the tokens of output text alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.service.door.edges.parts import AnswerSplitter
from deltafront.service.door.openai.logprobs import ChatLogprobs
from deltafront.service.door.reasoning import ReasoningSplitter
from deltafront.service.door.responses.logprobs import ContentLogprobs
from deltafront.service.request.calls import Tools
from deltafront.service.request.text.harmony import FINAL, HarmonyParser
from deltafront.service.request.text.tool_calls import FORMATS, ToolCallParser
from deltafront.workers.messages.events import FinishReason, Token

from ..inprocess import House, settings
from .openai_calls import MODEL, chat
from .test_harmony import PREAMBLE, THOUGHT
from .test_responses import ANSWER, TOOL, ask, without_ids
from .test_tools import ROME, call, model_with_tools, tool

LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
THINK = "<think>Hm</think>"
TEXT = "\n\nLet me see.\n"
HERMES = next(form for form in FORMATS if form.head.startswith("\n{"))


@pytest.fixture
def house(make_house: Callable[..., House], tmp_path: Path) -> House:
    return make_house(settings(model_with_tools(tmp_path / "calls"), model_name=MODEL, reasoning="think"))


def entries_of(response: Any) -> list[Any]:
    parts = [part for item in response.output if item.type == "message" for part in item.content]
    return [entry.model_dump() for part in parts for entry in part.logprobs]


def chat_entries(api: openai.OpenAI, **options: Any) -> list[Any]:
    body = {"extra_body": {"skip_cache": True}, "max_tokens": 300, **options}
    answer = chat(api, logprobs=True, top_logprobs=2, **body).choices[0]
    return [entry.model_dump() for entry in answer.logprobs.content]


def test_responses_have_the_logprobs_of_chats(api: openai.OpenAI, says: Any) -> None:
    says("Rome, 9 €é")
    response, entries = ask(api, **LOGPROBS), chat_entries(api)
    assert entries_of(response) == entries[:-1], "the end token brings no text"
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert b"".join(bytes(one["bytes"]) for one in entries_of(response)) == "Rome, 9 €é".encode()
    assert response.top_logprobs == 2
    alone = ask(api, include=LOGPROBS["include"])
    assert entries_of(alone) == [{**one, "top_logprobs": []} for one in entries[:-1]]
    for options in ({}, {"top_logprobs": 2}):
        assert ask(api, **options).output[0].content[0].logprobs == []


def test_responses_logprobs_leave_out_reasoning_and_calls(api: openai.OpenAI, says: Any) -> None:
    says(ANSWER)
    response = ask(api, tools=[TOOL], **LOGPROBS)
    assert response.output_text == TEXT and len(response.output) == 4
    entries = chat_entries(api, tools=[tool()])
    assert entries_of(response) == entries[len(THINK) : len(THINK + TEXT)]
    says(f"{THINK}\n\n{call('weather', ROME)}")
    assert [item.type for item in ask(api, tools=[TOOL], **LOGPROBS).output] == ["reasoning", "function_call"]


@pytest.mark.parametrize("said", [ANSWER, "x€y < y", f"{THINK}<b>", ""])
@pytest.mark.parametrize("stop", [[], ["y <"]])
def test_streamed_responses_logprobs_come_with_their_text(
    api: openai.OpenAI, says: Any, said: str, stop: list[str]
) -> None:
    says(said)
    body = {"extra_body": {"skip_cache": True, "stop": stop}, "tools": [TOOL], **LOGPROBS}
    whole, events = ask(api, **body), list(ask(api, stream=True, **body))
    assert without_ids(events[-1].response) == without_ids(whole)
    told = list[Any]()
    for event in events:
        if event.type == "response.output_text.delta":
            assert b"".join(bytes(one.bytes) for one in event.logprobs) == event.delta.encode()
            told += [one.model_dump() for one in event.logprobs]
        elif event.type == "response.content_part.added":
            assert not getattr(event.part, "logprobs", None)
        elif event.type == "response.output_text.done":
            assert [one.model_dump() for one in event.logprobs] == told == entries_of(whole)


def test_cut_response_has_the_logprob_of_its_last_token(api: openai.OpenAI, says: Any) -> None:
    says("Rome")
    cut = ask(api, max_output_tokens=3, **LOGPROBS)
    assert [entry["token"] for entry in entries_of(cut)] == ["R", "o", "m"]
    says("€")
    (half,) = ask(api, max_output_tokens=2, **LOGPROBS).output[0].content
    assert half.text == "\N{REPLACEMENT CHARACTER}"
    assert [entry.token for entry in half.logprobs] == ["bytes:\\xe2", "bytes:\\x82"]


def test_response_with_logprobs_is_stored_and_continued(api: openai.OpenAI, says: Any) -> None:
    says("Rome")
    first = ask(api, **LOGPROBS)
    assert entries_of(api.responses.retrieve(first.id)) == entries_of(first)
    says("Oslo")
    second = ask(api, "more", previous_response_id=first.id, **LOGPROBS)
    assert [entry["token"] for entry in entries_of(second)] == list("Oslo")
    items: Any = [item.model_dump() for item in first.output]
    assert ask(api, [{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "more"}])


def thinking() -> AnswerSplitter:
    tools = Tools(({"name": "weather", "parameters": {}},))
    return AnswerSplitter(ReasoningSplitter(opened=False), ToolCallParser(HERMES, tools))


def channels() -> AnswerSplitter:
    return AnswerSplitter(channels=HarmonyParser("<|start|>assistant", may_call=True))


SPLIT = [
    (thinking, ANSWER, [TEXT.rstrip()]),
    (thinking, f"{THINK}think>a <b", ["think>a <b"]),
    (thinking, f"\n{THINK}<", ["<"]),
    (channels, f"{PREAMBLE}{THOUGHT}{FINAL}Yes <|en<|end|>", ["Let me see. ", "Yes <|en"]),
    (channels, "plain", ["plain"]),
]


@pytest.mark.parametrize(("make", "said", "texts"), SPLIT)
@given(data=st.data())
def test_text_of_any_tokens_has_the_logprobs_of_all_its_tokens(
    make: Callable[[], AnswerSplitter], said: str, texts: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.sets(st.integers(1, max(1, len(said) - 1)), max_size=9))
    edges = [*pairwise([0, *sorted(cuts), len(said)])]
    splitter = make()
    chats = ChatLogprobs(lambda token_id: b"%d" % token_id, 0)  # type: ignore[arg-type]
    logprobs = ContentLogprobs(chats, splitter.note_places())
    for number, (begin, end) in enumerate(edges):
        logprobs.add(Token(index=number, token_id=number, logprob=-1.0, text=said[begin:end]))
        for part in splitter.push(said[begin:end], number + 1):
            if part.content:
                logprobs.content(part.content)
    logprobs.add(Token(index=len(edges), token_id=len(edges), logprob=-1.0))
    logprobs.finish(SimpleNamespace(text="", reason=FinishReason.STOP))  # type: ignore[arg-type]
    for part in splitter.push("", len(edges) + 1, last=True):
        logprobs.content(part.content)
    found = [int(entry["token"]) for entry in logprobs.take()]
    spans = [(said.rindex(text), said.rindex(text) + len(text)) for text in texts]
    needed = {number for number, edge in enumerate(edges) if any(overlap(edge, span) for span in spans)}
    wide = [(len(said[:begin].rstrip()), len(said) - len(said[end:].lstrip())) for begin, end in spans]
    # White space beside a text is dropped later, with the block that it is in.
    allowed = {number for number, edge in enumerate(edges) if any(overlap(edge, span) for span in wide)}
    assert found == sorted(set(found)) and needed <= {*found} <= allowed


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
