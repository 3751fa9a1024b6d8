"""A run's context: the parts of its door, and its own request's state."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from deltafront.service.errors import DeltafrontError
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.metrics import Metrics
from deltafront.service.request.answers import RequestEvent
from deltafront.service.request.audit import Audit
from deltafront.service.request.callers import Caller, Callers, RequestUse
from deltafront.service.request.text.text_budget import HeldText
from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.service.request.ttft_clock import TtftClock
from deltafront.service.settings import DoorConfig
from deltafront.service.tracing import Trace, Tracing
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.model.grammars import Grammars


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Parts that a door makes once.

    Args:
        vocabulary: Token ids below it have an embedding.
        positions: Tokens of the longest prompt with its answer.
    """

    door: str
    model: str
    fleet: Fleet
    callers: Callers
    tokenizer: TextTokenizer
    metrics: Metrics
    settings: DoorConfig
    vocabulary: int
    positions: int
    eos_ids: tuple[int, ...]
    tracing: Tracing
    grammars: Grammars
    profile: Profile | None = None


@dataclass(eq=False, kw_only=True)
class Accepted:
    """A request's state that edge and run share.

    Args:
        conclude: Counts and audits the request, the first time that it is called.
        events: None follows the last.
        task: The run; None for a request without a stream.
        outcome: Its error; None before the run, and after success.
    """

    caller: Caller
    clock: TtftClock
    audit: Audit
    trace: Trace
    use: RequestUse
    text: HeldText
    conclude: Callable[[DeltafrontError | None], None]
    events: asyncio.Queue[RequestEvent | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    outcome: DeltafrontError | None = None
