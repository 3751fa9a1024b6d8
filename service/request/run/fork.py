"""The session from which the choices of one prompt continue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from deltafront.service.fleet.fleet import Fleet
from deltafront.service.request.run.plan import Plan
from deltafront.workers.messages.events import Session
from deltafront.workers.messages.requests import ID_BYTES
from deltafront.workers.roles import DecodeWorker

Forked = tuple[DecodeWorker, Session]


@dataclass
class Fork:
    """The first choice offers the session with its first token; the others wait for it.

    Create it in an event loop.
    """

    _offered: asyncio.Future[Forked | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def offer(self, session: Forked | None) -> None:
        """Offer the session. None: there will be none. Later offers are ignored."""
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


def continue_from(session: Session, plan: Plan) -> Plan:
    """Plan to prefill only what follows the session of the prompt's beginning."""
    ids = plan.prefill_ids + plan.answered_ids
    return replace(
        plan,
        prefill_ids=ids[session.tokens * ID_BYTES :],
        answered_ids=b"",
        session_id=session.session_id,
        worker_prefills=True,
    )
