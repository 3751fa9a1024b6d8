"""One request's state on a decode worker, and the times that its report is made of."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..kv.arrival import KVArrival
from ..messages import (
    DecodeReport,
    FinishEvent,
    FinishReason,
    FirstTokenTimings,
    GenerateJob,
    Reserve,
    Token,
)
from .pages import Holding

Event = FirstTokenTimings | Token | FinishEvent


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

    def report(self) -> DecodeReport:
        """The parts are disjoint: they add up to the time from the job (or the logits) to the first token."""
        began = None if self.job is None else max(self.job, self.logits or self.job)
        return DecodeReport(
            handoff_exposed=_span(began, self.complete),
            decode_wait=_span(self.ready, self.taken),
            append_prefill=_span(self.taken, self.read),
            first_step=_span(self.read, self.first),
            handoff_bytes=self.handoff_bytes,
            handoff_seconds=self.handoff_seconds,
            pages_attended=self.pages_attended,
            pages_held=self.pages_held,
        )


def _span(start: float | None, stop: float | None) -> float:
    return 0.0 if start is None or stop is None else max(0.0, stop - start)


@dataclass(eq=False)
class DecodeRequest:
    """From reservation to the end. `serial` is unique for ever, unlike the request's id.

    pins: computations and writes under way that touch the pages; pages are not freed before the last.
    length: tokens whose K/V is in the pages. token: the last token chosen, not in the pages yet.
    logits: of the position before the first token, until that is sampled.
    """

    serial: int
    order: Reserve
    holding: Holding
    arrival: KVArrival
    renewed: float
    length: int
    times: Times = field(default_factory=Times)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prompt's K/V is complete, and when the request ends."""
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    job: GenerateJob | None = None
    deadline: float | None = None
    append_ids: array[int] = field(default_factory=lambda: array("I"))
    delta: bool = False
    logits: Any = None
    token: int = 0
    produced: int = 0
    pins: int = 0
    ended: tuple[FinishReason, str] | None = None

    @property
    def request_id(self) -> str:
        return self.order.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the answer, a session's included."""
        return self.holding.session_tokens + self.order.prompt_tokens

    @property
    def appending(self) -> bool:
        return self.length < self.holding.session_tokens + len(self.append_ids)

    @property
    def ready(self) -> bool:
        """Whether the scheduler can take it."""
        if self.job is None or self.ended is not None:
            return False
        if self.order.session_id is not None:
            return True
        return self.arrival.complete and self.logits is not None

    def finish(self, reason: FinishReason, message: str) -> FinishEvent:
        return FinishEvent(self.request_id, reason, self.produced, self.times.report(), message)


def check_counts(order: Reserve) -> None:
    """Raises ValueError for counts that make no sense. Appended text may be empty here: see appended_ids."""
    prompt = order.prompt_tokens
    if prompt < 0 or order.max_tokens < 0 or (prompt == 0 and order.session_id is None):
        raise ValueError(f"cannot reserve for {prompt} prompt tokens and {order.max_tokens} new tokens")
    if order.keep_tokens < 0 or (order.session_id is None and order.keep_tokens > prompt):
        raise ValueError(f"keep_tokens {order.keep_tokens} must be within the prompt of {prompt} tokens")


def appended_ids(order: Reserve, job: GenerateJob, vocab: int) -> array[int]:
    """The job's appended token ids, checked against what was reserved. Raises ValueError, in plain words."""
    new_tokens = job.sampling.max_tokens
    if not 1 <= new_tokens <= order.max_tokens:
        raise ValueError(f"max_tokens {new_tokens} must be 1 .. {order.max_tokens}, which was reserved")
    if job.session_id != order.session_id:
        raise ValueError(f"the reservation is for session {order.session_id}, not {job.session_id}")
    ids = np.frombuffer(job.append_ids, dtype="<u4")
    if order.session_id is None:
        if len(ids):
            raise ValueError("tokens can only be appended to a session")
        return array("I")
    if len(ids) == 0:
        raise ValueError("a session can only be continued with at least one appended token")
    if len(ids) != order.prompt_tokens:
        raise ValueError(f"{len(ids)} appended tokens, but {order.prompt_tokens} were reserved")
    if int(ids.max()) >= vocab:
        raise ValueError(f"token id {int(ids.max())} is outside the vocabulary of {vocab}")
    return array("I", ids.tolist())
