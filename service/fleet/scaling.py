"""Serve's autoscaling policies for prefill groups and decode workers. Pure functions.

Serve's default policy counts requests to replicas, but doors call the actors directly. So replicas record
their workers' states for these policies (`workers/replica.py`). Serve applies bounds and delays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Decision = tuple[int, dict[str, Any]]
"""The number of replicas, and the policy's state, which is empty."""


@dataclass(frozen=True)
class Backlog:
    """A prefill group's queue. tokens_per_second: prefill rate; 0: unknown."""

    waiting_tokens: float
    tokens_per_second: float


@dataclass(frozen=True)
class Load:
    """A decode worker's load. requests: number of requests that decode or wait to decode."""

    pages_used: float
    pages_total: float
    requests: float


def groups_wanted(groups: Sequence[Backlog], current: int, backlog_s: float) -> int:
    """Return the smallest number of groups, at least 1, that can prefill all queues within backlog_s seconds;
    `current` while no rate is known."""
    rates = [group.tokens_per_second for group in groups if group.tokens_per_second > 0]
    if not rates:
        return current
    each = sum(rates) / len(rates) * backlog_s
    return max(_ceil(sum(group.waiting_tokens for group in groups) / each), 1)


def workers_wanted(workers: Sequence[Load], current: int, usage: float, max_batch: int) -> int:
    """Return the smallest number of workers, at least 1, that use at most the share `usage` of their pages
    and have all requests in their batches; `current` if no load is known."""
    if not workers:
        return current
    pages = sum(worker.pages_total for worker in workers) / len(workers)
    by_pages = _ceil(sum(worker.pages_used for worker in workers) / (usage * pages))
    by_batch = _ceil(sum(worker.requests for worker in workers) / max_batch)
    return max(by_pages, by_batch, 1)


class GroupsByBacklog:
    def __init__(self, backlog_s: float) -> None:
        self._backlog_s = backlog_s

    def __call__(self, context: Any) -> Decision:
        groups = [Backlog(*each) for each in _by_replica(context, "waiting_tokens", "tokens_per_second")]
        return groups_wanted(groups, context.target_num_replicas, self._backlog_s), {}


class WorkersByLoad:
    def __init__(self, usage: float, max_batch: int) -> None:
        self._usage, self._max_batch = usage, max_batch

    def __call__(self, context: Any) -> Decision:
        each = _by_replica(context, "pages_total", "pages_free", "decoding")
        workers = [Load(total - free, total, requests) for total, free, requests in each]
        return workers_wanted(workers, context.target_num_replicas, self._usage, self._max_batch), {}


def _by_replica(context: Any, *names: str) -> list[tuple[float, ...]]:
    metrics = [context.aggregated_metrics.get(name, {}) for name in names]
    replicas = [replica for replica in metrics[0] if all(replica in values for values in metrics)]
    return [tuple(values[replica] for values in metrics) for replica in replicas]


def _ceil(share: float) -> int:
    """Round up, but ignore floating-point errors of the number."""
    return math.ceil(share - 1e-9)
