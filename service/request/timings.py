"""Time to first token (TTFT), cut into parts that add up to it.

A *lap* is work of the door itself. A *span* is a call to a worker, which reports its parts. The rest of the
span is `transport`, the way there and back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...workers.messages.events import DecodeReport, PrefillReport
from ..tracing import Interval

TRANSPORT = "transport"
REPLAY = "replay"
"""Time lost to attempts that a worker's death ended."""


@dataclass(frozen=True)
class TimeToFirstToken:
    """Parts as (name, seconds), in the order in which they happened."""

    parts: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        return sum(seconds for _name, seconds in self.parts)


class TtftClock:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.started = now()
        self._last = self.started
        self._parts: dict[str, float] = {}
        self.intervals: list[Interval] = []
        """The door's own parts, for a trace. Workers trace theirs."""

    @property
    def elapsed(self) -> float:
        return self._now() - self.started

    def lap(self, part: str) -> None:
        """Count the time since the last mark as `part`."""
        begin = self._last
        self._add(part, self._next_mark())
        self._trace(part, begin, self._last)

    def span(self, reported: Mapping[str, float], rest: str = TRANSPORT) -> None:
        """Count the time since the last mark as `reported` by a worker, and what is left as `rest`.

        Parts that exceed the time here are scaled down, because two machines' clocks may disagree a little.
        """
        passed = self._next_mark()
        total = sum(reported.values())
        scale, left = passed / total if total > passed else 1.0, max(passed - total, 0.0)
        for part, seconds in reported.items():
            self._add(part, seconds * scale)
        self._add(rest, left)
        if rest == REPLAY:
            self._trace(rest, self._last - left, self._last)

    def read(self) -> TimeToFirstToken:
        """Return the parts so far. Transport is last, because it happens in several places."""
        ordered = [(name, seconds) for name, seconds in self._parts.items() if name != TRANSPORT]
        return TimeToFirstToken((*ordered, (TRANSPORT, self._parts.get(TRANSPORT, 0.0))))

    def _next_mark(self) -> float:
        now = self._now()
        passed, self._last = now - self._last, now
        return passed

    def _add(self, part: str, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def _trace(self, part: str, begin: float, end: float) -> None:
        if end > begin:
            self.intervals.append(Interval(part, begin - self.started, end - begin))


def prefill_parts(report: PrefillReport) -> dict[str, float]:
    """Name the parts along a prefill group's critical path."""
    return {"queue": report.queue, **{f"prefill.{name}": s for name, s in report.critical.items()}}


def decode_parts(report: DecodeReport) -> dict[str, float]:
    """Name the parts before the first token."""
    return {
        "handoff_exposed": report.handoff_exposed,
        "decode_wait": report.decode_wait,
        "append_prefill": report.append_prefill,
        "recompute": report.recompute,
        "first_step": report.first_step,
    }
