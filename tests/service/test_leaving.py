"""If a client disconnects or a deadline passes, in any phase, a request has one outcome and leaves
nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import Cancelled, DeadlineExceeded, Unavailable

from .fakes import Speed
from .inprocess import HANG_S, House, wait_until
from .test_faults import PROMPT, outcomes
from .test_requests import nothing_left


@pytest.mark.parametrize("rpc", ["generate", "prefill"])
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.1, 0.2, 0.3])
def test_disconnect_at_any_moment_frees_everything(
    house: House, client: DeltafrontClient, after_s: float, rpc: str
) -> None:
    """The work never ends, so the disconnect always comes first."""
    house.group.speed, house.decode.speed = Speed(chunk=0.03), Speed(token=0.03)
    if rpc == "generate":
        house.decode.pause_at = 20
    else:
        house.group.pause_at = 5
    call = (
        client.generate(PROMPT, max_tokens=50, session_ttl_s=30)
        if rpc == "generate"
        else client.prefill(PROMPT)
    )
    timer = threading.Timer(after_s, client.close)
    timer.start()
    try:
        for _event in call:
            pass
    except (Cancelled, Unavailable, ValueError):
        pass
    timer.join()
    wait_until(lambda: not house.decode._sessions, "a session is left")
    nothing_left(house)
    assert set(house.group.cancelled) <= {job.request_id for job in house.group.jobs}


class Gate:
    """A gate that a test opens. `reached` is set once a task waits at the gate."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.open.wait(HANG_S)

    async def wait_async(self) -> None:
        await asyncio.to_thread(self.wait)


def leaves(client: DeltafrontClient, call: Iterator[object], gate: Gate) -> None:
    """Read a stream whose client disconnects at the gate."""

    def leave() -> None:
        assert gate.reached.wait(HANG_S)
        client.close()

    leaver = threading.Thread(target=leave)
    leaver.start()
    with pytest.raises((Cancelled, ValueError)):
        list(call)
    leaver.join()


def test_disconnect_during_tokenising_reserves_nothing(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, gate, encoded = house.door._requests._resources.tokenizer, Gate(), threading.Event()
    encode = tokenizer.encode

    def slow(*arguments: Any, **options: Any) -> bytes:
        gate.wait()
        encoded.set()
        return encode(*arguments, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    leaves(client, client.generate(PROMPT), gate)
    wait_until(lambda: outcomes(house) == {("Generate", "cancelled"): 1}, "the request is not cancelled")
    gate.open.set()
    assert encoded.wait(HANG_S)
    house.loop.run(asyncio.sleep(0.05))
    assert not house.group.jobs
    nothing_left(house)


def test_disconnect_during_a_reservation_frees_the_pages(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, gate = house.decode.reserve, Gate()

    async def slow(reservation: Any) -> object:
        answer = await reserve(reservation)
        await gate.wait_async()
        return answer

    monkeypatch.setattr(house.decode, "reserve", slow)
    leaves(client, client.generate(PROMPT), gate)
    nothing_left(house)
    gate.open.set()
    assert len(house.decode.cancelled) == 1


def test_disconnect_while_a_session_is_created_releases_the_session(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, gate, kept = house.decode.keep, Gate(), []

    async def slow(job: Any) -> object:
        answer = await keep(job)
        kept.append(answer)
        await gate.wait_async()
        return answer

    monkeypatch.setattr(house.decode, "keep", slow)
    leaves(client, client.prefill("short"), gate)
    assert kept
    assert house.decode._sessions
    wait_until(lambda: outcomes(house) == {("Prefill", "cancelled"): 1}, "the request is not cancelled")
    gate.open.set()
    nothing_left(house)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_deadline_cancels_workers(house: House, client: DeltafrontClient, phase: str) -> None:
    """The work never ends, so only the deadline can end it."""
    (house.group if phase == "prefill" else house.decode).pause_at = 3
    with pytest.raises(DeadlineExceeded):
        list(client.generate(PROMPT, max_tokens=100, timeout_s=0.5))
    wait_until(lambda: outcomes(house) == {("Generate", "deadline_exceeded"): 1}, "there is no outcome")
    nothing_left(house)


def test_renews_every_request_in_progress(house: House, client: DeltafrontClient) -> None:
    house.group.pause_at = house.decode.pause_at = 3
    stream = client.generate(PROMPT, max_tokens=10)
    next(stream)
    (request_id,) = {job.request_id for job in house.group.jobs}
    for worker in (house.group, house.decode):
        wait_until(lambda worker=worker: (request_id,) in worker.renewed, "it is not renewed")  # type: ignore[misc]
    house.group.pause_at = -1
    assert house.decode.paused.wait(HANG_S)
    seen = len(house.decode.renewed)
    wait_until(lambda: len(house.decode.renewed) > seen + 1, "the answer is not renewed")
    house.decode.pause_at = -1
    list(stream)
    nothing_left(house)
    house.loop.run(house.fleet._renew())  # after any renewal that was under way
    seen = len(house.decode.renewed)
    house.loop.run(house.fleet._renew())
    assert len(house.decode.renewed) == seen
