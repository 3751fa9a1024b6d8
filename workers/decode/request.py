"""The state of one request on a decode worker, from its reservation to its end."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from deltafront.kernels.constants import BLOCK
from deltafront.workers.decode.reads import Recompute, Step, next_layers, plan_reads, scored
from deltafront.workers.decode.sampling.row_options import AnswerSoFar
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.kv.handoff.inbox import KVInbox
from deltafront.workers.kv.pages.leases import Lease
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.messages.events import (
    DecodeReport,
    FinishEvent,
    FinishReason,
    FirstTokenTimings,
    PromptLogprobs,
    Token,
)
from deltafront.workers.messages.requests import (
    DecodeFailed,
    GenerateJob,
    RefusalReason,
    Refused,
    RequestOptions,
    Reservation,
)
from deltafront.workers.messages.stages import HandoffFailed
from deltafront.workers.model.grammars import GrammarState
from deltafront.workers.tracing import NO_SPAN, Span

DecodeEvent = PromptLogprobs | FirstTokenTimings | Token | FinishEvent


@dataclass(kw_only=True)
class RequestTimes:
    """The times at which a request reached each point, in seconds of one monotonic clock; None: not yet.

    Attributes:
        job: The request's job arrived.
        logits: The prompt's logits arrived.
        complete: The last KV was written to the pages.
        ready: The job, the KV and the logits were all there.
        admitted: The scheduler admitted the request.
        blocks_selected: Appended text was prefilled and blocks to recompute were selected.
        read: The decode worker finished its own prefill.
        first: The first token was sampled.
    """

    job: float | None = None
    logits: float | None = None
    complete: float | None = None
    ready: float | None = None
    admitted: float | None = None
    blocks_selected: float | None = None
    read: float | None = None
    first: float | None = None
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    """Seconds during which KV of the request was being received."""
    pages_attended: int = 0
    pages_held: int = 0
    steps: int = 0
    own_steps: float = 0.0
    recomputed_tokens: int = 0
    _under_way: int = 0
    _since: float = 0.0

    @contextmanager
    def receiving_kv(self, clock: Callable[[], float]) -> Iterator[None]:
        if not self._under_way:
            self._since = clock()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.handoff_seconds += clock() - self._since

    def record_step(self, pages_attended: int, pages_held: int, batch: int) -> None:
        self.pages_attended += pages_attended
        self.pages_held += pages_held
        self.steps += 1
        self.own_steps += 1 / batch

    @property
    def parts(self) -> dict[str, tuple[float | None, float | None]]:
        began = None if self.job is None else max(self.job, self.logits or self.job)
        return {
            "handoff_exposed": (began, self.complete),
            "decode_wait": (self.ready, self.admitted),
            "append_prefill": (
                self.admitted,
                self.read if self.blocks_selected is None else self.blocks_selected,
            ),
            "recompute": (self.blocks_selected, self.read),
            "first_step": (self.read, self.first),
        }

    def report(self) -> DecodeReport:
        """Report where the time to first token went. The `parts` are disjoint, and add up to the time from
        the arrival of job and logits to the first token."""
        parts: dict[str, Any] = {part: _length(*moments) for part, moments in self.parts.items()}
        names = (field.name for field in fields(DecodeReport))
        return DecodeReport(**parts, **{name: getattr(self, name) for name in names if name not in parts})


def _length(start: float | None, stop: float | None) -> float:
    return 0.0 if start is None or stop is None else max(0.0, stop - start)


@dataclass(eq=False, kw_only=True)
class DecodeRequest:
    """A request's state. The engine and the scheduler change it.

    Attributes:
        serial: A unique number, because a request id may be used again.
        reserved, renewed: Times of the reservation and the last renewal, in seconds of the engine's clock.
        length: Number of tokens whose KV is in the pages.
        token: The last sampled token. Its KV is not in the pages yet.
        logits: The logits of the first token; None once it is sampled.
        inbox: Receives the KV of the latest attempt.
    """

    serial: int
    layers: int
    reservation: Reservation
    pages: RequestPages
    reserved: float
    renewed: float
    length: int
    inbox: KVInbox = field(init=False)
    times: RequestTimes = field(default_factory=RequestTimes)
    events: asyncio.Queue[DecodeEvent] = field(default_factory=asyncio.Queue)
    job: GenerateJob | None = None
    deadline: float | None = None
    reads: deque[Step] = field(default_factory=deque)
    layers_read: int = 0
    """Number of layers of the first step in `reads` that are already computed."""
    known_ids: array[int] = field(repr=False, default_factory=lambda: array("I"))
    """Ids of all tokens before the answer; empty if no block may be recomputed."""
    blocks: Sequence[int] = ()
    selects_pages: bool = False
    logits: Any = None
    token: int = 0
    produced: int = 0
    ended: tuple[FinishReason, str] | None = None
    overdue: int = 0
    """Number of consecutive checks that have found the lease expired."""
    session: Lease | None = None
    """The session that keeps the request's prompt."""
    answer_ids: array[int] = field(repr=False, default_factory=lambda: array("I"))
    recomputes: bool = False
    so_far: AnswerSoFar | None = None
    grammar: GrammarState | None = None
    """The grammar that the answer must match, if any. Only the compute thread changes it."""
    span: Span = NO_SPAN

    @property
    def request_id(self) -> str:
        return self.reservation.request_id

    @property
    def options(self) -> RequestOptions:
        return self.reservation.options

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the answer, including those of the session or cached prefix."""
        return self.pages.held_tokens + self.reservation.new_tokens

    @property
    def known_tokens(self) -> int:
        """Number of tokens whose KV is in the pages before the decode worker prefills any."""
        return self.pages.held_tokens if self.reservation.reads else self.prompt_tokens

    def plan_reads(self, extend_ids: array[int], chunk: int) -> None:
        """Plan the steps that prefill `extend_ids`. Raises ValueError if the job's `answered_tokens` is
        wrong."""
        assert self.job is not None
        answered, asked = self.job.answered_tokens, self.reservation.reads
        if not 0 <= answered <= len(extend_ids) - asked:
            raise ValueError(f"answered_tokens {answered} is not within {len(extend_ids)} appended tokens")
        self.reads += plan_reads(
            self.length,
            self.known_ids,
            extend_ids,
            answered=answered,
            chunk=chunk,
            blocks=self.options.recompute_blocks,
            keep_tokens=self.job.keep_tokens,
        )
        self.recomputes = any(isinstance(step, Recompute) for step in self.reads)
        prompt_end = len(extend_ids) - answered
        top, since = self.options.prompt_logprobs, self.options.logprobs_from
        if top is not None:
            self.reads = deque(scored(self.reads, extend_ids[:prompt_end], top, since))
        self.answer_ids += extend_ids[prompt_end:]
        if self.known_ids:
            self.known_ids += extend_ids[:prompt_end]

    def note_answer(self, eos_ids: Sequence[int]) -> None:
        """Set `so_far`, the tokens that penalties depend on, if the request's sampling options change logits.
        Call it after `plan_reads`."""
        job = self.job
        if job is None or not job.sampling.changes_logits:
            return
        answered = job.answered_tokens if self.reservation.reads else 0
        stop_ids = (*eos_ids, *job.sampling.stop_token_ids)
        self.so_far = AnswerSoFar(job.distinct_ids, self.answer_ids, self.prompt_tokens - answered, stop_ids)

    def cache_prefix(self, *, ends: bool = False) -> None:
        """Put the request's full pages into the prefix cache.

        If blocks were recomputed, only KV that this worker did not prefill is cached, since recomputed KV
        depends on the question. After a sparse prefill by a prefill group, only `lasting_tokens` are cached.
        """
        key, tokens = self.reservation.key, self.length
        if key is None:
            return
        if self.recomputes:
            tokens = self.known_tokens
        if not self.reservation.reads and not key.exact:
            tokens = min(tokens, key.lasting_tokens)
        self.pages.cache_prefix(tokens, self.answer_ids.tobytes(), ends=ends)

    def prepare(self, step: Step) -> None:
        """Replace the pages that the step will overwrite by unshared ones, since others may share them."""
        size, known_tokens = PAGE_TOKENS, self.known_tokens
        if isinstance(step, Recompute):
            pages = BLOCK // size
            self.pages.divert([b * pages + page for b in self.blocks for page in range(pages)])
        elif step.select_blocks and step.start < known_tokens:
            self.pages.divert(range(step.start // size, pages_for(known_tokens)))

    def ids_of_blocks(self) -> array[int]:
        ids = array("I")
        for block in self.blocks:
            ids += self.known_ids[block * BLOCK : (block + 1) * BLOCK]
        return ids

    @property
    def layers_to_read(self) -> range:
        """The layers of the first of `reads`, the next prefill step; empty until their KV has arrived."""
        return next_layers(self.layers_read, self.layers - self.pages.layers_coming, self.layers)

    @property
    def has_kv(self) -> bool:
        """True if enough KV has arrived for the scheduler to take up the request.

        If the decode worker prefills the rest of the prompt, it may begin while the last layers' KV is still
        loading. Otherwise all KV must be there.
        """
        if self.reservation.reads:
            return bool(self.layers_to_read)
        return self.inbox.complete and not self.pages.layers_coming

    @property
    def ready(self) -> bool:
        """True if the request can be submitted to the scheduler and has not been submitted yet."""
        if self.job is None or self.ended is not None or self.times.ready is not None:
            return False
        return self.has_kv and (self.reservation.reads or self.inbox.logits_V is not None)

    @property
    def left(self) -> int:
        assert self.job is not None  # a request without a job is never ready
        return self.job.sampling.max_tokens - self.produced

    @property
    def row(self) -> Row:
        """The request's row in the next decode step, or in the sampling of its first token."""
        assert self.job is not None
        return Row(
            self.serial,
            self.pages.table,
            self.length,
            self.token,
            self.job.sampling,
            self.selects_pages,
            self.so_far,
            *((states.live, states.boundary) if (states := self.pages.states) else ()),
        )

    def kv_changed(self, now: float) -> None:
        """Record the arrival of KV or logits. End the request if its KV is lost."""
        if self.ended is not None:
            return
        if self.pages.lost:
            self.close(FinishReason.FAILED, self.pages.lost)
        elif self.inbox.lost:
            self.close_without_kv()
        else:
            if self.has_kv and self.times.complete is None:
                self.times.complete = now
            if self.inbox.logits_V is not None and self.times.logits is None:
                self.times.logits = now

    def begin(self, job: GenerateJob) -> None:
        """Accept the request's job. The request may have ended before, or end here."""
        self.job = job
        if self.ended is not None:
            self.end_span()
            self.send_finish()
        elif self.inbox.lost:
            self.close_without_kv()

    def close_without_kv(self) -> None:
        """End the request, whose KV is lost, if its job has arrived. Before that, another prefill group may
        still resume its prompt."""
        if self.job is not None:
            self.close(FinishReason.NO_KV, self.inbox.lost)

    async def settled(self) -> None:
        waited = None
        while waited is not self.inbox:
            waited = self.inbox
            await waited.settled()

    def resume(self, points: Sequence[int], attempt: int, now: float) -> int:
        """Begin the next attempt. Returns the token from which KV must be sent again."""
        states = self.pages.states
        tokens, self.inbox = self.inbox.resumed(points if states is None else states.resume(points), attempt)
        if states is not None:
            states.begin_at(tokens)
        self.renewed = now
        self.times.logits = self.times.complete = None
        return tokens

    def close(self, reason: FinishReason, message: str) -> None:
        if self.ended is not None:
            return
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not self.selects_pages:
            self.cache_prefix(ends=True)
        self.ended = (reason, message)
        self.inbox.close()
        self.logits = None
        self.end_span()
        if self.job is not None:
            self.send_finish()
        self.pages.end(failed=reason in (FinishReason.FAILED, FinishReason.NO_KV))

    def end_span(self) -> None:
        if self.span is NO_SPAN:
            return
        assert self.ended is not None
        reason, message = self.ended
        for part, moments in self.times.parts.items():
            self.span.part(part, *moments)
        failed = reason in (FinishReason.FAILED, FinishReason.NO_KV, FinishReason.GRAMMAR)
        moved, answered = self.times.handoff_bytes, self.produced
        self.span.end(reason.value, message if failed else "", handoff_bytes=moved, tokens=answered)
        self.span = NO_SPAN

    def send_finish(self) -> None:
        assert self.ended is not None
        reason, message = self.ended
        self.events.put_nowait(
            FinishEvent(
                request_id=self.request_id,
                reason=reason,
                completion_tokens=self.produced,
                report=self.times.report(),
                message=message,
            )
        )

    def refusal(self) -> Refused | None:
        """Explain why an ended request cannot become a session: a Refused after the deadline, None if it was
        cancelled.

        Raises:
            HandoffFailed: The request's KV did not arrive.
            DecodeFailed: The request failed.
        """
        assert self.ended is not None
        reason, message = self.ended
        if reason is FinishReason.NO_KV:
            raise HandoffFailed(message)
        if reason is FinishReason.FAILED:
            raise DecodeFailed(message)
        expired = reason is FinishReason.DEADLINE
        return Refused(reason=RefusalReason.DEADLINE, message=message) if expired else None


def failed(request_id: str, message: str) -> FinishEvent:
    """Return the last event of a request that this worker does not have."""
    return FinishEvent(
        request_id=request_id,
        reason=FinishReason.FAILED,
        completion_tokens=0,
        report=DecodeReport(),
        message=message,
    )
