"""The client for asyncio behaves like the synchronous one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from deltafront.service.client import (
    AsyncDeltafrontClient,
    Cancelled,
    ConnectionLost,
    InvalidArgument,
    NotFound,
    PrefillFinished,
)

from ..inprocess import HANG_S, House
from ..test_requests import collect, expected, ids, nothing_left

pytestmark = pytest.mark.usefixtures("impatient")
PROMPT = "x" * 500


@pytest.fixture
async def client(house: House) -> AsyncIterator[AsyncDeltafrontClient]:
    async with AsyncDeltafrontClient(house.address) as client:
        yield client


async def gather(events: AsyncIterator[Any]) -> list[Any]:
    async with asyncio.timeout(HANG_S):
        return [event async for event in events]


async def test_async_client_gets_the_answer_of_the_synchronous_client(client: AsyncDeltafrontClient) -> None:
    text, tokens, finish, progress = collect(await gather(client.generate("ABC", max_tokens=9, stop="zz")))
    assert text == expected(ids("ABC"), 9)
    assert (len(tokens), finish.reason, bool(progress)) == (9, "length", True)


async def test_keeps_a_session_answers_a_question_and_releases_it(client: AsyncDeltafrontClient) -> None:
    *_, made = await gather(client.prefill(PROMPT))
    assert isinstance(made, PrefillFinished)
    session = made.session.session_id
    text, *_ = collect(await gather(client.generate(session_id=session, append="q", max_tokens=5)))
    assert text == expected(ids(PROMPT) + ids("q", bos=False), 5)
    await client.release(session)
    with pytest.raises(NotFound):
        await client.release(session)


@pytest.mark.parametrize("events", [0, 2, 9])
async def test_async_client_resumes_an_answer_where_it_stopped(
    house: House, client: AsyncDeltafrontClient, events: int
) -> None:
    house.losses = [(events, grpc.StatusCode.UNAVAILABLE), (2, grpc.StatusCode.CANCELLED)]
    text, tokens, finish, _ = collect(await gather(client.generate(PROMPT, max_tokens=20)))
    assert text == expected(ids(PROMPT), 20)
    assert [token.index for token in tokens] == list(range(20))
    assert (finish.reason, house.losses) == ("length", [])


async def test_raises_a_lost_connection_if_retries_are_off(house: House) -> None:
    async with AsyncDeltafrontClient(house.address, retry_s=0) as client:
        house.losses = [(2, grpc.StatusCode.UNAVAILABLE)]
        with pytest.raises(ConnectionLost):
            await gather(client.generate(PROMPT, max_tokens=20))


async def test_a_cancelled_task_cancels_its_request(house: House, client: AsyncDeltafrontClient) -> None:
    started = asyncio.Event()

    async def ask() -> None:
        async for _ in client.generate(PROMPT, max_tokens=4_000, ignore_eos=True):
            started.set()

    task = asyncio.create_task(ask())
    async with asyncio.timeout(HANG_S):
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(nothing_left, house)


async def test_leaving_the_iterator_cancels_its_request(house: House, client: AsyncDeltafrontClient) -> None:
    events = client.generate(PROMPT, max_tokens=4_000, ignore_eos=True)
    await anext(events)
    await events.aclose()
    await asyncio.to_thread(nothing_left, house)


async def test_closing_the_client_ends_running_requests(house: House) -> None:
    client = AsyncDeltafrontClient(house.address)
    events = client.generate(PROMPT, max_tokens=4_000, ignore_eos=True)
    await anext(events)
    await client.close()
    with pytest.raises(Cancelled):
        await gather(events)
    await asyncio.to_thread(nothing_left, house)


async def test_info_describes_the_server_and_cancel_takes_an_id(client: AsyncDeltafrontClient) -> None:
    assert (await client.info()).model
    assert await client.cancel("no such request") == 0


async def test_async_client_names_an_unknown_argument(client: AsyncDeltafrontClient) -> None:
    with pytest.raises(TypeError, match=r"unexpected argument 'max_token'; known: .*max_tokens"):
        client.generate("a", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="page_selection"):
        client.generate("a", page_selection="all")
