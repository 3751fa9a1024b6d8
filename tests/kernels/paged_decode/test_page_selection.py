"""Tests page selection, with ties: the CPU version against a sort, the kernel against the CPU version."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.paged_decode import cpu, page_selection
from deltafront.tests.reference.paged_decode import selected_pages

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BUDGETS = [(1, 0), (1, 1), (4, 0), (8, 3), (16, 16), (64, 8), (500, 8)]
"""Pairs of (budget, recency), in pages."""


def lengths_of(pages: list[int], partial: int = 5) -> torch.Tensor:
    tokens = [16 * (n - 1) + partial for n in pages]
    return torch.tensor(tokens, dtype=torch.int32, device=DEVICE)


def scores(kind: str, requests: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_RP = torch.randn(requests, columns, generator=generator)
    made = {
        "softmax": lambda: (4 * x_RP).softmax(-1),
        "ties": lambda: (2 * x_RP).round().clamp(0, 3) / 4,
        "equal": lambda: torch.full_like(x_RP, 0.25),
        "zero": lambda: torch.where(x_RP > 0, 0.0, -0.0),
        "tiny": lambda: x_RP.abs() * 1e-44,  # denormal numbers
        "signed": lambda: x_RP,
        "infinite": lambda: torch.where(x_RP > 1, float("inf"), torch.where(x_RP < -1, float("-inf"), x_RP)),
    }
    return made[kind]().to(DEVICE)


KINDS = ["softmax", "ties", "equal", "zero", "tiny", "signed", "infinite"]


@pytest.mark.parametrize(("budget", "recency"), BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_page_selection_keeps_recent_pages_and_the_best_scored_ones(
    kind: str, budget: int, recency: int
) -> None:
    columns, pages = 131, [131, 130, 64, 9, 1]
    score_RP, lengths_R = scores(kind, len(pages), columns), lengths_of(pages)
    found = [
        cpu.select_pages(score_RP, lengths_R, budget=budget, recency=recency),
        page_selection.kernel_select_pages(score_RP, lengths_R, budget=budget, recency=recency),
    ]
    for selected_RK, counts_R in found:
        assert selected_RK.dtype == counts_R.dtype == torch.int32
        assert selected_RK.shape == (len(pages), budget)
        for request, held in enumerate(pages):
            expected = selected_pages(score_RP[request].tolist(), held, budget, recency)
            row = selected_RK[request].tolist()
            assert int(counts_R[request]) == len(expected)
            assert row == expected + [0] * (budget - len(expected))


@pytest.mark.parametrize("partial", [1, 15, 16])
def test_a_partly_filled_page_counts_as_a_recent_page(partial: int) -> None:
    score_RP = scores("softmax", 1, 40)
    lengths_R = lengths_of([33], partial)
    for select in (cpu.select_pages, page_selection.kernel_select_pages):
        selected_RK, _ = select(score_RP, lengths_R, budget=8, recency=2)
        assert selected_RK[0, -2:].tolist() == [31, 32]


def test_page_selection_ignores_scores_after_a_requests_last_page() -> None:
    score_RP = scores("softmax", 2, 100)
    lengths_R = lengths_of([60, 80])
    clean = cpu.select_pages(score_RP, lengths_R, budget=16, recency=4)
    score_RP[0, 60:], score_RP[1, 80:] = float("nan"), float("inf")
    for select in (cpu.select_pages, page_selection.kernel_select_pages):
        dirty = select(score_RP, lengths_R, budget=16, recency=4)
        assert torch.equal(dirty[0], clean[0])
        assert torch.equal(dirty[1], clean[1])


def test_page_selection_kernel_reads_a_slice_of_a_wider_buffer() -> None:
    wide_RP = scores("softmax", 3, 300)
    lengths_R = lengths_of([200, 150, 3])
    expected, _ = cpu.select_pages(wide_RP[:, :200].contiguous(), lengths_R, budget=16, recency=4)
    found, _ = page_selection.kernel_select_pages(wide_RP[:, :200], lengths_R, budget=16, recency=4)
    assert torch.equal(found, expected)


def test_dispatch_selects_the_same_pages_as_the_cpu_version() -> None:
    score_RP, lengths_R = scores("softmax", 2, 90), lengths_of([90, 12])
    found = page_selection.select_pages(score_RP, lengths_R, budget=16, recency=4)
    expected = cpu.select_pages(score_RP, lengths_R, budget=16, recency=4)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("columns", [8192, 32768, 65536])
@pytest.mark.parametrize("kind", KINDS)
def test_page_selection_kernel_equals_the_cpu_version_for_long_tables(kind: str, columns: int) -> None:
    score_RP = scores(kind, 4, columns)
    lengths_R = lengths_of([columns, columns - 1, 5000, 60])
    for budget, recency in ((64, 8), (256, 8), (4096, 0)):
        found = page_selection.select_pages(score_RP, lengths_R, budget=budget, recency=recency)
        expected = cpu.select_pages(score_RP, lengths_R, budget=budget, recency=recency)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_score_RP": torch.zeros(3)}, r"must be \(requests, pages\)"),
        ({"page_score_RP": torch.zeros(2, 0)}, r"must be \(requests, pages\)"),
        ({"page_score_RP": torch.zeros(2, 5, dtype=torch.float16)}, "must be float32"),
        ({"page_score_RP": torch.zeros(5, 2).T}, "must be contiguous"),
        ({"lengths_R": torch.tensor([1, 2])}, "lengths int32"),
        ({"lengths_R": torch.tensor([1], dtype=torch.int32)}, "the first 2"),
        ({"lengths_R": torch.zeros(2, dtype=torch.int32, device="meta")}, "lengths is on meta"),
        ({"budget": 0, "recency": 0}, "budget 0"),
        ({"recency": 5}, "recency 5"),
        ({"recency": -1}, "recency -1"),
        ({"page_tokens": 32}, "page_tokens 32"),
    ],
)
def test_page_selection_refuses_bad_scores_lengths_and_budgets(
    change: dict[str, object], message: str
) -> None:
    good = {
        "page_score_RP": torch.zeros(2, 5),
        "lengths_R": torch.tensor([70, 33], dtype=torch.int32),
        "budget": 4,
        "recency": 2,
    }
    values = good | change
    with pytest.raises(KernelInputError, match=message):
        page_selection.select_pages(values.pop("page_score_RP"), values.pop("lengths_R"), **values)  # type: ignore[arg-type]
