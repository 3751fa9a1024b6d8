"""The benchmark harness: checks before times, ratios against earlier rows, the JSON's keys."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks import harness
from deltafront.benchmarks.cases_attention import cases
from deltafront.benchmarks.harness import BenchConfig, Case, Row, Timed, run_cases, write_rows

CONFIG = BenchConfig(device=torch.device("cpu"))


def test_checks_run_once_and_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nothing_is_timed_when_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_json_omits_fields_that_do_not_apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    path = tmp_path / "results" / "rows.json"
    write_rows(path, [Row("dense", 128, 1.5), Row("lists", 128, 0.5, 10.0, 0.1, 3.0, "note")], "abc")
    record = json.loads(path.read_text())
    assert {name: record[name] for name in ("gpu", "commit")} == {"gpu": "a GPU", "commit": "abc"}
    assert set(record) == {"gpu", "commit", "torch", "triton", "rows"}
    assert record["rows"][0] == {"case": "dense", "tokens": 128, "ms": 1.5}
    assert set(record["rows"][1]) == {"case", "tokens", "ms", "tflops", "density", "ratio", "note"}


def test_registers_the_agreed_cases() -> None:
    names = {case.name for case in cases(CONFIG) if case.tokens == CONFIG.tokens}
    wanted = {"sdpa_fa2", "sdpa_cudnn", "dense", "block_sparse_0.085", "delta_kv_50", "delta_correction_g64"}
    assert wanted <= names
