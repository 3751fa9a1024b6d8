"""Tests the kernel benchmark: it checks before timing, computes ratios, and keeps finished rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from deltafront.benchmarks import harness
from deltafront.benchmarks.harness import BenchConfig, Case, Row, Timed, run_cases

CONFIG = BenchConfig(device=torch.device("cpu"))


def test_runs_each_check_once_before_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    times = iter([8.0, 2.0])
    monkeypatch.setattr(harness, "median_ms", lambda run: (seen.append("timed"), next(times))[1])

    def check() -> None:
        seen.append("checked")

    made = partial(Timed, lambda: None, flops=4e12, density=0.5)
    rows = run_cases(
        [
            Case("base", 128, made, check),
            Case("absent", 128, made, unavailable="not here"),
            Case("ours", 128, made, check, over="base"),
        ],
        CONFIG,
    )
    assert seen == ["checked", "timed", "timed"]
    assert [(row.case, row.ms, row.ratio, row.tflops) for row in rows] == [
        ("base", 8.0, None, 500.0),
        ("ours", 2.0, 4.0, 2000.0),
    ]


def test_times_nothing_if_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "median_ms", lambda run: pytest.fail("timed a wrong kernel"))

    def check() -> None:
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        run_cases([Case("base", 128, partial(Timed, lambda: None), check)], CONFIG)


def test_interrupted_run_keeps_its_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "median_ms", lambda run: 3.0)

    def breaks() -> Timed:
        raise MemoryError("too long a prompt")

    kept: list[Row] = []
    cases = [Case("base", 128, partial(Timed, lambda: None)), Case("next", 256, breaks)]
    with pytest.raises(MemoryError):
        run_cases(cases, CONFIG, kept.append)
    assert [(row.case, row.ms) for row in kept] == [("base", 3.0)]
