"""Compares the wanted numbers of groups and workers with brute force, and calls the policies like Serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingConfig

from deltafront.service.app import _replicas
from deltafront.service.fleet.scaling import (
    Backlog,
    GroupsByBacklog,
    Load,
    WorkersByLoad,
    groups_wanted,
    workers_wanted,
)
from deltafront.tests.states import decode_stats, group_stats
from deltafront.workers.messages.states import DecodeStats, GroupStats

MOST = 400
backlogs = st.lists(
    st.builds(Backlog, st.integers(0, 600_000), st.integers(1000, 9000)), min_size=1, max_size=5
)
loads = st.lists(
    st.builds(Load, st.integers(0, 1000), st.just(1000), st.integers(0, 64)), min_size=1, max_size=5
)


@given(backlogs, st.floats(1, 120))
def test_scales_to_the_fewest_groups_that_prefill_the_backlog_in_time(
    groups: list[Backlog], backlog_s: float
) -> None:
    waiting = sum(group.waiting_tokens for group in groups)
    rate = sum(group.tokens_per_second for group in groups) / len(groups)
    wanted = groups_wanted(groups, 1, backlog_s)
    assert wanted >= 1
    assert waiting / (wanted * rate) <= backlog_s * (1 + 1e-6)
    assert wanted == 1 or waiting / ((wanted - 1) * rate) > backlog_s * (1 - 1e-6)


@given(loads, st.floats(0.1, 1), st.integers(1, 32))
def test_scales_to_the_fewest_workers_that_hold_pages_and_requests(
    workers: list[Load], usage: float, max_batch: int
) -> None:
    pages = sum(worker.pages_used for worker in workers)
    requests = sum(worker.requests for worker in workers)
    enough = [
        count
        for count in range(1, MOST)
        if pages <= count * 1000 * usage * (1 + 1e-9) and requests <= count * max_batch
    ]
    assert workers_wanted(workers, 1, usage, max_batch) == enough[0]


def test_without_a_measured_rate_the_number_of_groups_stays() -> None:
    assert groups_wanted([Backlog(1_000_000, 0)], 2, 30) == 2
    assert groups_wanted([], 3, 30) == 3
    assert workers_wanted([], 3, 0.8, 8) == 3


def test_group_without_a_rate_counts_only_its_backlog() -> None:
    assert groups_wanted([Backlog(30_000, 1000), Backlog(30_000, 0)], 2, 30) == 2


def test_idle_service_scales_to_one_group_and_one_worker() -> None:
    assert groups_wanted([Backlog(0, 1000)] * 3, 3, 30) == 1
    assert workers_wanted([Load(0, 100, 0)] * 3, 3, 0.8, 8) == 1


@dataclass
class FakeContext:
    target_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]] = field(default_factory=dict)

    def record(self, replica: str, state: GroupStats | DecodeStats) -> None:
        """Record states like `Replica.record_autoscaling_stats` and Serve."""
        for name, value in vars(state).items():
            if isinstance(value, int | float):
                self.aggregated_metrics.setdefault(name, {})[replica] = float(value)


def group(waiting_tokens: int) -> GroupStats:
    return group_stats("prefill:x", running=1, waiting_tokens=waiting_tokens, tokens_per_second=1000.0)


def test_groups_follow_a_backlog_from_one_to_three_and_back() -> None:
    policy, seen = GroupsByBacklog(backlog_s=30), []
    now = 1
    for waiting in (0, 10_000, 85_000, 60_000, 25_000, 0):
        context = FakeContext(now)
        for replica in range(now):
            context.record(f"r{replica}", group(waiting // now))
        now, state = policy(context)
        assert state == {}
        seen.append(now)
    assert seen == [1, 1, 3, 2, 1, 1]


def test_number_of_decode_workers_follows_pages_and_batch_size() -> None:
    policy, context = WorkersByLoad(usage=0.5, max_batch=4), FakeContext(1)
    context.record(
        "a",
        decode_stats("decode:a", pages_free=10, running=3, waiting=60, sessions=2, decoding=9),
    )
    assert policy(context)[0] == 3, "nine requests of four at once; ninety pages of fifty each: two"
    context.record("b", decode_stats("decode:b", pages_free=0, sessions=1))
    assert policy(context)[0] == 4, "a hundred and ninety pages of fifty each"


def test_autoscaling_ignores_replicas_with_missing_metrics() -> None:
    context = FakeContext(2)
    context.record("a", group(60_000))
    context.aggregated_metrics["waiting_tokens"]["b"] = 1e9
    assert GroupsByBacklog(30)(context)[0] == 2


@pytest.mark.parametrize(
    ("policy", "limits"),
    [(GroupsByBacklog, {"backlog_s": 30.0}), (WorkersByLoad, {"usage": 0.8, "max_batch": 8})],
)
def test_serve_builds_the_scaling_policy_of_the_application(policy: type, limits: dict[str, Any]) -> None:
    options = _replicas(1, 3, policy, **limits)
    config = AutoscalingConfig.model_validate(options["autoscaling_config"])
    assert (config.min_replicas, config.max_replicas) == (1, 3)
    assert config.policy.get_policy() is policy
    assert isinstance(policy(**config.policy.policy_kwargs)(FakeContext(2))[0], int)
    assert _replicas(2, None, policy, **limits) == {"num_replicas": 2}
