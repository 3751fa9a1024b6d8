"""Tests DeltaXAttention's controls: all tiles packed, and tiles skipped at an equal budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltafront.benchmarks.paper_forms.delta_xattention import TileSkipSelector, listed, skipped
from deltafront.benchmarks.paper_forms.methods import TileSkipOptions
from deltafront.benchmarks.paper_forms.oracle import all_packed, skipped_tiles
from deltafront.kernels.build import Composition, build
from deltafront.kernels.interface import no_phase
from deltafront.kernels.methods import load, method_spec
from deltafront.tests.numerics import assert_rows_close, chunk_of, random_mask, spec_of
from deltafront.tests.reference.anchor_scan import run_starts
from deltafront.tests.reference.structured import structured_input

load("deltafront.benchmarks.paper_forms.methods")

OPTIONS: dict[str, float] = {"cos": 0.8, "tau": 0.8, "min_tokens": 0}


def sample(tokens: int = 1100, **changes: Any):  # type: ignore[no-untyped-def]
    return structured_input(tokens, **{"q_heads": 4, "kv_heads": 2, "head_dim": 16, **changes})


@pytest.mark.parametrize("means", [0, 1])
def test_merging_the_keys_of_all_tiles_equals_the_oracle(means: int) -> None:
    x = sample(700)
    method = build(method_spec("delta_xattention_all_packed", {**OPTIONS, "means": means}))
    found, covered = method.attend(x, method.new_state(spec_of(x)))
    assert isinstance(method, Composition) and method.selector is not None
    kept = listed(x, method.selector.select(x, method.selector.new_state(spec_of(x)), no_phase))
    starts = run_starts(x.k_BGSD, 0.8, 128, "cosine")
    assert_rows_close(found, all_packed(x, starts, kept[0], means=bool(means)))
    runs = [sum(first // 128 == m for first in starts[h // 2]) for h in range(4) for m in range(6)]
    expected = (kept[0].sum(1).flatten() * torch.tensor(runs)).sum() / 128
    assert float(covered.computed) == pytest.approx(float(expected))


@pytest.mark.parametrize("saved", [0.0, 3.0, 17.5, 1e6])
def test_tile_skipping_drops_each_rows_lowest_scored_tiles(saved: float) -> None:
    x = sample()
    mask = random_mask(x, 0.7)
    assert mask.score_BHNM is not None
    found = skipped(x, mask, torch.full((1, 4), saved))
    table, before = listed(x, found), listed(x, mask)
    for h in range(4):
        scores = [
            mask.score_BHNM[0, h, n, : int(mask.count_BHN[0, h, n])].tolist() for n in range(x.query_blocks)
        ]
        for n, entries in enumerate(skipped_tiles(scores, saved)):
            tiles = mask.index_BHNM[0, h, n].tolist()
            assert table[0, h, n].nonzero()[:, 0].tolist() == sorted(tiles[entry] for entry in entries)
        every, others = int(before[0, h].sum()), int(before[0, h].sum()) - 2 * x.query_blocks + 1
        assert int(table[0, h].sum()) == every - min(int(saved), others)


def test_tile_skipping_drops_as_many_tiles_as_merging_keys_saves() -> None:
    """The numbers differ by less than one tile per head."""
    x = sample(2048)
    packing = build(method_spec("delta_xattention", OPTIONS))
    _, packed = packing.attend(x, packing.new_state(spec_of(x)))
    skipping = build(method_spec("xattention_skip", OPTIONS))
    _, kept = skipping.attend(x, skipping.new_state(spec_of(x)))
    plain = build(method_spec("xattention", {"tau": 0.8, "min_tokens": 0}))
    _, every = plain.attend(x, plain.new_state(spec_of(x)))
    assert float(packed.computed) < 0.8 * float(every.computed)
    assert 0 <= float(kept.computed) - float(packed.computed) < 4


def test_tile_skipping_drops_the_given_share_of_tiles() -> None:
    x = chunk_of(sample(2048), 1024, 2048)
    selector = TileSkipSelector(TileSkipOptions(tau=0.9, skip=0.25))
    every = selector._scoring.select(x, selector._scoring.new_state(spec_of(x)), no_phase)
    found = selector.select(x, selector.new_state(spec_of(x)), no_phase)
    for h in range(4):
        before, after = int(every.count_BHN[0, h].sum()), int(found.count_BHN[0, h].sum())
        assert before - after == before // 4
