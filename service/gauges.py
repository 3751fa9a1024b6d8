"""Workers' states as gauges. Each door reports all, so queries take `max by (worker)` first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..workers.messages.states import DecodeStats, GroupStats


class WorkerState(NamedTuple):
    """usage: the share of pages in use. queue_tokens: not yet read."""

    usage: float = 0.0
    pages_free: int = 0
    pages_total: int = 0
    running: int = 0
    waiting: int = 0
    sessions: int = 0
    queue_tokens: int = 0
    tokens_per_second: float = 0.0
    up: int = 0
    draining: int = 0


def state_of(stats: GroupStats | DecodeStats) -> WorkerState:
    known = {name: value for name, value in vars(stats).items() if name in WorkerState._fields}
    usage = 1 - stats.pages_free / stats.pages_total if stats.pages_total else 0.0
    return WorkerState(usage=usage, queue_tokens=getattr(stats, "waiting_tokens", 0), up=1, **known)


class WorkerGauges:
    def __init__(self, gauge: Callable[..., Any]) -> None:
        self._gauge = gauge
        self._known: set[str] = set()
        self._gauges = [  # in the order of WorkerState
            self._gauge("kv_cache_usage_ratio", "K/V pages in use", "worker"),
            self._gauge("kv_pages_free", "K/V pages that nobody holds", "worker"),
            self._gauge("kv_pages", "K/V pages, held or not", "worker"),
            self._gauge("num_requests_running", "Requests that a worker computes", "worker"),
            self._gauge("num_requests_waiting", "Requests that wait in a worker", "worker"),
            self._gauge("sessions", "Sessions that a decode worker holds", "worker"),
            self._gauge("queue_tokens", "Prompt tokens that a prefill group has yet to read", "worker"),
            self._gauge("prefill_tokens_per_second", "How fast a prefill group reads, lately", "worker"),
            self._gauge("worker_up", "1 for a worker that answers, 0 for one that did", "worker"),
            self._gauge("worker_draining", "1 for a worker that ends what it has and goes", "worker"),
        ]
        self._compilations = self._gauge(
            "kernel_compilations",
            "Forms of kernels compiled, or loaded from disk: in warm-up, or while requests may wait",
            "worker phase",
        )

    def compiled(self, worker: str, phases: Sequence[tuple[str, int]]) -> None:
        """Kernels compiled so far, by phase. Counters would be added up over doors."""
        for phase, count in phases:
            self._compilations.labels(worker, phase).set(count)

    def update(self, workers: Mapping[str, WorkerState]) -> None:
        """workers: all live ones."""
        gone = dict.fromkeys(self._known - workers.keys(), WorkerState())  # series cannot be removed
        for worker, state in {**gone, **workers}.items():
            for gauge, value in zip(self._gauges, state, strict=True):
                gauge.labels(worker).set(value)
        self._known |= workers.keys()
