import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


class Leaving(ABC):
    """Base class of the Ray actors that API servers call. It adds draining.

    API servers read `draining` and send new prompts to other workers. A draining worker still finishes its
    running requests. An API server that knows no other worker still sends it prompts.
    """

    hosted: Any

    settled_s = 2.5
    """Seconds for which an actor must be idle before it ends. API servers check `draining` once a second, so
    a request may still arrive meanwhile."""
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
        """Set `draining` and wait until the worker is idle.

        It is idle when it has no requests and no sessions, all pages are free, and no API server renews a
        request. After `within_s` seconds, log what is left and return. Return at once if the worker is
        faulty.
        """
        self.draining, left = True, "it has not said what"
        clock = asyncio.get_running_loop().time
        idle_since: float | None = None
        try:
            async with asyncio.timeout(within_s):
                while not await self.check():
                    left = await self._left()
                    if left or idle_since is None:
                        idle_since = None if left else clock()
                    elif clock() - idle_since >= self.settled_s:
                        return
                    await asyncio.sleep(self.settled_s / 10)
        except TimeoutError:
            log.warning("not drained after %g s, this is left: %s", within_s, left or "nothing, for a moment")

    async def _left(self) -> str:
        """Describe what is still running; return an empty string if the worker is idle."""
        renewed, self._renewed = self._renewed, False
        state = vars(await self.stats())
        counts = {name: state.get(name) for name in ("running", "waiting", "sessions")}
        counts["pages in use"] = state["pages_total"] - state["pages_free"]  # KV may still be handed over
        left = [f"{name}: {count}" for name, count in counts.items() if count]
        return ", ".join([*left, *["a door that renews"] * renewed])
