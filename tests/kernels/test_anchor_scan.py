"""Tests the anchor scan: CPU version against oracle, kernel against CPU version, and bad input."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.anchor_scan import (
    AnchorRuns,
    cpu_find_anchors,
    cpu_scan,
    find_anchors,
    kernel_find_anchors,
    runs_of,
)
from deltafront.kernels.interface import KernelInputError
from deltafront.tests.numerics import poisoned_empty
from deltafront.tests.reference.anchor_scan import run_starts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernel_scan(x: torch.Tensor, threshold: float, chunk: int = 128) -> AnchorRuns:
    return runs_of(kernel_find_anchors(x, threshold, chunk), chunk)


def drifting_rows(rows: int, batch: int = 1, heads: int = 2, dim: int = 16, seed: int = 0) -> torch.Tensor:
    """Draw rows that stay similar for seven rows at a time."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, rows, dim, generator=generator)
    level = x[:, :, torch.arange(rows) // 7 * 7]
    return (level + 0.35 * x).to(DEVICE)


def check_consistent(runs: AnchorRuns, rows: int, chunk: int) -> None:
    """Assert that all fields of `runs` follow from `is_anchor`."""
    for lane in range(runs.is_anchor_BGS.flatten(0, 1).shape[0]):
        anchors = runs.is_anchor_BGS.flatten(0, 1)[lane].nonzero()[:, 0].tolist()
        ends = sorted([*anchors[1:], rows])
        place = 0
        for c, count in enumerate(runs.runs_BGC.flatten(0, 1)[lane].tolist()):
            here = [anchor for anchor in anchors if anchor // chunk == c]
            assert count == len(here)
            lengths = [ends[place + i] - anchor for i, anchor in enumerate(here)]
            for index, (anchor, length) in enumerate(zip(here, lengths, strict=True)):
                run = runs.run_BGS.flatten(0, 1)[lane, anchor : anchor + length]
                assert (run == index).all()
            place += count


@pytest.mark.parametrize("chunk", [128, 256])
@pytest.mark.parametrize("threshold", [0.75, -0.2])
def test_anchor_scan_on_the_cpu_equals_the_oracle(threshold: float, chunk: int) -> None:
    x = drifting_rows(301, batch=2)
    runs = cpu_scan(x, threshold, chunk)
    found = [lane.nonzero()[:, 0].tolist() for lane in runs.is_anchor_BGS.flatten(0, 1)]
    assert found == run_starts(x, threshold, chunk, "cosine")
    assert 2 < len(found[0]) < 250
    check_consistent(runs, 301, chunk)


@pytest.mark.parametrize("chunk", [128, 256])
def test_centred_scan_compares_rows_minus_their_chunks_mean(chunk: int) -> None:
    x = drifting_rows(301, batch=2) + 9.0
    runs = cpu_scan(x, 0.4, chunk, centred=True)
    found = [lane.nonzero()[:, 0].tolist() for lane in runs.is_anchor_BGS.flatten(0, 1)]
    assert found == run_starts(x, 0.4, chunk, "cosine", centred=True)
    assert 20 < len(found[0]) < 250 and len(run_starts(x, 0.75, chunk, "cosine")[0]) < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "chunk"), [(300, 128), (520, 512), (1, 128)])
def test_anchor_scan_kernel_equals_the_cpu_version(rows: int, chunk: int, dtype: torch.dtype) -> None:
    x = drifting_rows(rows, batch=2, dim=32, seed=rows).to(dtype)
    with poisoned_empty():
        runs = kernel_scan(x, 0.75, chunk)
    expected = cpu_scan(x, 0.75, chunk)
    assert torch.equal(runs.is_anchor_BGS, expected.is_anchor_BGS)
    assert torch.equal(runs.run_BGS, expected.run_BGS)
    check_consistent(runs, rows, chunk)


@pytest.mark.parametrize("run", [cpu_scan, kernel_scan])
def test_anchor_scan_joins_duplicate_rows_but_not_zero_rows(run: object) -> None:
    assert callable(run)
    same = torch.ones(1, 1, 256, 16, device=DEVICE) * 0.37
    assert run(same, 0.99).runs_BGC.tolist() == [[[1, 1]]]
    zeros = torch.zeros(1, 1, 130, 16, device=DEVICE)
    assert run(zeros, 0.75).runs_BGC.tolist() == [[[128, 2]]]
    assert run(zeros, 0.0).runs_BGC.tolist() == [[[1, 1]]]


def test_anchor_scan_kernel_accepts_strided_rows() -> None:
    x = drifting_rows(200, heads=3, dim=32).transpose(1, 2).contiguous().transpose(1, 2)
    assert not x.is_contiguous()
    expected = cpu_scan(x.contiguous(), 0.7)
    assert torch.equal(kernel_find_anchors(x, 0.7), expected.is_anchor_BGS)
    assert torch.equal(find_anchors(x, 0.7), expected.is_anchor_BGS)


@pytest.mark.parametrize("run", [cpu_find_anchors, kernel_find_anchors])
@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((2, 128, 16), (0.7, 128)),
        ((1, 1, 0, 16), (0.7, 128)),
        ((1, 1, 128, 16), (0.7, 100)),
        ((1, 1, 128, 16), (0.7, 0)),
        ((1, 1, 128, 16), (float("nan"), 128)),
    ],
)
def test_anchor_scan_refuses_bad_shapes_and_thresholds(
    run: object, shape: tuple[int, ...], arguments: tuple[float, int]
) -> None:
    assert callable(run)
    with pytest.raises(KernelInputError):
        run(torch.zeros(shape, device=DEVICE), *arguments)


def test_anchor_scan_kernel_refuses_bad_head_dimensions_and_dtypes() -> None:
    with pytest.raises(KernelInputError, match="head dimension 48"):
        kernel_find_anchors(torch.zeros(1, 1, 128, 48, device=DEVICE), 0.7)
    with pytest.raises(KernelInputError, match="dtype"):
        kernel_find_anchors(torch.zeros(1, 1, 128, 32, device=DEVICE, dtype=torch.float64), 0.7)
    with pytest.raises(KernelInputError, match="contiguous"):
        kernel_find_anchors(torch.zeros(1, 1, 32, 128, device=DEVICE).transpose(2, 3), 0.7)
