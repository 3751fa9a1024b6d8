"""One run of some work for all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class SingleFlight:
    """start: starts a task and keeps a reference to it."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._work = work
        self._start = start
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Wait for a run that began after this call, which concurrent callers share."""
        if self._next is None:
            self._next = self._start(self._run_after(self._running))
        await asyncio.shield(self._next)

    async def _run_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        await self._work()
