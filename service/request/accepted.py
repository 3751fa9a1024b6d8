"""A request whose caller is known, from its arrival to its outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..errors import DeltafrontError
from ..tracing import Trace
from .answers import RequestEvent
from .audit import Audit
from .callers import Caller
from .text.text_budget import HeldText
from .timings import TtftClock


@dataclass(eq=False, kw_only=True)
class Accepted:
    """A request at its edge.

    Args:
        text: the room that its text takes at this door.
        events: what it has to tell its client; None after the last.
        request_id: the client's; empty until the request has been checked.
        task: what computes it; None for a request that needs no stream.
        outcome: the error that ended it; None while it runs, and where it finished.
    """

    caller: Caller
    clock: TtftClock
    audit: Audit
    trace: Trace
    text: HeldText
    events: asyncio.Queue[RequestEvent | None] = field(default_factory=asyncio.Queue)
    request_id: str = ""
    task: asyncio.Task[None] | None = None
    outcome: DeltafrontError | None = None

    @property
    def owner(self) -> str:
        return self.caller.owner

    def emit(self, event: RequestEvent) -> None:
        self.events.put_nowait(event)
