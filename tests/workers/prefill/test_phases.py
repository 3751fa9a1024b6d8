"""Tests phase timers: nested phases count exclusive time, and time outside phases counts nowhere."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from deltafront.workers.messages.stages import ChunkCommand
from deltafront.workers.prefill.stage.chunk import BatchTimes, ChunkWork
from deltafront.workers.prefill.stage.phases import CudaPhases, PhaseTimer, phase_timer


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_nested_phases_count_only_their_own_time() -> None:
    clock = FakeClock()
    with mock.patch.object(time, "perf_counter", clock.perf_counter):
        timer = PhaseTimer()
        clock.now += 1
        with timer.phase("correction"):
            clock.now += 2
            with timer.phase("scoring"):
                clock.now += 4
            clock.now += 8
            with pytest.raises(ValueError), timer.phase("attention"):
                clock.now += 16
                raise ValueError
            clock.now += 32
        clock.now += 64
        with timer.phase("scoring"):
            clock.now += 128
        assert timer.seconds() == {"correction": 42.0, "scoring": 132.0, "attention": 16.0}


def test_phase_time_counts_for_the_layer_where_it_begins() -> None:
    """The layers' times add up to each phase's total."""
    clock = FakeClock()
    with mock.patch.object(time, "perf_counter", clock.perf_counter):
        timer = PhaseTimer()
        for layer, seconds in ((3, 1), (4, 2)):
            with timer.phase("projection"):
                clock.now += 100
            timer.layer = layer
            with timer.phase("scoring"):
                clock.now += 10 * seconds
                with timer.phase("attention"):
                    clock.now += seconds
            timer.layer = None
    assert timer.seconds() == {"projection": 200.0, "scoring": 30.0, "attention": 3.0}
    assert timer.layers() == {3: {"scoring": 10.0, "attention": 1.0}, 4: {"scoring": 20.0, "attention": 2.0}}


def test_phases_add_up_to_at_most_the_wall_time() -> None:
    timer = phase_timer(torch.device("cpu"))
    began = time.perf_counter()
    for _ in range(50):
        with timer.phase("a"), timer.phase("b"):
            time.sleep(0.0001)
    wall = time.perf_counter() - began
    assert 0.005 <= sum(timer.seconds().values()) <= wall


class FakeEvent:
    """An event of a device whose time is `now`, in milliseconds."""

    now = 0.0
    made = 0

    def __init__(self, **_kind: bool) -> None:
        FakeEvent.made += 1

    def record(self, _stream: object) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at - self.at


def test_adjacent_phases_share_one_cuda_event() -> None:
    FakeEvent.now, FakeEvent.made = 5.0, 0
    with (
        mock.patch.object(torch.cuda, "Event", FakeEvent),
        mock.patch.object(torch.cuda, "current_stream"),
    ):
        timer = CudaPhases()
        for name, before, within in (("projection", 100.0, 1.0), ("scoring", 2.0, 4.0)):
            FakeEvent.now += before
            with timer.phase(name):
                FakeEvent.now += within
        with timer.phase("correction"):
            FakeEvent.now += 8.0
            for _ in range(2):
                with timer.phase("attention"):
                    FakeEvent.now += 16.0
                FakeEvent.now += 64.0
    seconds = timer.seconds()
    assert seconds == pytest.approx(
        {"projection": 0.001, "scoring": 0.006, "correction": 0.136, "attention": 0.032}
    )
    assert FakeEvent.made == 3 + 1 + 4, "begin, two ends, an end that holds two phases of two events each"


@pytest.mark.parametrize("on_gpu", [True, False])
def test_reports_the_time_from_the_last_launch_to_the_chunks_end(on_gpu: bool) -> None:
    clock, timer = FakeClock(), mock.MagicMock()
    timer.seconds.return_value = {"projection": 2.0}
    timer.mark.return_value.synchronize = lambda: setattr(clock, "now", clock.now + 1.5)
    if not on_gpu:
        timer.mark.return_value = None
    with mock.patch.object(time, "perf_counter", clock.perf_counter):
        work = ChunkWork(
            command=ChunkCommand(request_id="r", start=0, tokens=128, last=False, wants_logits=False),
            timer=timer,
        )
        clock.now += 0.5
        work.seal()
        work.wait()
    assert work.report(0, BatchTimes.of([work], 0.0)).launched_ahead == (1.5 if on_gpu else None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_phases_measure_the_device_without_waiting_for_it() -> None:
    x = torch.randn(8192, 8192, device="cuda")
    (x @ x) + 1  # loading a kernel at its first launch waits for the device
    torch.cuda.synchronize()
    began = time.perf_counter()
    timer = CudaPhases()
    with timer.phase("attention"):
        for _ in range(20):
            y = x @ x
        with timer.phase("scoring"):
            y = y + 1
    launched = time.perf_counter() - began
    seconds = timer.seconds()
    assert timer.layers() == {}
    wall = time.perf_counter() - began
    assert launched < 0.5 * wall, "the host did not wait"
    assert 10 * seconds["scoring"] < seconds["attention"] <= wall
    assert seconds["attention"] > 0.5 * wall
