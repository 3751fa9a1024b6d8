"""Acts at each await of a coroutine in turn, so that a test tries every order of steps.

Nothing here sleeps: work that waits only for the event loop ends within some turns of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")
TURNS = 1000
"""Turns of the event loop in which all work must end."""


class Acting:
    """Awaits `work`. Calls `act` once, while `work` is suspended for the `number`th time, counted from 0.

    Attributes:
        acted: Whether `work` was suspended that many times.
    """

    def __init__(self, work: Coroutine[Any, Any, T], number: int, act: Callable[[], object]) -> None:
        self._work, self._number, self._act = work, number, act
        self.acted = False

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731
        for number in itertools.count():
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            if number == self._number:
                self.acted = True
                self._act()
            try:
                yield waited_for
            except BaseException as error:
                thrown = error
                step = lambda: self._work.throw(thrown)  # noqa: E731, B023
            else:
                step = lambda: self._work.send(None)  # noqa: E731
        raise AssertionError("unreachable")

    def start(self) -> asyncio.Task[Any]:
        async def run() -> Any:
            return await self

        return asyncio.create_task(run())


async def until(true: Callable[[], object]) -> bool:
    """Run the event loop until `true()` holds, for at most TURNS turns. Return whether it held."""
    for _ in range(TURNS):
        if true():
            return True
        await asyncio.sleep(0)
    return bool(true())


async def at_each_await(scene: Callable[[int], Awaitable[bool]]) -> int:
    """Run `scene(0)`, `scene(1)` … until one returns False, because its work had fewer suspensions.

    Returns:
        The number of scenes.
    """
    for number in itertools.count():
        if not await scene(number):
            return number
    raise AssertionError("unreachable")


class Inline(Executor):
    """An executor that runs work at once on the caller's thread. The event loop sees the result in its next
    turns."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
