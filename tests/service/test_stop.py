"""A door that is stopped during requests leaves no task and prints no error."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from deltafront.service import wiring
from deltafront.service.errors import Unavailable
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.metrics import Metrics
from deltafront.service.request.calls import GenerateRequest, PrefillRequest, Prompt
from deltafront.service.request.handler import RequestHandler
from deltafront.workers.messages.events import Token

from ..suspensions import Acting, at_each_await
from .directory import LocalDirectory
from .fakes import FakeDecode, FakeGroup
from .inprocess import Cut, edge, settings

ASKED = GenerateRequest(Prompt(text="x" * 300))
READ = PrefillRequest(Prompt(text="y" * 300))


def to_the_end_of_its_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a loop like a process that ends: without cancelling the remaining tasks as `asyncio.run` would."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(work)
    loop.close()
    gc.collect()


class Door:
    """A door without a protocol."""

    def __init__(self, model: Path, metrics: Path) -> None:
        config = settings(model, refresh_s=1e6)
        self.decode, found = FakeDecode("decode:d0"), Metrics(metrics)
        self.group = FakeGroup("prefill:g0", lambda _worker, *what: self.decode.deliver(*what))
        directory = LocalDirectory([Cut(self.group)], [Cut(self.decode)])  # type: ignore[list-item]
        self.fleet = Fleet(directory, wiring.observer(found), config.door.refresh_s, config.door.renew_s)
        self.requests: RequestHandler = wiring.request_handler(
            config, self.fleet, found, metrics_address="nowhere:1"
        )
        self.streams: list[AsyncGenerator[Any, None]] = []

    async def begin(self) -> None:
        """Begin two requests in decode and two in prefill. One client of each disconnects when the door
        stops."""
        self.fleet.start()
        self.decode.pause_at = 1
        for _ in range(2):
            self.streams.append(edge(self.requests, lambda: ASKED))
            while not isinstance(await anext(self.streams[-1]), Token):
                pass
        self.group.pause_at = 1
        for _ in range(2):
            self.streams.append(edge(self.requests, lambda: READ))
            await anext(self.streams[-1])
        for stream in self.streams[::2]:
            await stream.aclose()

    async def stop(self) -> None:
        await self.requests.stop()
        await self.fleet.stop()


def test_stopped_door_has_no_running_task(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asyncio")
    doors: list[Door] = []

    async def run() -> None:
        door = Door(model, tmp_path)
        doors.append(door)
        await door.begin()
        assert len(asyncio.all_tasks()) > 5
        await door.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    to_the_end_of_its_loop(run())
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    (door,) = doors
    assert len(door.decode.cancelled) == 4, "its workers have heard that nobody waits any more"
    assert not door.decode.used() and not door.group._open


async def test_a_stopping_door_refuses_new_requests_with_a_retry_time(model: Path, tmp_path: Path) -> None:
    """Tries a request at each await of the stop, and after it."""

    async def comes_at(number: int) -> bool:
        door, late = Door(model, tmp_path), list[asyncio.Task[Any]]()
        await door.begin()
        acting = Acting(door.stop(), number, lambda: late.append(asyncio.create_task(ask(door))))
        await acting.start()
        if not late:
            late.append(asyncio.create_task(ask(door)))
        with pytest.raises(Unavailable, match="is stopping") as refused:
            await late[0]
        assert refused.value.retry_after_s
        return acting.acted

    async def ask(door: Door) -> None:
        async with contextlib.aclosing(edge(door.requests, lambda: ASKED)) as events:
            async for _event in events:
                pass

    assert await at_each_await(comes_at) > 1
