"""One request of a decode worker, from reservation to its end, and how long its parts took."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Any

from ..kv.arrival import KVArrival
from ..messages.events import DecodeReport, FinishEvent, FinishReason, FirstTokenTimings, Token
from ..messages.requests import GenerateJob, Reserve
from ..tracing import NO_SPAN, Span
from .rows import Row
from .sessions import Holding, KeptSession

DecodeEvent = FirstTokenTimings | Token | FinishEvent


@dataclass
class Times:
    """Moments of a request (seconds of one monotonic clock; None: not yet) and what it moved and read.

    complete: the last page was here. ready: nothing was missing any more. taken: the scheduler took it.
    read: its logits were there (appended tokens are read in between). first: the first token was sampled.
    """

    job: float | None = None
    logits: float | None = None
    complete: float | None = None
    ready: float | None = None
    taken: float | None = None
    read: float | None = None
    first: float | None = None
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    pages_attended: int = 0
    pages_held: int = 0
    steps: int = 0
    own_steps: float = 0.0

    def stepped(self, pages_attended: int, pages_held: int, batch: int) -> None:
        """A decode step that computed so many requests."""
        self.pages_attended += pages_attended
        self.pages_held += pages_held
        self.steps += 1
        self.own_steps += 1 / batch

    @property
    def parts(self) -> dict[str, tuple[float | None, float | None]]:
        """When those of TTFT began and ended here."""
        began = None if self.job is None else max(self.job, self.logits or self.job)
        return {
            "handoff_exposed": (began, self.complete),
            "decode_wait": (self.ready, self.taken),
            "append_prefill": (self.taken, self.read),
            "first_step": (self.read, self.first),
        }

    def report(self) -> DecodeReport:
        """The parts are disjoint: they add up to the time from the job (or the logits) to the first token."""
        seconds = {part: _length(*moments) for part, moments in self.parts.items()}
        return DecodeReport(
            handoff_exposed=seconds["handoff_exposed"],
            decode_wait=seconds["decode_wait"],
            append_prefill=seconds["append_prefill"],
            first_step=seconds["first_step"],
            handoff_bytes=self.handoff_bytes,
            handoff_seconds=self.handoff_seconds,
            pages_attended=self.pages_attended,
            pages_held=self.pages_held,
            steps=self.steps,
            own_steps=self.own_steps,
        )


def _length(start: float | None, stop: float | None) -> float:
    return 0.0 if start is None or stop is None else max(0.0, stop - start)


@dataclass(eq=False)
class DecodeRequest:
    """All that is known of one request, from reservation to the end. The engine makes and keeps it, the
    scheduler moves it on. `serial` is unique for ever, unlike the request's id.

    reserved, renewed: seconds of the engine's clock. length: tokens whose K/V is in the pages. token: the
    last token chosen, not in the pages yet. logits: of the position before the first token, until that is
    sampled.
    """

    serial: int
    order: Reserve
    holding: Holding
    arrival: KVArrival
    reserved: float
    renewed: float
    length: int
    times: Times = field(default_factory=Times)
    events: asyncio.Queue[DecodeEvent] = field(default_factory=asyncio.Queue)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prompt's K/V is complete, when it will not be, and when the request ends."""
    lost: str = ""
    """Why some of its K/V did not arrive; then it has to be resumed before anybody waits for it."""
    job: GenerateJob | None = None
    deadline: float | None = None
    append_ids: array[int] = field(default_factory=lambda: array("I"))
    selects_pages: bool = False
    logits: Any = None
    token: int = 0
    produced: int = 0
    ended: tuple[FinishReason, str] | None = None
    overdue: int = 0
    """How often in a row its lease was found to have run out."""
    kept: KeptSession | None = None
    """The session that was made of its prompt."""
    span: Span = NO_SPAN
    """Of its job."""

    @property
    def request_id(self) -> str:
        return self.order.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the answer, a session's included."""
        return self.holding.session_tokens + self.order.prompt_tokens

    @property
    def appended(self) -> int:
        """How many of the appended tokens have been read; all of them behind a session or a prompt's K/V."""
        received = self.order.prompt_tokens if self.order.session_id is None else 0
        return self.length - self.holding.session_tokens - received

    @property
    def appending(self) -> bool:
        return self.appended < len(self.append_ids)

    @property
    def ready(self) -> bool:
        """Whether the scheduler can take it."""
        if self.job is None or self.ended is not None:
            return False
        if self.order.session_id is not None:
            return True
        return self.arrival.complete and self.logits is not None

    @property
    def left(self) -> int:
        """Tokens that its answer may still have."""
        assert self.job is not None  # a request without a job is never ready
        return self.job.sampling.max_tokens - self.produced

    @property
    def row(self) -> Row:
        """Of the next decode step, or of the token that is sampled first."""
        assert self.job is not None  # a request without a job is never ready
        return Row(
            self.serial, self.holding.table, self.length, self.token, self.job.sampling, self.selects_pages
        )

    def not_arrived(self, error: Exception) -> None:
        """K/V or logits that were announced did not come, or cannot be its own."""
        self.lost = f"the prompt's K/V did not arrive: {error}"
        self.settled.set()
        if self.job is not None:
            self.close(FinishReason.NO_KV, self.lost)

    def resume(self, tokens: int, now: float) -> None:
        """All but the first `tokens` tokens of K/V are to come once more, and the logits."""
        self.arrival = self.arrival.until(tokens)
        self.lost, self.logits, self.renewed = "", None, now
        self.times.logits = self.times.complete = None
        if self.ended is None:
            self.settled.clear()

    def close(self, reason: FinishReason, message: str) -> None:
        """The one way to end; what comes later changes nothing."""
        if self.ended is not None:
            return
        self.ended = (reason, message)
        self.settled.set()
        self.logits = None
        self.end_span()
        if self.job is not None:
            self.tell_end()
        self.holding.end()

    def end_span(self) -> None:
        """Once it has ended, with the parts that it came to."""
        if self.span is NO_SPAN:
            return
        assert self.ended is not None
        reason, message = self.ended
        for part, moments in self.times.parts.items():
            self.span.part(part, *moments)
        failed = reason in (FinishReason.FAILED, FinishReason.NO_KV)
        moved, answered = self.times.handoff_bytes, self.produced
        self.span.end(reason.value, message if failed else "", handoff_bytes=moved, tokens=answered)
        self.span = NO_SPAN

    def tell_end(self) -> None:
        """Queue the one terminal event of a request that has ended."""
        assert self.ended is not None
        reason, message = self.ended
        self.events.put_nowait(
            FinishEvent(self.request_id, reason, self.produced, self.times.report(), message)
        )
