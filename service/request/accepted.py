"""A request whose caller is known."""

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
    """State that edge and run share, from a request's arrival to its outcome.

    Args:
        events: for the client; None follows the last.
        request_id: empty until it is checked.
        task: the run; None for a request without a stream.
        outcome: None while it runs, and after it finished without an error.
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
