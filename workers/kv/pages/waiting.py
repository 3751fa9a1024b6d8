"""The queue of reservations that wait for pages. Only the event loop's thread uses it.

Service tiers share the pages that become free by weight. Within a tier the queue is first come, first served,
and nothing overtakes the reservation whose turn it is, so that small reservations do not starve a large one.
Waits are bounded.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from deltafront.workers.messages.requests import DecodeFailed, RefusalReason, Refused, Reservation, Reserved
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.turns import Turns

OVERDUE_CHECKS = 5
"""A request ends if more consecutive checks find its lease expired. A process that was paused can then first
receive the renewals that arrived meanwhile."""
PageReturn = tuple[float, int]
"""Seconds until pages are expected to become free, and the number of these pages."""


def page_returns(leases: Iterable[tuple[float, Iterable[int]]]) -> list[PageReturn]:
    """Count the pages that become free at each time, in seconds from now. Pure.

    Args:
        leases: For each holder of pages, the seconds until it releases them, and the pages.
    """
    ends = dict[int, float]()
    for end, pages in sorted(leases, key=itemgetter(0)):
        ends.update(dict.fromkeys(pages, end))
    return list(Counter(ends.values()).items())


def seconds_until_room(
    pages: int, free: int, returns: Iterable[PageReturn], ahead: Sequence[int], reservation_s: float
) -> float | None:
    """Estimate the seconds until `pages` pages are free; None: never. Pure.

    Args:
        ahead: The number of pages of each earlier reservation in the queue.
        reservation_s: Seconds for which each of these reservations then holds its pages.
    """
    ends, now = list(returns), 0.0
    heapq.heapify(ends)
    for wanted in (*ahead, pages):
        while free < wanted:
            if not ends:
                return None
            end, returned = heapq.heappop(ends)
            now, free = max(now, end), free + returned
        free -= wanted
        heapq.heappush(ends, (now + reservation_s, wanted))
    return now


class ReservationTime:
    """The mean seconds for which a request holds its pages, as a moving average with decay 0.9."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def record(self, seconds: float) -> None:
        self._sum = 0.9 * self._sum + seconds
        self._weight = 0.9 * self._weight + 1.0

    @property
    def mean(self) -> float | None:
        return self._sum / self._weight if self._weight else None

    def left(self, elapsed: float) -> float:
        """Estimate the remaining seconds of a request: the mean minus `elapsed`, at least a quarter of the
        mean."""
        mean = self.mean or 0.0
        return max(mean - elapsed, mean / 4)


@dataclass(eq=False)
class _Waiter:
    reservation: Reservation
    answer: asyncio.Future[Reserved | Refused]
    pages: int
    until: float
    renewed: float
    overdue: int = 0

    @property
    def tier(self) -> ServiceTier:
        return self.reservation.options.service_tier


class ReservationQueue:
    """The queue of reservations that wait for pages.

    Args:
        take: Reserves pages or returns a refusal, given the number of reservations ahead in the queue.
        expected: Returns the seconds until a number of pages is free, given the number of pages of each
            reservation ahead; None: unknown.
        max_wait_s: Maximum wait in seconds. A request with a longer expected wait is refused at once.
        wall: Returns seconds since the epoch.
    """

    def __init__(
        self,
        take: Callable[[Reservation, int], Reserved | Refused],
        expected: Callable[[int, Sequence[int]], float | None],
        max_wait_s: float,
        wall: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._take = take
        self._expected = expected
        self._max_wait_s = max_wait_s
        self._wall = wall
        self._clock = clock
        self._waiters: deque[_Waiter] = deque()
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, request_id: str) -> bool:
        return any(waiter.reservation.request_id == request_id for waiter in self._waiters)

    async def reserve(self, reservation: Reservation) -> Reserved | Refused:
        """Reserve pages at once, or wait for pages if the reservation allows it, or refuse.

        Raises:
            DecodeFailed: During the wait the request was cancelled, its lease expired or the queue was
                cleared.
        """
        answer = self._take(reservation, len(self._waiters))
        if not isinstance(answer, Refused) or answer.reason is not RefusalReason.PAGES:
            return answer
        seconds = self._expected(answer.needed, [waiter.pages for waiter in self._waiters])
        answer = replace(answer, retry_after_s=seconds)
        if not reservation.wait or (seconds is not None and seconds > self._max_wait_s):
            return answer
        now = self._clock()
        loop = asyncio.get_running_loop()
        waiter = _Waiter(reservation, loop.create_future(), answer.needed, now + self._max_wait_s, now)
        self._waiters.append(waiter)
        try:
            return await waiter.answer
        finally:
            self._leave(waiter)

    def serve(self) -> None:
        while self._waiters:
            tiers = {waiter.tier for waiter in self._waiters}
            first = next(waiter for waiter in self._waiters if waiter.tier is self._turns.order(tiers)[0])
            if first.answer.done():  # its caller was cancelled, and will remove it
                self._leave(first)
                continue
            answer = self._take(first.reservation, 0)
            if isinstance(answer, Refused) and answer.reason is RefusalReason.PAGES:
                return
            if isinstance(answer, Reserved):
                self._turns.give(first.tier, answer.pages, tiers)
            self._answer(first, answer)

    def renew(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        for waiter in self._waiters:
            if waiter.reservation.request_id in ids:
                waiter.renewed = self._clock()

    def cancel(self, request_id: str) -> None:
        self._fail([w for w in self._waiters if w.reservation.request_id == request_id], "cancelled")

    def clear(self, message: str) -> None:
        self._fail(list(self._waiters), message)

    def expire(self, lease_s: float) -> None:
        now, wall = self._clock(), self._wall()
        for waiter in self._waiters:
            waiter.overdue = waiter.overdue + 1 if now - waiter.renewed > lease_s else 0
        lost = [waiter for waiter in self._waiters if waiter.overdue > OVERDUE_CHECKS]
        self._fail(lost, "no door renewed the request")
        for waiter in list(self._waiters):
            deadline = waiter.reservation.options.deadline
            if deadline is not None and wall >= deadline:
                text = "the deadline passed while it waited for pages"
                self._answer(waiter, Refused(reason=RefusalReason.DEADLINE, message=text))
            elif now >= waiter.until:
                self._answer(waiter, self._still_full(waiter))
        self.serve()

    def _still_full(self, waiter: _Waiter) -> Refused:
        text = f"{waiter.pages} KV pages did not become free in {self._max_wait_s:g} s"
        ahead = [w.pages for w in self._waiters if w is not waiter]
        return Refused(
            reason=RefusalReason.PAGES,
            message=text,
            needed=waiter.pages,
            retry_after_s=self._expected(waiter.pages, ahead),
        )

    def _answer(self, waiter: _Waiter, answer: Reserved | Refused) -> None:
        self._leave(waiter)
        if not waiter.answer.done():
            waiter.answer.set_result(answer)

    def _fail(self, waiters: Iterable[_Waiter], message: str) -> None:
        for waiter in waiters:
            self._leave(waiter)
            if not waiter.answer.done():
                waiter.answer.set_exception(DecodeFailed(message))

    def _leave(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
