"""The context of a request's run: the door's shared parts, and the request's state."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from deltafront.service.errors import DeltafrontError
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.metrics import Metrics
from deltafront.service.request.after_prefill import AfterPrefill
from deltafront.service.request.answers import RequestEvent
from deltafront.service.request.audit import Audit
from deltafront.service.request.callers import Caller, Callers, RequestUse
from deltafront.service.request.shadow import ShadowReads
from deltafront.service.request.text.text_budget import HeldText
from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.service.request.ttft_clock import TtftClock
from deltafront.service.settings import DoorConfig
from deltafront.service.tracing import Trace, Tracing
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.model.grammars import Grammars


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The parts that all requests of a door share.

    Args:
        vocabulary: Number of token ids with an embedding.
        positions: Maximum tokens of a prompt with its answer.
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
    shadow: ShadowReads
    profile: Profile | None = None
    after_prefill: AfterPrefill = field(default_factory=AfterPrefill)


@dataclass(eq=False, kw_only=True)
class Accepted:
    """The state of an accepted request, shared by the protocol (gRPC or HTTP) and the run.

    Args:
        conclude: Writes the request's metrics and audit line; later calls do nothing.
        events: The queue of events; None follows the last event.
        task: The task of the run; None for a request without a stream.
        outcome: The request's error; None before the run and after success.
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
