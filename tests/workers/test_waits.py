"""Tests that a slow `close` logs the work that it waits for."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from deltafront.workers import waits
from deltafront.workers.decode.tiers import KeptTasks
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.waits import said_when_slow

from ..suspensions import until

HANG_S = 60.0


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Wait for the first logged lines, and return them."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(waits, "SLOW_S", 0.01)

    def wait() -> str:
        deadline = time.monotonic() + HANG_S
        while not (lines := [one.getMessage() for one in caplog.records if one.name == waits.__name__]):
            assert time.monotonic() < deadline, "nothing was said"
            time.sleep(0.005)
        return lines[0]

    return wait


def test_slow_wait_logs_repeatedly_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    left, lines = ["a chunk", "a page"], list[str]()
    with said_when_slow(lambda: left[0], 0.01):
        deadline = time.monotonic() + HANG_S
        while not any("a page" in line for line in lines):
            assert time.monotonic() < deadline, lines
            time.sleep(0.005)
            lines = [record.getMessage() for record in caplog.records]
            if lines:
                left[:] = ["a page"]
    assert lines[0] == "after 0.01 s, waits for a chunk"


def test_quick_wait_logs_nothing_and_leaves_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    with said_when_slow(lambda: "nothing", HANG_S):
        (thread,) = (one for one in threading.enumerate() if one.name == "slow-wait")
    assert not thread.is_alive() and not caplog.records


@contextmanager
def held_up(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[threading.Event]]:
    """Make calls of a method last until the second event is set. The first event is set when a call
    begins."""
    began, let_go, method = threading.Event(), threading.Event(), getattr(owner, name)

    def call(*given: Any) -> Any:
        began.set()
        assert let_go.wait(HANG_S)
        return method(*given)

    monkeypatch.setattr(owner, name, call)
    try:
        yield began, let_go
    finally:
        let_go.set()


async def test_closing_decode_worker_logs_that_it_still_computes(
    bench: Any, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench()
    with held_up(run.engine._runner, "first_tokens", monkeypatch) as (began, let_go):
        answering = asyncio.create_task(run.ask("a", [3] * 20, Sampling(max_tokens=2, ignore_eos=True)))
        assert await asyncio.to_thread(began.wait, HANG_S)
        run.may_fault = True
        closing = asyncio.create_task(run.engine.close())
        line = await asyncio.to_thread(said)
        let_go.set()
        await closing
        await answering
    assert "waits for what it computes, to close decode:test" in line


async def test_cancel_also_reaches_tasks_started_during_the_cancel() -> None:
    kept = KeptTasks()

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            kept.begin(asyncio.Event().wait())

    kept.begin(cleans_up())
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(kept.cancel())
    assert await until(cancelling.done)
    assert not len(kept)
