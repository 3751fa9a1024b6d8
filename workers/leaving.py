import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


class Leaving(ABC):
    """Base of actors that doors call and that can drain.

    Doors see `draining` and send new prompts to other workers. Running requests are served. A door that knows
    no other worker still sends prompts and renews its requests.
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
        """Return when nothing runs or waits, no session is kept, all pages are free, and no door renews.

        It returns after `within_s` seconds at the latest and says what is left; at once if the worker is
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
        """Say what is still running; empty if the worker is idle."""
        renewed, self._renewed = self._renewed, False
        state = vars(await self.stats())
        counts = {name: state.get(name) for name in ("running", "waiting", "sessions")}
        counts["pages in use"] = state["pages_total"] - state["pages_free"]  # KV may still be handed over
        left = [f"{name}: {count}" for name, count in counts.items() if count]
        return ", ".join([*left, *["a door that renews"] * renewed])
