"""Tests XAttention's and DPXA's ablations against oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltafront.benchmarks.paper_forms.methods import (
    NaiveCellsOptions,
    ThesisAnchorsOptions,
    XAttentionPaperOptions,
)
from deltafront.benchmarks.paper_forms.oracle import cells
from deltafront.benchmarks.paper_forms.tile_scores import (
    NaiveCellsSelector,
    PairedSelector,
    ThesisAnchorsSelector,
    TorchSelector,
)
from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput, no_phase
from deltafront.kernels.methods import load, method_spec
from deltafront.kernels.selectors.rules import cpu
from deltafront.tests.numerics import chunk_of, spec_of, tiles
from deltafront.tests.reference.anchor_scan import run_starts
from deltafront.tests.reference.selection import antidiagonal_scores
from deltafront.tests.reference.structured import structured_input

load("deltafront.benchmarks.paper_forms.methods")


def sample(tokens: int = 430, **changes: Any) -> AttentionInput:
    return structured_input(tokens, **{"q_heads": 2, "kv_heads": 1, "head_dim": 16, **changes})


def scores(selector: TorchSelector, x: AttentionInput) -> torch.Tensor:
    return selector.scores(x, selector.new_state(spec_of(x)), no_phase)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("pattern", [0, 1, 2])
@pytest.mark.parametrize("stride", [4, 16, 64])
def test_xattention_with_other_query_key_pairs_equals_the_oracle(stride: int, pattern: int) -> None:
    x = sample()
    selector = PairedSelector(XAttentionPaperOptions(stride=stride, pattern=pattern, seed=3))
    assert sorted(selector.order) == list(range(stride))
    for part in (x, chunk_of(x, 256, 430)):
        check(scores(selector, part), antidiagonal_scores(part, stride, selector.order))


def test_random_query_key_pairs_depend_on_the_seed() -> None:
    orders = [PairedSelector(XAttentionPaperOptions(pattern=2, seed=seed)).order for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("every", [3, 5])
def test_naive_cell_scores_equal_the_oracle(every: int) -> None:
    x = sample()
    selector = NaiveCellsSelector(NaiveCellsOptions(every=every))
    for part in (x, chunk_of(x, 128, 430)):
        rows = [place - part.q_start for place in range(0, 430, every) if place >= part.q_start]
        check(scores(selector, part), cells(part, [rows] * 2, [[*range(0, 430, every)]]))


def test_thesis_anchor_scores_equal_the_oracle() -> None:
    x = sample()
    selector = ThesisAnchorsSelector(ThesisAnchorsOptions(cos=0.7))
    for part in (x, chunk_of(x, 128, 430)):
        rows, keys = (run_starts(side, 0.7, 128, "cosine") for side in (part.q_BHTD, part.k_BGSD))
        assert 10 < len(keys[0]) < 400
        check(scores(selector, part), cells(part, rows, keys))


def test_scoring_in_slabs_equals_scoring_at_once() -> None:
    x = sample(18 * 128 + 5, q_heads=1)
    selector = PairedSelector(XAttentionPaperOptions(stride=16, pattern=1))
    late = chunk_of(x, 17 * 128, 18 * 128 + 5)
    torch.testing.assert_close(scores(selector, x)[:, :, 17:], scores(selector, late))


@pytest.mark.parametrize("pattern", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 100])
def test_option_top_keeps_the_best_tiles_of_each_query_block(count: int, pattern: int) -> None:
    x = sample(1300)
    selector = PairedSelector(XAttentionPaperOptions(pattern=pattern, top=count, window=200))
    score_BHNM = scores(selector, x)
    kept = iter(tiles(selector.select(x, selector.new_state(spec_of(x)), no_phase)))
    for h in range(2):
        for n in range(x.query_blocks):
            forced = {0, *range(max(0, n - 2), n + 1)}
            others = sorted({*range(n + 1)} - forced, key=lambda m: -float(score_BHNM[0, h, n, m]))
            assert next(kept) == sorted(forced | {*others[:count]})


def test_default_options_equal_the_services_xattention() -> None:
    x = sample(1300)
    found, served = (
        build(method_spec(name, {"stride": 16, "min_tokens": 0}))
        for name in ("xattention_paper", "xattention")
    )
    assert torch.equal(
        found.attend(x, found.new_state(spec_of(x)))[0], served.attend(x, served.new_state(spec_of(x)))[0]
    )


@pytest.mark.parametrize("name", ["xattention_paper", "dpxa_thesis"])
def test_thresholds_of_levels_include_sink_and_window_mass(name: str) -> None:
    """XAttention and DeltaAttention define thresholds as shares of a row's whole mass."""
    x = sample(1300)
    quotas = [0.6, 0.9]
    spec = method_spec(name, {"density": 0.1, "min_tokens": 0, "cos": 0.75} if name == "dpxa_thesis" else
                       {"density": 0.1, "min_tokens": 0, "pattern": 1})  # fmt: skip
    method: Any = build(spec, lambda _layer, _tokens: quotas)
    state = method.selector.new_state(spec_of(x))
    score_BHNM = method.selector.scores(x, method.selector.new_state(spec_of(x)), no_phase)
    found = method.selector.select(x, state, no_phase)
    assert not state.rule.outside
    assert tiles(found) == tiles(cpu.select(score_BHNM, state.rule, 0))
    for h, quota in enumerate(quotas):
        for n, row in enumerate(score_BHNM[0, h].tolist()):
            kept = tiles(found)[h * x.query_blocks + n]
            assert sum(row[m] for m in kept) >= (quota - 1e-3) * sum(row)
