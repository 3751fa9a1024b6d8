"""Splits the time to first token (TTFT) into parts that add up to it.

A *lap* is work of the door. A *span* is a call to a worker, which reports its own parts. The rest of a span
is `transport`: sending the request and the reply.
"""

import time
from collections.abc import Callable, Mapping

from deltafront.service.tracing import Interval
from deltafront.workers.messages.events import DecodeReport, PrefillReport

TRANSPORT = "transport"
REPLAY = "replay"
"""The part for time lost in attempts that ended with a worker's death."""


class TtftClock:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.started = now()
        self._last = self.started
        self._stopped = False
        self._parts: dict[str, float] = {}
        self.intervals: list[Interval] = []
        """The door's own parts, for a trace. Workers trace their parts themselves."""

    @property
    def elapsed(self) -> float:
        return self._now() - self.started

    def restart(self) -> None:
        """Restart the clock, because the request has arrived."""
        self.started = self._last = self._now()

    def stop(self) -> None:
        """Stop the clock, because the first token was sent."""
        self._stopped = True

    def lap(self, part: str) -> None:
        if self._stopped:
            return
        begin = self._last
        self._add(part, self._next_mark())
        self._trace(part, begin, self._last)

    def span(self, reported: Mapping[str, float], rest: str = TRANSPORT) -> None:
        """Split the time since the last mark into the parts `reported` by a worker, and the remainder as
        `rest`.

        If the parts exceed that time, they are scaled down, and less than nothing counts as nothing: two
        machines' clocks may disagree, and a counter of seconds refuses negative ones.
        """
        if self._stopped:
            return
        passed = self._next_mark()
        reported = {part: max(0.0, seconds) for part, seconds in reported.items()}
        total = sum(reported.values())
        scale, left = passed / total if total > passed else 1.0, max(passed - total, 0.0)
        for part, seconds in reported.items():
            self._add(part, seconds * scale)
        self._add(rest, left)
        if rest == REPLAY:
            self._trace(rest, self._last - left, self._last)

    def parts(self) -> dict[str, float]:
        """Return seconds by part, in the order of events. Transport is last, because it occurs several
        times."""
        parts = dict(self._parts)
        parts[TRANSPORT] = parts.pop(TRANSPORT, 0.0)
        return parts

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
    return {"queue": report.queue, **{f"prefill.{name}": s for name, s in report.critical.items()}}


def decode_parts(report: DecodeReport) -> dict[str, float]:
    parts = ("handoff_exposed", "decode_wait", "append_prefill", "recompute", "first_step")
    return {name: getattr(report, name) for name in parts}
