"""When a request that is refused should come back: from what waits, what runs, and the group's rate. Pure.

A queue is full when as many requests as it may hold wait for their first chunk. A place in it becomes free
when the next of them is opened, which takes its turn and its pages; and those that were refused before and
told to come back take the places before this one. Some of the places are kept for them when their time comes,
or whoever happens to ask a moment before would have them come in vain.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence

from ...kv.pages.pool import pages_for
from .schedule import Waiting, credit_at

_STEPS = 128
"""Into so many turns the work that is there is cut, unless that is finer than chunks."""
_EARLY_S = 0.1
"""Who comes so much before its time is on time."""
_LATE_S, _LATE_SHARE = 1.0, 0.1
"""Who comes so much after it, and this share of the time that it was told, has lost its place."""


class Play:
    """The schedule played forward at an even rate, a turn at a time, if nobody else comes.

    requests: `remaining` of those that are open counts what is not through yet. now: a moment in the middle
    of a chunk that is under way. rate: tokens a second of the group, positive. free: pages that are nobody's.
    chunk: tokens.

    Every request ages while it does not run. So which of two comes first does not change between two of
    their turns, and heaps do instead of asking all of them at every turn, as `schedule.next_request` does.
    """

    def __init__(
        self, requests: Iterable[Waiting], now: float, ageing: float, rate: float, free: int, chunk: int
    ) -> None:
        self._began = now
        self._now = self._place_free = now + chunk / rate / 2
        self._ageing, self._rate, self._free = ageing, rate, free
        self._open: list[tuple[float, float, int, int, int]] = []
        self._waiting: list[tuple[float, float, int, int, int]] = []
        self._turn, self._serial = float(chunk), 0
        for entry in requests:
            self._turn += entry.remaining / _STEPS
            self._add(entry.opened, entry.remaining, credit_at(entry, now, ageing), now, entry.pages)

    def places(self, behind: Sequence[int], max_waiting: int) -> list[float]:
        """Seconds until each prompt of so many tokens gets a place in the queue, in the order given. Shorter
        than `behind` if pages are held by nobody who runs."""
        found: list[float] = []
        for tokens in behind:
            while len(self._waiting) >= max_waiting:
                if not self._take_turn():
                    return found
            found.append(self._place_free - self._began)
            self._add(False, tokens, 0.0, self._place_free, pages_for(tokens))
        return found

    def _add(self, opened: bool, remaining: int, credit: float, idle_since: float, pages: int) -> None:
        """To what waits for a turn; `_now` never enters the order, since all age alike."""
        self._serial += 1
        order = remaining - credit + self._ageing * idle_since
        entry = (order, idle_since, self._serial, remaining, pages)
        heapq.heappush(self._open if opened else self._waiting, entry)

    def _take_turn(self) -> bool:
        fits = bool(self._waiting) and self._waiting[0][-1] <= self._free
        if not fits and not self._open:
            return False
        opening = fits and (not self._open or self._waiting[0] < self._open[0])
        order, _, _, remaining, pages = heapq.heappop(self._waiting if opening else self._open)
        if opening:
            self._free -= pages
            self._place_free = self._now
        tokens = min(int(self._turn), remaining)
        credit = max(0.0, remaining + self._ageing * self._now - order - 2 * tokens)
        self._now += tokens / self._rate
        if remaining > tokens:
            self._add(True, remaining - tokens, credit, self._now, pages)
        else:
            self._free += pages
        return True


class Promises:
    """Prompts, by their checksums, that were refused and told when to come back. Moments are seconds of the
    caller's clock."""

    def __init__(self) -> None:
        self._told: list[tuple[float, int, int, float]] = []
        """When, tokens, checksum, and until when; the soonest first."""

    def give(self, play: Play, checksum: int, tokens: int, max_waiting: int, now: float) -> float | None:
        """Seconds after which a refused prompt of so many tokens should come back: when there is a place for
        it behind those that were told before; one that has come at its time and in vain keeps its turn. None
        if the pages it waits for never come back."""
        own = self._due(checksum, now)
        behind = [promised for _, promised, *_ in self._told[:own]]
        found = play.places([*behind, tokens], max_waiting)
        if len(found) <= len(behind):
            return None
        if own is not None:
            del self._told[own]
        until = now + found[-1] + _LATE_S + _LATE_SHARE * found[-1]
        bisect.insort(self._told, (now + found[-1], tokens, checksum, until))
        return found[-1]

    def held(self, checksum: int, until: float, now: float, max_waiting: int) -> int:
        """Places that a prompt that comes now may not take: one for each that was told to come by `until`,
        all but one at most, so that a queue in which nobody waits has a place. 0 if now is its own time."""
        if self._due(checksum, now) is not None:
            return 0
        return min(sum(when <= until for when, *_ in self._told), max_waiting - 1)

    def kept(self, checksum: int) -> None:
        """The prompt has its place."""
        own = next((told for told in self._told if told[2] == checksum), None)
        if own is not None:
            self._told.remove(own)

    def _due(self, checksum: int, now: float) -> int | None:
        """Which of those that were told this prompt is, if its time has come; the late are forgotten."""
        self._told = [told for told in self._told if told[-1] > now]
        for place, (when, _, own, _) in enumerate(self._told):
            if own == checksum and when <= now + _EARLY_S:
                return place
        return None
