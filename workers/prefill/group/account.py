"""Sums the stages' chunk reports into a `PrefillReport` and into rates. Pure.

Times are seconds of the controller's clock. A chunk whose report arrived at `ended` is taken to have run from
ended - wall to ended.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltafront.kernels.methods import MethodSpec
from deltafront.workers.messages.events import LayerDensity, PrefillReport, summed_by_layer
from deltafront.workers.messages.stages import ChunkReport
from deltafront.workers.messages.states import RATE_LASTS_S

_MEMORY_S = 15.0
_LAUNCHED_AHEAD = 0.2
"""A chunk is launch bound if the GPU finishes it within this share of the chunk's time after the last launch
(docs/log/2026-11-25.md at 4fe709c6)."""


@dataclass(kw_only=True)
class Account:
    stages: int
    method: MethodSpec
    arrived: float
    began: float | None = None
    _own_wall: float = 0.0
    _others: float = 0.0
    _phases: list[defaultdict[str, float]] = field(default_factory=list)
    _launch_bound: list[float] = field(default_factory=list)
    _layers: tuple[LayerDensity, ...] = ()
    _sampled: float = 0.0
    _handoff_bytes: int = 0

    def __post_init__(self) -> None:
        self._phases = [defaultdict(float) for _ in range(self.stages)]
        self._launch_bound = [0.0] * self.stages

    def record_chunk(self, reports: Sequence[ChunkReport]) -> None:
        """Record a chunk of this request that the last stage has finished."""
        for report in reports:
            for name, seconds in report.phases.items():
                self._phases[report.stage][name] += seconds
            self._launch_bound[report.stage] += _launch_bound(report)
            self._handoff_bytes += report.handoff_bytes
            self._layers = summed_by_layer((*self._layers, *report.density))
            self._sampled += report.sampled_share * sum(layer.causal for layer in report.density)
        self._own_wall += reports[-1].wall

    def other_chunk(self, wall: float, ended: float) -> None:
        if self.began is not None:
            self._others += max(0.0, ended - max(ended - wall, self.began))

    def report(self, ended: float) -> PrefillReport:
        """Make the report. The parts in `critical` add up to `wall`; `group_overhead` is the remainder.

        The stage's phases are measured by the GPU's clock, `wall` by the controller's. If the phases are
        longer, their sum is the wall.
        """
        began = self.arrived if self.began is None else self.began
        wall = ended - began
        critical = dict(self._phases[-1])
        critical["other_requests"] = min(self._others, max(0.0, wall - self._own_wall))
        measured = sum(critical.values())
        critical["group_overhead"] = max(0.0, wall - measured)
        causal = sum(layer.causal for layer in self._layers)
        return PrefillReport(
            queue=began - self.arrived,
            wall=max(wall, measured),
            critical=critical,
            stages=tuple(dict(phases) for phases in self._phases),
            density=self._layers,
            method=self.method.name,
            sampled_share=self._sampled / causal if causal else 0.0,
            handoff_bytes=self._handoff_bytes,
            launch_bound=tuple(self._launch_bound),
        )


def waited(report: ChunkReport) -> float:
    """Return the seconds for which the stage waited for the previous stage or for a decode worker."""
    return report.phases.get("activation_wait", 0.0) + report.phases.get("kv_fetch", 0.0)


def _launch_bound(report: ChunkReport) -> float:
    busy = sum(report.phases.values()) - waited(report)
    ahead = math.inf if report.launched_ahead is None else report.launched_ahead
    return busy if ahead < _LAUNCHED_AHEAD * busy else 0.0


class Pace:
    """Computes how long a chunk may take before its stage is pinged (`watch`).

    The limit is slack_s plus twice the time that the chunk would take at the speed of the request's last
    chunk. A request's first chunk is compared with the latest first chunk of the same attention method.
    """

    def __init__(self, slack_s: float) -> None:
        self._slack_s = slack_s
        self._first: dict[str, float] = {}

    def record_chunk(self, method: str, start: int, tokens: int, reports: Sequence[ChunkReport]) -> float:
        """Return a finished chunk's seconds per token on the slowest stage, without waits for other
        processes. Remembers the value if this is a prompt's first chunk."""
        pace = max(report.wall - waited(report) for report in reports) / tokens
        if start == 0:
            self._first[method] = pace
        return pace

    def allowed(self, method: str, chunks: Sequence[tuple[float | None, int]]) -> float:
        """Return the seconds allowed for a batch. `chunks`: for each chunk, the seconds per token of its
        request's last chunk, and its tokens."""
        first = self._first.get(method) or 0.0
        seconds = sum((first if last is None else last) * tokens for last, tokens in chunks)
        return self._slack_s + 2 * seconds


class Throughput:
    """The prefill rate in tokens per second over about the last `_MEMORY_S` busy seconds. It is reset after
    RATE_LASTS_S idle seconds."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last = float("-inf")

    def record_batch(self, tokens: int, sent: float, ended: float) -> float:
        """Record a batch. Returns the seconds from its sending, or from the end of the previous batch if that
        is later, to its end."""
        worked = ended - max(sent, self._last)
        decay = math.exp(-worked / _MEMORY_S) if self.idle(sent) < RATE_LASTS_S else 0.0
        self._tokens = decay * self._tokens + tokens
        self._seconds = decay * self._seconds + worked
        self._last = ended
        return worked

    def idle(self, now: float) -> float:
        """Return the seconds since the last batch; infinite before the first."""
        return max(0.0, now - self._last)

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
