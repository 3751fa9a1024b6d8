"""One request on a decode worker, from its reservation to its end."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deltafront.kernels.constants import BLOCK
from deltafront.workers.decode.reads import Recompute, Step, next_layers, plan_reads
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.decode.times import RequestTimes
from deltafront.workers.kv.handoff.inbox import KVInbox
from deltafront.workers.kv.pages.leases import Lease
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.messages.events import FinishEvent, FinishReason, FirstTokenTimings, Token
from deltafront.workers.messages.requests import GenerateJob, RequestOptions, Reservation
from deltafront.workers.model.grammars import GrammarState
from deltafront.workers.tracing import NO_SPAN, Span

DecodeEvent = FirstTokenTimings | Token | FinishEvent


@dataclass(eq=False, kw_only=True)
class DecodeRequest:
    """A request and its state, advanced by engine and scheduler.

    Attributes:
        serial: Unique number; a request id may be used again.
        reserved, renewed: Seconds of the engine's clock.
        length: Tokens whose KV is in the pages.
        token: The last sampled token, whose KV is not in the pages yet.
        logits: Set before the first token only.
        inbox: Receives the last attempt's KV.
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
    """Layers of the first of `reads` that are computed."""
    known_ids: array[int] = field(repr=False, default_factory=lambda: array("I"))
    """Ids of all tokens before the answer; empty if no block may be recomputed."""
    blocks: Sequence[int] = ()
    selects_pages: bool = False
    logits: Any = None
    token: int = 0
    produced: int = 0
    ended: tuple[FinishReason, str] | None = None
    overdue: int = 0
    """Checks in a row that have found its lease expired."""
    session: Lease | None = None
    """The session that was made of its prompt."""
    answer_ids: array[int] = field(repr=False, default_factory=lambda: array("I"))
    recomputes: bool = False
    grammar: GrammarState | None = None
    """Set if the answer follows one. Only the compute thread changes it."""
    span: Span = NO_SPAN

    @property
    def request_id(self) -> str:
        return self.reservation.request_id

    @property
    def options(self) -> RequestOptions:
        return self.reservation.options

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the answer, including those of the session or prefix."""
        return self.pages.held_tokens + self.reservation.new_tokens

    @property
    def known_tokens(self) -> int:
        """Number of tokens whose KV is in the pages before the worker's own prefill."""
        return self.pages.held_tokens if self.reservation.reads else self.prompt_tokens

    def plan_reads(self, extend_ids: array[int], chunk: int) -> None:
        """Plan its `reads`, given the token ids after its KV. Raises ValueError if `answered_tokens` does not
        fit them."""
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
        self.answer_ids += extend_ids[prompt_end:]
        if self.known_ids:
            self.known_ids += extend_ids[:prompt_end]

    def cache_prefix(self) -> None:
        """Put its full pages into the prefix cache. Recomputed pages depend on the question and stay out.

        After sparse prefill, only the first `lasting_tokens` of its key are cached.
        """
        key, tokens = self.reservation.key, self.length
        if key is None:
            return
        if self.recomputes:
            tokens = self.known_tokens
        if not self.reservation.reads and not key.exact:
            tokens = min(tokens, key.lasting_tokens)
        self.pages.cache_prefix(tokens, self.answer_ids.tobytes())

    def prepare(self, step: Step) -> None:
        """Replace shared pages by the request's own if the step overwrites pages that other requests may
        use.
        """
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
        """The layers that the first of `reads` computes next; empty until their KV has arrived."""
        return next_layers(self.layers_read, self.layers - self.pages.layers_coming, self.layers)

    @property
    def has_kv(self) -> bool:
        """Say whether enough of its KV has arrived to begin.

        A request with `reads` may begin while its last layers are still arriving. A request without needs
        all KV.
        """
        if self.reservation.reads:
            return bool(self.layers_to_read)
        return self.inbox.complete and not self.pages.layers_coming

    @property
    def ready(self) -> bool:
        """Say whether to submit it to the scheduler now. True only once."""
        if self.job is None or self.ended is not None or self.times.ready is not None:
            return False
        return self.has_kv and (self.reservation.reads or self.inbox.logits_V is not None)

    @property
    def left(self) -> int:
        assert self.job is not None  # only a request with a job is ever ready
        return self.job.sampling.max_tokens - self.produced

    @property
    def row(self) -> Row:
        """Make its row for the next decode step, or for sampling the first token."""
        assert self.job is not None
        return Row(
            self.serial, self.pages.table, self.length, self.token, self.job.sampling, self.selects_pages
        )

    async def settled(self) -> None:
        waited = None
        while waited is not self.inbox:
            waited = self.inbox
            await waited.settled()

    def resume(self, points: Sequence[int], attempt: int, now: float) -> int:
        """Begin the next attempt, and return the position from which KV must be sent again."""
        tokens, self.inbox = self.inbox.resumed(points, attempt)
        self.renewed = now
        self.times.logits = self.times.complete = None
        return tokens

    def close(self, reason: FinishReason, message: str) -> None:
        if self.ended is not None:
            return
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not self.selects_pages:
            self.cache_prefix()
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
        failed = reason in (FinishReason.FAILED, FinishReason.NO_KV)
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
