"""Time to first token, cut into parts that add up to it.

The clock runs in the door. Work that the door does itself is a *lap*. A call to a worker is a *span*: the
worker reports how long its parts took, and what is left of the span is `transport`, the way there and
back. Parts therefore add up to the total by construction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...workers.messages.events import DecodeReport, PrefillReport
from ..tracing import Interval

TRANSPORT = "transport"
REPLAY = "replay"
"""Time lost to attempts that a worker's death undid."""


@dataclass(frozen=True)
class TimeToFirstToken:
    """parts: (name, seconds) in the order in which they happened; seconds: their sum."""

    parts: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        return sum(seconds for _name, seconds in self.parts)


class TtftClock:
    """Started when the request reaches its handler."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.started = now()
        self._last = self.started
        self._parts: dict[str, float] = {}
        self.intervals: list[Interval] = []
        """What a trace shows of the door: its laps, and what was lost. Workers show their own parts."""

    @property
    def elapsed(self) -> float:
        return self._now() - self.started

    def lap(self, part: str) -> None:
        """Everything since the last mark was `part`."""
        begin = self._last
        self._add(part, self._take())
        self._show(part, begin, self._last)

    def span(self, reported: Mapping[str, float], rest: str = TRANSPORT) -> None:
        """Since the last mark a worker did `reported`; what is left was `rest`.

        Clocks of two machines may disagree by a little: if more is reported than passed here, the
        reported parts are shrunk to what passed.
        """
        passed = self._take()
        total = sum(reported.values())
        shrink, left = passed / total if total > passed else 1.0, max(passed - total, 0.0)
        for part, seconds in reported.items():
            self._add(part, seconds * shrink)
        self._add(rest, left)
        if rest == REPLAY:
            self._show(rest, self._last - left, self._last)

    def read(self) -> TimeToFirstToken:
        """The parts so far; transport last, since it belongs to several places."""
        ordered = [(name, seconds) for name, seconds in self._parts.items() if name != TRANSPORT]
        return TimeToFirstToken((*ordered, (TRANSPORT, self._parts.get(TRANSPORT, 0.0))))

    def _take(self) -> float:
        now = self._now()
        passed, self._last = now - self._last, now
        return passed

    def _add(self, part: str, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def _show(self, part: str, begin: float, end: float) -> None:
        if end > begin:
            self.intervals.append(Interval(part, begin - self.started, end - begin))


def prefill_parts(report: PrefillReport) -> dict[str, float]:
    """What a prefill group's time was spent on, along the critical path."""
    return {
        "queue": report.queue,
        **{f"prefill.{name}": seconds for name, seconds in report.critical.items()},
    }


def decode_parts(report: DecodeReport) -> dict[str, float]:
    """What the decode worker did before the first token."""
    return {
        "handoff_exposed": report.handoff_exposed,
        "decode_wait": report.decode_wait,
        "append_prefill": report.append_prefill,
        "recompute": report.recompute,
        "first_step": report.first_step,
    }
