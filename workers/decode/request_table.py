"""The table of a decode worker's requests. It reserves their pages, queues them, and ends expired ones.

Only the event loop's thread uses it. It does no tensor work.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from deltafront.workers.decode.request import DecodeRequest
from deltafront.workers.kv.arrival import KVArrival, StateArrival
from deltafront.workers.kv.handoff.inbox import KVInbox
from deltafront.workers.kv.pages.leases import Lease, Leases
from deltafront.workers.kv.pages.page_manager import PageManager
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, PagePool
from deltafront.workers.kv.pages.prefix_cache import PrefixCache
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.kv.pages.state_slots import StateSlots
from deltafront.workers.kv.pages.waiting import (
    OVERDUE_CHECKS,
    ReservationQueue,
    ReservationTime,
    page_returns,
    seconds_until_room,
)
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.prompts import boundary_before
from deltafront.workers.messages.requests import DecodeFailed, RefusalReason, Refused, Reservation, Reserved
from deltafront.workers.messages.stages import FirstLogits, HandedState, KVAnnouncement, PageWriter
from deltafront.workers.messages.states import DECODE_PREFIX, OwnerUse
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.settings import DecodeConfig


class DecodeRequests:
    """A decode worker's requests, by id. A request stays from its reservation until its caller has the last
    event.

    `kv_changed` is called with a request when KV or logits have arrived from a stage, or layers from host
    memory.
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
        self.layers = model.layers
        self._page_layers = model.page_layers(range(model.layers))
        self._state_layers = model.state_layers
        self._lease_s = config.stream_lease_s
        self._kv_changed = kv_changed
        self._wall = wall
        self._clock = clock
        pages, self.prefix_cache = config.cache_tokens // PAGE_TOKENS, PrefixCache(clock)
        pool = PagePool(pages, on_free=self._pages_came_back, prefix_cache=self.prefix_cache)
        states = StateSlots(config.state_slots) if model.state_layers else None
        leases = Leases(name.removeprefix(DECODE_PREFIX), pool, config.max_session_ttl_s, states)
        self.manager = PageManager(pool, leases, model.positions, states)
        self.queue = ReservationQueue(self._take, self._expected_wait, config.max_wait_s, wall, clock)
        self._reservation_time = ReservationTime()
        self._serials = itertools.count()
        self._requests: dict[str, DecodeRequest] = {}
        self._closed = ""
        """The reason to refuse requests; empty while the worker accepts requests."""

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._requests.values()))

    def find(self, request_id: str) -> DecodeRequest | None:
        return self._requests.get(request_id)

    def live(self, request_id: str) -> DecodeRequest | None:
        request = self._requests.get(request_id)
        return None if request is None or request.ended is not None else request

    def expecting(
        self, message: KVAnnouncement | FirstLogits | HandedState | PageWriter
    ) -> DecodeRequest | None:
        """Return the running request that a message belongs to; None if there is none, or if the message is
        of another attempt."""
        request = self.live(message.request_id)
        return None if request is None or request.inbox.attempt != message.attempt else request

    def being_read(self, request_id: str) -> DecodeRequest:
        """Return a request that has no job yet and whose prompt a prefill group prefills. Raises DecodeFailed
        if there is none with this id."""
        request = self.live(request_id)
        if request is None or request.job is not None or request.reservation.reads:
            raise DecodeFailed(f"request {request_id} is not being read here")
        return request

    def forget(self, request: DecodeRequest) -> None:
        """Remove a request whose caller has its last event, unless a new request has the same id."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    async def reserve(self, reservation: Reservation) -> Reserved | Refused:
        """Reserve pages for a request. Raises DecodeFailed after `close`.

        A request ends all shadow requests (comparisons with dense attention). Steps that are running may
        still use their pages, so a refused request waits for these pages and tries again.
        """
        if self._closed:
            raise DecodeFailed(self._closed)
        if reservation.options.shadow:
            return self._reserve_shadow(reservation)
        shadows = [one for one in self if one.options.shadow and not one.pages.freed.is_set()]
        for shadow in shadows:
            shadow.close(FinishReason.CANCELLED, "another request came")
        answer = await self._reserve(reservation)
        if shadows and isinstance(answer, Refused):
            for shadow in shadows:
                await shadow.pages.freed.wait()
            return await self.reserve(reservation)
        return answer

    def _reserve_shadow(self, reservation: Reservation) -> Reserved | Refused:
        if self.unended or self.queue:
            return Refused(reason=RefusalReason.BUSY, message="this worker has other requests")
        return self._take(reservation, 0)

    async def _reserve(self, reservation: Reservation) -> Reserved | Refused:
        if self.live(reservation.request_id) is not None or reservation.request_id in self.queue:
            return Refused(
                reason=RefusalReason.DUPLICATE, message=f"a request {reservation.request_id} is already here"
            )
        return await self.queue.reserve(reservation)

    def _take(self, reservation: Reservation, waiting: int) -> Reserved | Refused:
        pages = self.manager.reserve(reservation, self._wall(), waiting)
        if isinstance(pages, Refused):
            return pages
        began = self._clock()

        pages.on_free = lambda: self._reservation_time.record(self._clock() - began)
        expected = 0 if reservation.reads else reservation.new_tokens
        request = DecodeRequest(
            serial=next(self._serials),
            layers=self.layers,
            reservation=reservation,
            pages=pages,
            reserved=began,
            renewed=began,
            length=pages.held_tokens + expected,
        )
        held = 0 if reservation.reads else pages.held_tokens
        arrival = KVArrival(self._page_layers, held + expected, held)
        pages.on_coming = partial(self._kv_changed, request)
        states = self._states_expected(pages, pages.held_tokens, expected)
        request.inbox = KVInbox(arrival, pages, pages.on_coming, states=states)
        self._requests[reservation.request_id] = request
        return Reserved(pages=pages.count, held_tokens=pages.held_tokens, host_tokens=pages.host_tokens)

    def _states_expected(self, pages: RequestPages, held: int, expected: int) -> StateArrival:
        """Return which states a prefill group must send for `expected` tokens after `held` tokens; 0: it
        sends none."""
        if pages.states is None or not expected:
            return StateArrival(self._state_layers)
        tokens = held + expected
        places = {tokens, boundary_before(tokens), pages.states.kept_tokens}
        return StateArrival(self._state_layers, (place for place in places if place > held))

    def _pages_came_back(self) -> None:
        if self.queue:
            asyncio.get_running_loop().call_soon(self.queue.serve)

    def _expected_wait(self, pages: int, ahead: Sequence[int]) -> float | None:
        use = self._reservation_time.mean
        if use is None:
            return None
        now, free = self._clock(), self.manager.pool.free
        leases = self.manager.leases.ends(self._wall())
        leases += [
            (self._reservation_time.left(now - request.reserved), request.pages.every_page)
            for request in self
            if not request.pages.freed.is_set()
        ]
        return seconds_until_room(pages, free, page_returns(leases), ahead, use)

    def _exists(self, session: Lease) -> bool:
        return self.manager.leases.find(session.session_id, session.owner, self._wall()) is not None

    @property
    def unended(self) -> int:
        return sum(request.ended is None for request in self)

    def uses(self) -> Iterator[OwnerUse]:
        requests: Counter[tuple[str, str]] = Counter()
        tokens: Counter[tuple[str, str]] = Counter()
        for request in self:
            if request.ended is None:
                reservation = request.reservation
                requests[reservation.owner, reservation.door] += 1
                own = reservation.new_tokens + reservation.resume_tokens + reservation.max_tokens
                if request.session is not None and self._exists(request.session):
                    own -= request.session.tokens - request.pages.held_tokens  # leases are counted below
                tokens[reservation.owner, reservation.door] += max(0, own)
        for owner, kept in self.manager.leases.tokens_by_lease():
            tokens[owner, ""] += kept
        for (owner, door), count in tokens.items():
            yield OwnerUse(owner=owner, door=door, requests=requests[owner, door], tokens=count)

    def renew(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            request.renewed = self._clock()
            if request.session is not None and request.ended is not None:
                self.forget(request)
        self.queue.renew(request_ids)

    def expire(self) -> None:
        wall, now = self._wall(), self._clock()
        self.manager.leases.expire(wall)
        self.queue.expire(self._lease_s)
        for request in self:
            late = now - request.renewed > self._lease_s
            request.overdue = request.overdue + 1 if late else 0
            if request.overdue > OVERDUE_CHECKS:
                self._abandon(request)
            elif request.deadline is not None and wall >= request.deadline:
                request.close(FinishReason.DEADLINE, "the deadline passed")

    def _abandon(self, request: DecodeRequest) -> None:
        request.close(FinishReason.CANCELLED, "no door renewed the request")
        if request.session is not None:
            self.manager.leases.release(request.session.session_id, request.session.owner, self._wall())
        self.forget(request)

    def close(self, message: str) -> None:
        """End every request and session, and refuse new ones with `message`."""
        self._closed = message
        self.queue.clear(message)
        for request in self:
            request.close(FinishReason.CANCELLED, message)
        self.manager.leases.clear()
        self.manager.pool.clear_prefix_cache()
        if self.manager.states is not None:
            self.manager.states.clear()
