"""The requests of a decode worker: all that is known of each, who holds which pages, who waits for some, and
whom nobody waits for.

Plain bookkeeping of the event loop's thread: nothing here computes or receives anything.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..kv.arrival import KVArrival
from ..kv.handoff.inbox import KVInbox
from ..kv.pages.pool import PAGE_TOKENS, PagePool, pages_for
from ..kv.pages.request_pages import PageManager, RequestPages
from ..kv.pages.sessions import KeptSession, SessionsTable
from ..kv.pages.waiting import (
    OVERDUE_LOOKS,
    ReservationQueue,
    ReservationTime,
    last_holders,
    seconds_until_room,
)
from ..messages.events import FinishEvent, FinishReason, FirstTokenTimings, Token
from ..messages.methods import BLOCK
from ..messages.requests import GenerateJob, RefusalReason, Refused, Reserve, Reserved
from ..messages.states import DECODE_PREFIX, OwnerUse
from ..model.directory.model_config import ModelConfig
from ..settings import DecodeConfig
from ..tracing import NO_SPAN, Span
from .reads import Recompute, Step, plan_reads
from .rows import Row
from .times import Times

DecodeEvent = FirstTokenTimings | Token | FinishEvent


@dataclass(eq=False)
class DecodeRequest:
    """All that is known of one request, from reservation to the end. `DecodeRequests` makes and keeps it,
    engine and scheduler move it on. `serial` is unique for ever, unlike the request's id.

    reserved, renewed: seconds of the engine's clock. length: tokens whose K/V is in the pages. token: the
    last token chosen, not in the pages yet. logits: of the position before the first token, until that is
    sampled. inbox: of the last attempt to read its prompt.
    """

    serial: int
    order: Reserve
    pages: RequestPages
    reserved: float
    renewed: float
    length: int
    inbox: KVInbox = field(init=False)
    times: Times = field(default_factory=Times)
    events: asyncio.Queue[DecodeEvent] = field(default_factory=asyncio.Queue)
    job: GenerateJob | None = None
    deadline: float | None = None
    reads: deque[Step] = field(default_factory=deque)
    """What is still to be read before its first token."""
    known_ids: array[int] = field(repr=False, default_factory=lambda: array("I"))
    """Of all tokens before the answer, where blocks of them may be computed again."""
    blocks: Sequence[int] = ()
    """Those that are to be."""
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
        return self.pages.session_tokens + self.order.prompt_tokens

    def plan_reads(self, append_ids: array[int], chunk: int) -> None:
        """What is to be read once all is there; see `reads`. Raises ValueError."""
        assert self.job is not None
        answered, asked = self.job.answered_tokens, self.order.session_id is not None
        if not 0 <= answered <= len(append_ids) - asked:
            raise ValueError(f"answered_tokens {answered} is not within {len(append_ids)} appended tokens")
        blocks, keep = self.job.recompute_blocks, self.job.keep_tokens
        self.reads.extend(plan_reads(self.length, self.known_ids, append_ids, answered, chunk, blocks, keep))
        if self.known_ids:
            self.known_ids += append_ids[: len(append_ids) - answered]

    def prepare(self, step: Step) -> None:
        """What it is about to write over, and others may share, it writes to pages of its own."""
        size, there = PAGE_TOKENS, self.pages.session_tokens or self.order.prompt_tokens
        if isinstance(step, Recompute):
            pages = BLOCK // size
            self.pages.divert([b * pages + page for b in self.blocks for page in range(pages)])
        elif step.looks and step.start < there:
            self.pages.divert(range(step.start // size, pages_for(there)))

    def ids_of_blocks(self) -> array[int]:
        ids = array("I")
        for block in self.blocks:
            ids += self.known_ids[block * BLOCK : (block + 1) * BLOCK]
        return ids

    @property
    def ready(self) -> bool:
        """Whether the scheduler can take it."""
        if self.job is None or self.ended is not None:
            return False
        if self.order.session_id is not None:
            return True
        return self.inbox.complete and self.inbox.logits_V is not None

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
            self.serial, self.pages.table, self.length, self.token, self.job.sampling, self.selects_pages
        )

    async def settled(self) -> None:
        """Wait until the prompt's K/V is complete or lost in its last attempt, or the request has ended."""
        waited = None
        while waited is not self.inbox:
            waited = self.inbox
            await waited.settled()

    def resume(self, points: Sequence[int], attempt: int, now: float) -> int:
        """Begin another attempt to read the prompt. Returns the point from which on K/V, and the logits, are
        to come again."""
        tokens, self.inbox = self.inbox.resumed(points, attempt)
        self.renewed = now
        self.times.logits = self.times.complete = None
        return tokens

    def close(self, reason: FinishReason, message: str) -> None:
        """The one way to end; what comes later changes nothing."""
        if self.ended is not None:
            return
        self.ended = (reason, message)
        self.inbox.close()
        self.logits = None
        self.end_span()
        if self.job is not None:
            self.tell_end()
        self.pages.end()

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


class DecodeRequests:
    """By id, from reservation until their callers have heard how they ended.

    name: the worker's. kv_changed: told the request whose inbox has changed. wall: seconds since the epoch.
    clock: seconds.
    """

    def __init__(
        self,
        name: str,
        config: DecodeConfig,
        model: ModelConfig,
        kv_changed: Callable[[DecodeRequest], None],
        wall: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._layers = model.layers
        self._lease_s = config.stream_lease_s
        self._kv_changed = kv_changed
        self._wall = wall
        self._clock = clock
        pool = PagePool(config.cache_tokens // PAGE_TOKENS, on_free=self._pages_came_back)
        sessions = SessionsTable(name.removeprefix(DECODE_PREFIX), pool, config.max_session_ttl_s)
        self.manager = PageManager(pool, sessions, model.positions)
        self.queue = ReservationQueue(self._take, self._expected_wait, config.max_wait_s, wall, clock)
        self._holds = ReservationTime()
        self._serials = itertools.count()
        self._requests: dict[str, DecodeRequest] = {}

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._requests.values()))

    def find(self, request_id: str) -> DecodeRequest | None:
        return self._requests.get(request_id)

    def live(self, request_id: str) -> DecodeRequest | None:
        """A request that is here and has not ended."""
        request = self._requests.get(request_id)
        return None if request is None or request.ended is not None else request

    def forget(self, request: DecodeRequest) -> None:
        """Drop an ended request, which stays known until its caller has heard why. By then another one may
        have taken its id."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    async def reserve(self, order: Reserve) -> Reserved | Refused:
        """Take pages for a request, or wait for them if it asks for that. ValueError for counts that make no
        sense (the door checks them), and DecodeFailed when it is cancelled while it waits."""
        if self.live(order.request_id) is not None or order.request_id in self.queue:
            return Refused(RefusalReason.DUPLICATE, f"a request {order.request_id} is already here")
        return await self.queue.reserve(order)

    def _take(self, order: Reserve, behind: int) -> Reserved | Refused:
        """The request is here from now on, if its pages are."""
        held = self.manager.reserve(order, self._wall(), behind)
        if isinstance(held, Refused):
            return held
        began = self._clock()

        held.on_free = lambda: self._holds.ended(self._clock() - began)
        expected = order.prompt_tokens if order.session_id is None else 0
        request = DecodeRequest(
            serial=next(self._serials),
            order=order,
            pages=held,
            reserved=began,
            renewed=began,
            length=held.session_tokens + expected,
        )
        arrival = KVArrival(self._layers, expected)
        request.inbox = KVInbox(arrival, held, partial(self._kv_changed, request))
        self._requests[order.request_id] = request
        return Reserved(held.count, held.session_tokens)

    def _pages_came_back(self) -> None:
        """Not in the middle of whatever gave them back."""
        if self.queue:
            asyncio.get_running_loop().call_soon(self.queue.serve)

    def _expected_wait(self, pages: int, ahead: Sequence[int]) -> float | None:
        """Seconds until so many pages are there behind those `ahead`; None until a request has ended here."""
        use = self._holds.mean
        if use is None:
            return None
        now, free = self._clock(), self.manager.pool.free
        held = self.manager.sessions.leases(self._wall())
        held += [
            (self._holds.left(now - request.reserved), request.pages.every_page)
            for request in self
            if not request.pages.freed.is_set()
        ]
        return seconds_until_room(pages, free, last_holders(held), ahead, use)

    def _is_there(self, session: KeptSession) -> bool:
        return self.manager.sessions.find(session.session_id, session.owner, self._wall()) is not None

    @property
    def unended(self) -> int:
        return sum(request.ended is None for request in self)

    def uses(self) -> Iterator[OwnerUse]:
        """What each owner holds, through each door and in sessions."""
        requests: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        for request in self:
            if request.ended is None:
                order = request.order
                requests[order.owner, order.door] += 1
                own = order.prompt_tokens + order.append_tokens + order.max_tokens
                if request.kept is not None and self._is_there(request.kept):
                    own -= request.kept.tokens - request.pages.session_tokens  # its pages are counted below
                tokens[order.owner, order.door] += max(0, own)
        for owner, held in self.manager.sessions.held():
            tokens[owner, ""] += held
        for (owner, door), held in tokens.items():
            yield OwnerUse(owner, door, requests[owner, door], held)

    def renew(self, request_ids: Iterable[str]) -> None:
        """Their door is still there; unknown ids are fine. It knows of a session whose request has ended."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            request.renewed = self._clock()
            if request.kept is not None and request.ended is not None:
                self.forget(request)
        self.queue.renew(request_ids)

    def expire(self) -> None:
        """End sessions past their lease, and requests past their deadline or not renewed."""
        wall, now = self._wall(), self._clock()
        self.manager.sessions.expire(wall)
        self.queue.expire(self._lease_s)
        for request in self:
            late = now - request.renewed > self._lease_s
            request.overdue = request.overdue + 1 if late else 0
            if request.overdue > OVERDUE_LOOKS:
                self._abandon(request)
            elif request.deadline is not None and wall >= request.deadline:
                request.close(FinishReason.DEADLINE, "the deadline passed")

    def _abandon(self, request: DecodeRequest) -> None:
        """End what no door waits for any more, the session that its client was to be told of included."""
        request.close(FinishReason.CANCELLED, "nobody renewed the request")
        if request.kept is not None:
            self.manager.sessions.release(request.kept.session_id, request.kept.owner, self._wall())
        self.forget(request)

    def clear(self, message: str) -> None:
        """End every request, reservation and session."""
        self.queue.clear(message)
        for request in self:
            request.close(FinishReason.CANCELLED, message)
        self.manager.sessions.clear()
