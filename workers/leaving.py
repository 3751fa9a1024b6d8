import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Leaving(ABC):
    """Base of actors that doors call and that may drain.

    Doors see `draining` and send new prompts to other workers; requests under way are served. Doors that know
    no other worker go on, and show it by renewing.
    """

    hosted: Any

    settled_s = 2.5
    """How long an actor must have been idle. Doors check once a second, so a request may still come."""
    draining = False
    _renewed = False

    async def renew(self, request_ids: Sequence[str]) -> None:
        self._renewed = True
        await self.hosted.renew(request_ids)

    @abstractmethod
    async def stats(self) -> Any: ...

    @abstractmethod
    async def check(self) -> str: ...

    async def drain(self, within_s: float) -> None:
        """Return when nothing runs, waits or is kept, pages are free, and no door renews.

        It returns after within_s seconds at the latest, and at once if the worker is broken.
        """
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
        in_use = state["pages_free"] < state["pages_total"]  # K/V may still be handed over
        return not (renewed or in_use or any(state.get(name) for name in ("running", "waiting", "sessions")))
