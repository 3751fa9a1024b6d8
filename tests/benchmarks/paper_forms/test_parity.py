"""Tests the parts of `parity` that do not need the papers' code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltafront.benchmarks.paper_forms.parity import as_x_attention, main
from deltafront.benchmarks.paper_forms.parity_rows import compared, ours, rows_of
from deltafront.kernels.methods import load
from deltafront.tests.reference.structured import structured_input

load("deltafront.benchmarks.paper_forms.methods")


def test_comparison_counts_equal_rows_and_shared_tiles() -> None:
    found = compared("x", [{0}, {0, 1}, {0, 2, 3}], [{0}, {0, 1}, {0, 3, 4, 5}])
    assert (found.same, found.rows, found.shared) == (2, 3, 2 / 5)
    assert (found.ours, found.theirs) == (6, 7)
    assert compared("x", [{0}], [{0}]).shared == 1.0
    with pytest.raises(ValueError):
        compared("x", [{0}], [])


def test_converts_a_tile_mask_to_kept_columns_per_row() -> None:
    kept = torch.tensor([[[True, False, True], [False, False, True]], [[True] * 3, [False] * 3]])
    assert rows_of(kept) == [{0, 2}, {2}, {0, 1, 2}, set()]


def test_rule_of_xattentions_code_keeps_one_tile_more_than_ours() -> None:
    """The expected tiles follow XAttention's published code, tile by tile."""
    x = structured_input(1024, q_heads=2, kv_heads=1, head_dim=16)
    theirs, mine = as_x_attention(x, 16, 0.9), ours(x, "xattention", stride=16, tau=0.9)
    assert len(theirs) == len(mine) == 16
    for n, (their, my) in enumerate(zip(theirs, mine, strict=True)):
        assert {0, n % 8} <= their and max(their) == n % 8 == max(my)
    assert sum(map(len, theirs)) > sum(map(len, mine))


def test_error_names_missing_checkouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path), "--tokens", "256"])
    told = capsys.readouterr().out
    assert told.count("is not in") == 5 and "x-attention is not in" in told
