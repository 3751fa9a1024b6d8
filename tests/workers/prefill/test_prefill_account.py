"""Tests the times in a prompt's report: which parts add up, and which request they belong to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.kernels.methods import method_spec
from deltafront.workers.messages.stages import ChunkReport
from deltafront.workers.prefill.group.account import Account, Throughput

seconds = st.floats(0, 50, allow_nan=False)


def report(stage: int, wall: float, launched_ahead: float | None = None, **phases: float) -> ChunkReport:
    return ChunkReport(
        request_id="a",
        stage=stage,
        start=0,
        wall=wall,
        phases=phases,
        density=(),
        sampled_share=0.0,
        handoff_bytes=0,
        launched_ahead=launched_ahead,
    )


def test_report_counts_chunks_of_other_requests_separately() -> None:
    """The last stage runs another request's chunk from 7 to 12 s (3 s of it after our start), ours from 12 to
    16, another's from 16 to 17, and ours from 17 to 19."""
    account = Account(stages=2, method=method_spec("dense"), arrived=5.0)
    account.other_chunk(1.0, 6.0)
    account.began = 9.0
    account.other_chunk(5.0, 12.0)
    account.record_chunk(
        [report(0, 3.0, projection=2.5), report(1, 4.0, projection=3.0, activation_wait=0.5)]
    )
    account.other_chunk(1.0, 17.0)
    account.record_chunk([report(0, 2.0, projection=1.5), report(1, 2.0, projection=1.0, attention=0.75)])
    done = account.report(19.5)
    assert (done.queue, done.wall) == (4.0, 10.5)
    assert done.critical == {
        "projection": 4.0,
        "activation_wait": 0.5,
        "attention": 0.75,
        "other_requests": 4.0,
        "group_overhead": 1.25,
    }
    assert done.stages[0] == {"projection": 4.0}


def test_gpu_that_finishes_with_the_last_launch_is_launch_bound() -> None:
    """The limit is a share of the chunk's own time, without its wait for the previous stage. A CPU is never
    launch bound."""
    account = Account(stages=2, method=method_spec("dense"), arrived=0.0)
    account.began = 0.0
    account.record_chunk(
        [report(0, 3.0, 0.59, projection=3.0), report(1, 6.0, 0.61, projection=3.0, activation_wait=3.0)]
    )
    account.record_chunk([report(0, 1.0, 1.5, projection=1.0), report(1, 1.0, 0.0, attention=1.0)])
    account.record_chunk([report(0, 8.0, projection=8.0), report(1, 8.0, projection=8.0)])
    assert account.report(15.0).launch_bound == (3.0, 1.0)


@given(st.lists(st.tuples(st.booleans(), seconds, st.floats(0, 2)), max_size=12), seconds)
def test_critical_parts_always_add_up_to_the_wall_time(
    chunks: list[tuple[bool, float, float]], gap: float
) -> None:
    account = Account(stages=1, method=method_spec("dense"), arrived=0.0)
    account.began = now = 1.0
    for own, wall, used in chunks:
        now += wall
        if own:
            account.record_chunk([report(0, wall, projection=wall * used)])
        else:
            account.other_chunk(wall, now)
    done = account.report(now + gap)
    assert sum(done.critical.values()) == pytest.approx(done.wall, abs=1e-9)
    assert all(value >= 0 for value in done.critical.values()), "a counter refuses less, and ends the request"


def test_prefill_rate_ignores_idle_time_and_old_chunks() -> None:
    throughput = Throughput()
    assert throughput.tokens_per_second == 0.0
    throughput.record_batch(500, sent=0.0, ended=1.0)
    throughput.record_batch(500, sent=0.5, ended=2.0)
    assert throughput.tokens_per_second == pytest.approx(500.0)
    throughput.record_batch(500, sent=1000.0, ended=1001.0)
    assert throughput.tokens_per_second == pytest.approx(500.0), "nobody waited from 2 to 1000"
    for k in range(60):
        throughput.record_batch(500, sent=2000.0 + 5 * k, ended=2005.0 + 5 * k)
    assert throughput.tokens_per_second == pytest.approx(100.0, rel=0.02)


def test_prefill_rate_is_reset_after_an_idle_minute() -> None:
    throughput = Throughput()
    assert throughput.idle(5.0) == math.inf
    throughput.record_batch(500, sent=0.0, ended=60.0)
    throughput.record_batch(500, sent=119.0, ended=120.0)
    assert throughput.tokens_per_second < 20 and throughput.idle(150.0) == 30.0
    throughput.record_batch(500, sent=180.0, ended=181.0)
    assert throughput.tokens_per_second == pytest.approx(500.0)
