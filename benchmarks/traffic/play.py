"""Plays a load against a server, and watches that the load generator itself is on time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltafront.benchmarks.traffic.client import Answer, Server
from deltafront.benchmarks.traffic.plan import Caller

_TICK_S = 0.005


@dataclass
class Played:
    """A played load.

    Attributes:
        seconds: From the load's begin to its end.
        lags_s: How much too late the event loop woke up, once every 5 ms. While it is late, tokens that have
            arrived wait to be recorded.
        cpu: Processor seconds of this process per second. Near 1 the load generator is the limit.
    """

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    lags_s: list[float] = field(default_factory=list)
    cpu: float = 0.0


async def play(server: Server, callers: Iterable[Caller], until_s: float | None = None) -> Played:
    """Play all callers at once.

    Args:
        until_s: Cancel what still runs after so many seconds. None: wait for all answers.
    """
    played, began, cpu = Played(), time.perf_counter(), time.process_time()
    watch = asyncio.create_task(_watch(played.lags_s))
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until_s), asyncio.TaskGroup() as tasks:
                for caller in callers:
                    tasks.create_task(_call(server, caller, played.answers, began))
    finally:
        watch.cancel()
    played.seconds = time.perf_counter() - began
    played.cpu = (time.process_time() - cpu) / played.seconds
    return played


async def _call(server: Server, caller: Caller, answers: list[Answer], began: float) -> None:
    """Send a caller's turns, each after the answer to the last one, up to the first that fails."""
    due_s = caller.start_s
    for turn in caller.turns:
        due_s += turn.think_s
        await asyncio.sleep(began + due_s - time.perf_counter())
        answers.append(answer := Answer(turn, due_s))
        await server.ask(answer, began)
        if answer.error:
            return
        due_s = answer.done_s


async def _watch(lags_s: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags_s.append(time.perf_counter() - before - _TICK_S)
