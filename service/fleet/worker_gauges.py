"""The gauges of workers' states, which every door reports."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from deltafront.workers.messages.states import TierStats, WorkerStats


class WorkerState(NamedTuple):
    """The values of a worker's gauges. usage: share of pages in use. queue_tokens: prompt tokens not yet
    prefilled.
    """

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
    pages_remembered: int = 0
    pages_evicted: int = 0
    pages_evicted_retained: int = 0
    page_bytes: int = 0
    evicted_age_s: float = 0.0
    state_slots: int = 0
    state_slots_free: int = 0
    states_evicted: int = 0
    append_tokens_per_second: float = 0.0
    fetched_tokens_per_second: float = 0.0


def state_of(stats: WorkerStats) -> WorkerState:
    known = {name: value for name, value in vars(stats).items() if name in WorkerState._fields}
    usage = 1 - stats.pages_free / stats.pages_total if stats.pages_total else 0.0
    return WorkerState(usage=usage, queue_tokens=getattr(stats, "waiting_tokens", 0), up=1, **known)


_WORKER_GAUGES = {
    "usage": ("kv_cache_usage_ratio", "KV pages in use"),
    "pages_free": ("kv_pages_free", "KV pages that no request or session holds, cached ones included"),
    "pages_total": ("kv_pages", "KV pages, held or not"),
    "running": ("num_requests_running", "Requests that a worker computes"),
    "waiting": ("num_requests_waiting", "Requests that wait in a worker"),
    "sessions": ("sessions", "Sessions that a decode worker holds"),
    "queue_tokens": ("queue_tokens", "Prompt tokens waiting for prefill in a group"),
    "tokens_per_second": ("prefill_tokens_per_second", "Recent rate of prefill of a group"),
    "up": ("worker_up", "1 for a worker that answers, 0 for one that did"),
    "draining": ("worker_draining", "1 for a worker that ends what it has and goes"),
    "pages_remembered": ("kv_pages_remembered", "KV pages in the prefix cache"),
    "pages_evicted": ("kv_pages_evicted", "Pages evicted from the prefix cache since the start"),
    "pages_evicted_retained": ("kv_pages_evicted_retained", "Those that were still to be retained"),
    "page_bytes": ("kv_page_bytes", "Bytes of a page of a decode worker"),
    "evicted_age_s": ("kv_evicted_age_seconds", "Their ages since their last use, added up"),
    "state_slots": ("state_slots", "Slots for states of linear attention or rolling buffers, held or not"),
    "state_slots_free": ("state_slots_free", "Those that no request or session holds, cached ones included"),
    "states_evicted": ("states_evicted", "States evicted from the prefix cache since the start"),
    "append_tokens_per_second": ("append_tokens_per_second", "Recent rate of prefill of a decode worker"),
    "fetched_tokens_per_second": ("kv_fetch_tokens_per_second", "Recent rate of KV fetched back by stages"),
}
"""The name and text of the gauge for each field of WorkerState."""
_TIER_GAUGES = {
    "room": ("kv_tier_room_pages", "Pages that a tier below the GPU holds at most"),
    "pages": ("kv_tier_pages", "Cached pages"),
    "evicted": ("kv_tier_evicted_pages", "Pages evicted since the start"),
    "evicted_retained": ("kv_tier_evicted_retained_pages", "Those that were still to be retained"),
    "states_evicted": ("kv_tier_evicted_states", "States evicted since the start"),
    "evicted_age_s": ("kv_tier_evicted_age_seconds", "Their ages since their last use, added up"),
    "missed": ("kv_tier_missed_pages", "Pages that were gone before they were copied there, or lost"),
    "back": ("kv_tier_back_pages", "Pages that came back since the start"),
    "back_s": ("kv_tier_back_seconds", "The time that took"),
    "bytes_per_page": ("kv_tier_page_bytes", "Bytes of a page"),
}
"""The name and text of the gauge for each field of TierStats."""


class WorkerGauges:
    """Gauges of all workers. Each door reports all, so queries take `max by (worker)` first."""

    def __init__(self, gauge: Callable[..., Any]) -> None:
        self._known: set[str] = set()
        self._known_tiers: set[tuple[str, str]] = set()
        self._gauges = {field: gauge(*said, "worker") for field, said in _WORKER_GAUGES.items()}
        self._tiers = {field: gauge(*said, "worker tier") for field, said in _TIER_GAUGES.items()}
        self._compilations = gauge(
            "kernel_compilations",
            "Forms of kernels compiled, or loaded from disk: in warm-up, or while requests may wait",
            "worker phase",
        )

    def tiered(self, worker: str, tiers: Sequence[TierStats]) -> None:
        for tier in tiers:
            self._known_tiers.add((worker, tier.tier))
            for name, gauge in self._tiers.items():
                gauge.labels(worker, tier.tier).set(getattr(tier, name))

    def compiled(self, worker: str, phases: Sequence[tuple[str, int]]) -> None:
        """Set the number of kernels compiled so far, by phase. This metric is a gauge because counters are
        summed over doors."""
        for phase, count in phases:
            self._compilations.labels(worker, phase).set(count)

    def update(self, workers: Mapping[str, WorkerState]) -> None:
        """Set the gauges of all live workers. Workers that are gone get zeros."""
        gone = dict.fromkeys(self._known - workers.keys(), WorkerState())  # a series cannot be removed
        for worker, state in {**gone, **workers}.items():
            for field, gauge in self._gauges.items():
                gauge.labels(worker).set(getattr(state, field))
        for worker, tier in self._known_tiers:
            if worker in gone:
                for gauge in self._tiers.values():
                    gauge.labels(worker, tier).set(0)
        self._known |= workers.keys()
