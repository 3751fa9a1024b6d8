"""Every metric, declared here and observed by the door alone; workers return timings as data.

prometheus_client in multiprocess mode keeps exact sums in files that outlive a replica. The replicas of one
node share a directory and one scrape port: whoever gets the port serves everybody's numbers, and another
takes over when it dies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..workers.messages.events import DecodeReport, LayerDensity, PrefillReport

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5,
    10, 15, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10,
)  # fmt: skip
_TOKENS = tuple(1 << power for power in range(4, 21))
_RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_SCORING = ("anchors", "scoring", "selection")


class WorkerState(NamedTuple):
    """A worker's gauges. usage: pages in use over all pages."""

    usage: float = 0.0
    running: int = 0
    waiting: int = 0
    sessions: int = 0


class Metrics:
    """`deltafront_*`. One instance a process; `directory` is shared by the replicas of a node."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        os.environ[DIRECTORY_VARIABLE] = str(directory)
        import prometheus_client as prometheus  # reads the variable when it is imported
        from prometheus_client import values

        # If somebody imported it earlier, its values would live in this process's memory only.
        values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
        self.directory = directory
        self._prometheus = prometheus
        self._workers: set[str] = set()
        self._declare_latencies()
        self._declare_attention()
        self._declare_state()

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Any:
        return self._prometheus.Histogram(f"deltafront_{name}", text, labels, buckets=buckets, registry=None)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
        return self._prometheus.Counter(f"deltafront_{name}", text, labels, registry=None)

    def _summary(self, name: str, text: str, labels: tuple[str, ...]) -> Any:
        return self._prometheus.Summary(f"deltafront_{name}", text, labels, registry=None)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
        return self._prometheus.Gauge(
            f"deltafront_{name}", text, labels, registry=None, multiprocess_mode="livemostrecent"
        )

    def _declare_latencies(self) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token", _SECONDS
        )
        self._parts = self._counter(
            "ttft_part_seconds_total", "Parts of the time to first token; they add up to its sum", ("part",)
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last event", _SECONDS, ("method_rpc",)
        )
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a prefill group", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Reading the prompt", _SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN_SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._cached = self._counter("cached_tokens_total", "Prompt tokens that a session held")
        self._generated = self._counter("generation_tokens_total", "Tokens generated")

    def _declare_attention(self) -> None:
        self._density = self._histogram(
            "attention_density_ratio", "Causal tiles computed, by prompt", _RATIOS, ("method",)
        )
        self._layers = self._summary(
            "layer_density_ratio", "Causal tiles computed, by prompt and layer", ("method", "layer")
        )
        self._overhead = self._histogram(
            "scoring_overhead_ratio", "Time of scoring over time of attention", _RATIOS, ("method",)
        )
        self._handoff_bytes = self._counter("handoff_bytes_total", "K/V handed to decode workers")
        self._handoff_seconds = self._histogram("handoff_seconds", "Pulling one prompt's K/V", _SECONDS)
        self._attended = self._counter("pages_attended_total", "Pages read by sparse decode layers")
        self._held = self._counter("pages_held_total", "Pages that full attention would have read there")

    def _declare_state(self) -> None:
        self._states = [
            self._gauge("kv_cache_usage_ratio", "K/V pages in use", ("worker",)),
            self._gauge("num_requests_running", "Requests that a worker computes", ("worker",)),
            self._gauge("num_requests_waiting", "Requests that wait in a worker", ("worker",)),
            self._gauge("sessions", "Sessions that a decode worker holds", ("worker",)),
        ]
        self._requests = self._counter(
            "requests_total", "Requests by how they ended", ("outcome", "method_rpc")
        )
        self._replays = self._counter("replays_total", "Attempts repeated after a worker failed")
        self._again = self._counter(
            "tokens_read_again_total", "Prompt tokens that a group had read when a worker's death undid it"
        )

    # --- what the door tells ---------------------------------------------------------------------------

    def ended(self, method_rpc: str, outcome: str, seconds: float) -> None:
        self._requests.labels(outcome, method_rpc).inc()
        self._e2e.labels(method_rpc).observe(seconds)

    def replayed(self) -> None:
        self._replays.inc()

    def read_again(self, tokens: int) -> None:
        self._again.inc(tokens)

    def first_token(self, parts: Sequence[tuple[str, float]]) -> None:
        """parts of the time to first token, which is their sum."""
        self._ttft.observe(sum(seconds for _part, seconds in parts))
        for part, seconds in parts:
            self._parts.labels(part).inc(seconds)

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def tokens(self, prompt: int, generated: int, cached: int = 0) -> None:
        """Of a request that ended well. cached: those of the prompt that were not read again."""
        self._prompt.observe(prompt)
        self._cached.inc(cached)
        self._generated.inc(generated)

    def prefilled(self, report: PrefillReport) -> None:
        self._queue.observe(report.queue)
        self._prefill.observe(report.wall)
        self._handoff_bytes.inc(report.handoff_bytes)
        if mean := density(report.density):
            self._density.labels(report.method).observe(mean)
        for layer in report.density:
            self._layers.labels(report.method, str(layer.layer)).observe(density((layer,)))
        self._overhead.labels(report.method).observe(scoring_overhead(report))

    def pulled(self, report: DecodeReport) -> None:
        self._handoff_seconds.observe(report.handoff_seconds)

    def decoded(self, pages_attended: int, pages_held: int) -> None:
        self._attended.inc(pages_attended)
        self._held.inc(pages_held)

    def state(self, workers: Mapping[str, WorkerState]) -> None:
        """What every worker says of itself, by name. Each door tells of all of them, so whoever adds up takes
        `max by (worker)` first."""
        gone = dict.fromkeys(self._workers - workers.keys(), WorkerState())  # series cannot be removed
        for worker, state in {**gone, **workers}.items():
            for gauge, value in zip(self._states, state, strict=True):
                gauge.labels(worker).set(value)
        self._workers = set(workers)

    # --- what a scrape sees ----------------------------------------------------------------------------

    def registry(self) -> Any:
        """All processes' numbers, read from the shared directory."""
        from prometheus_client import multiprocess

        registry = self._prometheus.CollectorRegistry()
        for pid in _dead(self.directory):
            multiprocess.mark_process_dead(pid, str(self.directory))  # type: ignore[no-untyped-call]
        multiprocess.MultiProcessCollector(registry, str(self.directory))  # type: ignore[no-untyped-call]
        return registry

    def expose(self) -> bytes:
        text: bytes = self._prometheus.generate_latest(self.registry())
        return text


def density(layers: tuple[LayerDensity, ...]) -> float:
    """Computed tiles over causal tiles, 0 for none."""
    causal = sum(layer.causal for layer in layers)
    return sum(layer.computed for layer in layers) / causal if causal else 0.0


def scoring_overhead(report: PrefillReport) -> float:
    """(anchors + scoring + selection) time over attention time, of all stages."""
    attention = sum(stage.get("attention", 0.0) for stage in report.stages)
    scoring = sum(stage.get(name, 0.0) for stage in report.stages for name in _SCORING)
    return scoring / attention if attention > 0 else 0.0


def _dead(directory: Path) -> set[int]:
    """Processes of this node whose gauges are still in the directory but who are not alive."""
    pids = {
        int(found[1])
        for file in directory.glob("gauge_live*.db")
        if (found := re.search(r"_(\d+)\.db", file.name))
    }
    return {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
