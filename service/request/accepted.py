"""A request whose caller is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    """State that edge and run share.

    Args:
        conclude: counts and audits the request, the first time that it is called.
        events: None follows the last.
        task: the run; None for a request without a stream.
        outcome: None if it finished.
    """

    caller: Caller
    clock: TtftClock
    audit: Audit
    trace: Trace
    text: HeldText
    conclude: Callable[[DeltafrontError | None], None]
    events: asyncio.Queue[RequestEvent | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    outcome: DeltafrontError | None = None

    @property
    def owner(self) -> str:
        return self.caller.owner

    def emit(self, event: RequestEvent) -> None:
        self.events.put_nowait(event)
