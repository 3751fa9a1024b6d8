"""The check of ranks that share one GPU, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks.engine.ranks_on_one_gpu import GroupCollectives, main, relative_error, wrong

SMALL = ["--shape", "tiny", "--layers", "2", "--row-tokens", "80", "--ranks", "2", "--chunk", "48"]


def test_rows_of_two_ranks_equal_those_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "ranks.json"
    assert main([*SMALL, "--result", str(result)]) == 0
    (row,) = json.loads(result.read_text())["rows"]
    assert row["ranks"] == 2 and 0 < row["kv_error"] < row["tolerance"]
    assert json.loads(capsys.readouterr().out) == row


def test_a_row_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that add nothing up have the sums of their own heads alone."""
    monkeypatch.setattr(GroupCollectives, "sum", lambda _self, x: x)
    assert main(SMALL) == 1


def test_nan_in_a_row_counts_as_an_error() -> None:
    wanted = torch.ones(3, 4)
    found = wanted.clone()
    found[1, 2] = float("nan")
    assert relative_error(wanted, wanted) == 0 and relative_error(found, wanted) == float("inf")


def test_an_answer_that_changes_is_wrong() -> None:
    assert wrong({"case": "answers", "questions": 9, "equal": 8})
    assert not wrong({"case": "answers", "questions": 9, "equal": 9})
