"""The handler without a protocol: events, errors by their codes, and nothing left at the end."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from deltafront.service.errors import Code, DeltafrontError
from deltafront.service.request.answers import GenerateFinished, RequestEvent
from deltafront.service.request.calls import GenerateRequest, PrefillRequest, Prompt, SamplingParams
from deltafront.workers.messages.events import Token

from ..inprocess import HANG_S, House, edge
from ..test_requests import expected, ids, nothing_left

ASKED = GenerateRequest(Prompt(text="hello"), sampling=SamplingParams(max_tokens=4))
WRONG: dict[str, tuple[GenerateRequest, str]] = {
    "two sources": (replace(ASKED, session_id="d0.x", append=ASKED.prompt), "source: is both"),
    "two forms": (replace(ASKED, prompt=Prompt(text="x", token_ids=b"1234")), "prompt: is several things"),
    "no form": (replace(ASKED, append=Prompt()), "append: is empty"),
    "NaN ttl": (replace(ASKED, session_ttl=math.nan), "session_ttl: nan s"),
}


async def _events(
    house: House, read: Callable[[], PrefillRequest], stop: int | None = None
) -> list[RequestEvent]:
    events: list[RequestEvent] = []
    async with contextlib.aclosing(edge(house.door._requests, read)) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == stop:
                break
    return events


def test_handler_yields_dataclasses_without_protobuf(house: House) -> None:
    *events, finish = house.loop.run(_events(house, lambda: ASKED))
    assert isinstance(finish, GenerateFinished)
    assert "".join(e.text for e in events if isinstance(e, Token)) == expected(ids("hello"), 4)
    nothing_left(house)


@pytest.mark.parametrize("name", WRONG)
def test_handler_refuses_wrong_values_that_protobuf_cannot_express(house: House, name: str) -> None:
    request, says = WRONG[name]
    with pytest.raises(DeltafrontError, match=says) as caught:
        house.loop.run(_events(house, lambda: request))
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert not house.pages_used()


@pytest.mark.parametrize("deadline", [math.nan, 0.0])
def test_past_deadline_raises_deadline_exceeded(house: House, deadline: float) -> None:
    with pytest.raises(DeltafrontError) as caught:
        house.loop.run(_events(house, lambda: replace(ASKED, deadline=deadline)))
    assert caught.value.code is Code.DEADLINE_EXCEEDED


def test_hides_internal_errors_raised_while_reading_a_request(house: House) -> None:
    def read() -> GenerateRequest:
        raise ZeroDivisionError("a secret")

    with pytest.raises(DeltafrontError) as caught:
        house.loop.run(_events(house, read))
    assert caught.value.code is Code.INTERNAL
    assert "secret" not in caught.value.message


KEPT = [PrefillRequest(ASKED.prompt, session_ttl=600.0), replace(ASKED, session_ttl=600.0)]


@pytest.mark.parametrize("asked", KEPT, ids=lambda asked: type(asked).__name__)
def test_session_is_released_if_its_client_left_before_the_reply(house: House, asked: PrefillRequest) -> None:
    """No client knows its id, so it would only hold pages until its lease ends."""

    async def leave() -> None:
        requests = house.door._requests
        async with contextlib.aclosing(edge(requests, lambda: asked)) as stream:
            await anext(stream)
            async with asyncio.timeout(HANG_S):
                while requests._tasks:
                    await asyncio.sleep(0.001)
        assert house.pages_used(), "the session is there"

    house.loop.run(leave())
    nothing_left(house)


def test_metrics_count_one_outcome_for_each_request(house: House) -> None:
    house.loop.run(_events(house, lambda: ASKED))
    house.loop.run(_events(house, lambda: ASKED, stop=1))
    house.loop.run(_events(house, lambda: PrefillRequest(ASKED.prompt)))
    samples = (s for m in house.metrics.registry().collect() for s in m.samples)
    seen = {
        s.labels["outcome"]: s.value for s in samples if s.name == "deltafront_requests_total" and s.value
    }
    assert seen == {"finished": 2, "cancelled": 1}
