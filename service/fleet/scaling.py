"""How many prefill groups and decode workers there should be. Pure; free of Ray.

Serve's own policy counts requests that pass through its replicas, and none does here: doors call the actors.
So a replica records its worker's state (`workers/remote.py`), and a policy here counts that. Serve keeps the
bounds and waits before it follows (`upscale_delay_s`, `downscale_delay_s`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Decision = tuple[int, dict[str, Any]]
"""Replicas, and what Serve should remember for the policy: nothing."""


class ScalingContext(Protocol):
    """What is used of ray.serve.config.AutoscalingContext. aggregated_metrics: by name, then by replica,
    averaged over `look_back_period_s`."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]]: ...

    @property
    def target_num_replicas(self) -> int: ...


@dataclass(frozen=True)
class Backlog:
    """A prefill group: prompt tokens that wait, and the rate at which it reads (0: none seen yet)."""

    waiting_tokens: float
    tokens_per_second: float


@dataclass(frozen=True)
class Load:
    """A decode worker: pages in use and in all, requests that decode or wait for a place in the batch."""

    pages_used: float
    pages_total: float
    requests: float


def groups_wanted(groups: Sequence[Backlog], now: int, backlog_s: float) -> int:
    """The fewest that read what waits within backlog_s seconds, at the mean rate seen; `now` as long as no
    group has read anything."""
    rates = [group.tokens_per_second for group in groups if group.tokens_per_second > 0]
    if not rates:
        return now
    each = sum(rates) / len(rates) * backlog_s
    return max(_ceil(sum(group.waiting_tokens for group in groups) / each), 1)


def workers_wanted(workers: Sequence[Load], now: int, usage: float, max_batch: int) -> int:
    """The fewest that hold the pages in use without exceeding the share `usage` of theirs, and decode all
    requests at once; `now` as long as nobody has said anything."""
    if not workers:
        return now
    pages = sum(worker.pages_total for worker in workers) / len(workers)
    by_pages = _ceil(sum(worker.pages_used for worker in workers) / (usage * pages))
    by_batch = _ceil(sum(worker.requests for worker in workers) / max_batch)
    return max(by_pages, by_batch, 1)


class GroupsByBacklog:
    """The policy of prefill groups, as Serve makes it from `policy_kwargs`."""

    def __init__(self, backlog_s: float) -> None:
        self._backlog_s = backlog_s

    def __call__(self, context: ScalingContext) -> Decision:
        groups = [
            Backlog(one["waiting_tokens"], one["tokens_per_second"])
            for one in _by_replica(context, "waiting_tokens", "tokens_per_second")
        ]
        return groups_wanted(groups, context.target_num_replicas, self._backlog_s), {}


class WorkersByLoad:
    """The policy of decode workers."""

    def __init__(self, usage: float, max_batch: int) -> None:
        self._usage, self._max_batch = usage, max_batch

    def __call__(self, context: ScalingContext) -> Decision:
        workers = [
            Load(one["pages_total"] - one["pages_free"], one["pages_total"], one["decoding"])
            for one in _by_replica(context, "pages_total", "pages_free", "decoding")
        ]
        return workers_wanted(workers, context.target_num_replicas, self._usage, self._max_batch), {}


def _by_replica(context: ScalingContext, *names: str) -> list[dict[str, float]]:
    """Of every replica that has recorded all of these."""
    found = [context.aggregated_metrics.get(name, {}) for name in names]
    replicas = [replica for replica in found[0] if all(replica in values for values in found)]
    return [
        {name: values[replica] for name, values in zip(names, found, strict=True)} for replica in replicas
    ]


def _ceil(share: float) -> int:
    """Up to whole replicas; a mean over time may be a rounding error above one."""
    return math.ceil(share - 1e-9)
