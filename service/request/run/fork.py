"""The session from which the choices of one prompt continue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from deltafront.service.fleet.fleet import Fleet
from deltafront.workers.messages.events import Session
from deltafront.workers.roles import DecodeWorker

Forked = tuple[DecodeWorker, Session]


@dataclass
class Fork:
    """Shares one prefill among the choices of a prompt: the first choice keeps a session and offers it with
    its first token. The other choices wait for this session and fork from it.

    Create it in an event loop.
    """

    _offered: asyncio.Future[Forked | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def offer(self, session: Forked | None) -> None:
        """Offer the session; None if there will be no session. Later offers are ignored."""
        if not self._offered.done():
            self._offered.set_result(session)

    async def session(self) -> Forked | None:
        return await asyncio.shield(self._offered)

    def release(self, fleet: Fleet, owner: str) -> None:
        """End the session. Choices that share its pages go on."""
        self.offer(None)
        session = self._offered.result()
        if session is not None:
            fleet.release(session[0], session[1].session_id, owner)
