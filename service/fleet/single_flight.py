"""One question for all who ask at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Crowd:
    """Shares runs of `work` among its callers. start: runs something as a task that somebody keeps."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._work = work
        self._start = start
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def ask(self) -> None:
        """Returns after a run that began after this call. Whoever calls during a run waits for the one that
        follows it, which is the same for all of them."""
        if self._next is None:
            self._next = self._start(self._after(self._running))
        await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        await self._work()
