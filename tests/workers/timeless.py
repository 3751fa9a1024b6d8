"""Runs tests in which time is the event loop's own: it stands still while anything runs, and jumps to the
next timer when nothing does. A busy machine then changes nothing, and no test waits.

Use it only for code of one thread. Events from other threads or processes come at no defined time.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


def timeless(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in such an event loop. Its clock is `asyncio.get_running_loop().time`."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=_loop) as runner:
            runner.run(test(*arguments, **named))

    return run


class _Selector(selectors.DefaultSelector):
    """Never waits, but adds up the time that it should have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("the test waits for something that no timer will bring")
        self.now += max(0.0, timeout)
        return super().select(0)


def _loop() -> asyncio.AbstractEventLoop:
    selector = _Selector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    return loop
