"""What a worker does when it is taken away: it says so, ends what it has, and waits for who replaces it."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Leaving(ABC):
    """A part of the actors that doors speak to. `draining` goes into their state, so that doors send new
    prompts to others; what is under way, sessions included, is served as before. Doors that know of nobody
    else go on as they did, and say so by renewing, with no request if they have none here."""

    hosted: Any

    settled_s = 2.5
    """How long nothing must have been there: doors look at workers once a second, so a request may still
    come."""
    draining = False
    _renewed = False

    async def renew(self, request_ids: Sequence[str]) -> None:
        """`Leased.renew`."""
        self._renewed = True
        await self.hosted.renew(request_ids)

    @abstractmethod
    async def stats(self) -> Any:
        """GroupStats or DecodeStats."""

    @abstractmethod
    async def check(self) -> str:
        """Why it is broken; empty while it is well."""

    async def drain(self, within_s: float) -> None:
        """Returns when nothing runs, waits or is kept any more, its pages are free, and no door wants it to
        stay; after within_s seconds at the latest, and at once if it is broken, since then nothing will end
        well."""
        self.draining = True
        clock = asyncio.get_running_loop().time
        idle_since: float | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while idle_since is None or clock() - idle_since < self.settled_s:
                    if await self.check():
                        return
                    idle = await self._idle()
                    idle_since = (idle_since or clock()) if idle else None
                    await asyncio.sleep(self.settled_s / 10)

    async def _idle(self) -> bool:
        renewed, self._renewed = self._renewed, False
        state = vars(await self.stats())
        held = state["pages_free"] < state["pages_total"]  # a prompt that is read may still be handed over
        return not (renewed or held or any(state.get(name) for name in ("running", "waiting", "sessions")))
