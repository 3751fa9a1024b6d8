"""Masks that layers share, means of dropped tiles, Δ rows where queries change: against their definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.benchmarks.paper_forms import ideas
from deltafront.benchmarks.paper_forms.delta_xattention import listed
from deltafront.benchmarks.paper_forms.oracle import corrected_rows, mean_tiles
from deltafront.kernels.attention.block_sparse import cpu_attend
from deltafront.kernels.attention.packed.delta_xattention_kernel import kernel_attend
from deltafront.kernels.attention.packed.runs import PackedRuns
from deltafront.kernels.build import build, options_for, part_of
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, TileMask, no_phase
from deltafront.kernels.methods import PRESETS, load, method_spec, registered
from deltafront.kernels.selectors.streaming import StreamingSelector
from deltafront.tests.numerics import (
    assert_rows_close,
    chunk_of,
    full_mask,
    poisoned_empty,
    random_input,
    random_mask,
    spec_of,
    tiles,
)
from deltafront.tests.reference.attention import reference_attention

load("deltafront.benchmarks.paper_forms.methods")


def selected(x: AttentionInput, layers: int, **options: float) -> list[TileMask]:
    """Masks of layers of one document; each layer has other queries."""
    spec = method_spec("shared_masks", {"share": 0.3, **options})
    selector = part_of(registered(spec).selector)(options_for(spec))  # type: ignore[arg-type]
    found = []
    for layer in range(layers):
        state = selector.new_state(replace(spec_of(x), layer=layer))
        found.append(selector.select(other(x, layer), state, no_phase))
    return found


def other(x: AttentionInput, layer: int) -> AttentionInput:
    return replace(x, q_BHTD=x.q_BHTD.roll(layer, -1))


def alone(x: AttentionInput) -> list[list[int]]:
    spec = method_spec("xattention", {"share": 0.3})
    selector = part_of(registered(spec).selector)(options_for(spec))  # type: ignore[arg-type]
    return tiles(selector.select(x, selector.new_state(spec_of(x)), no_phase))


def test_layers_use_the_mask_of_the_last_layer_that_scored() -> None:
    x = random_input(1500, q_heads=4, kv_heads=2)
    scored = [alone(other(x, layer)) for layer in (0, 2, 4)]
    assert scored[0] != scored[1] != scored[2]
    found = [tiles(mask) for mask in selected(x, 5, every=2)]
    assert found == [scored[0], scored[0], scored[1], scored[1], scored[2]]
    assert [tiles(mask) for mask in selected(x, 3, every=1)] == [alone(other(x, n)) for n in range(3)]


def test_a_layers_heads_may_share_the_tiles_of_their_summed_scores() -> None:
    x = random_input(1500, q_heads=4, kv_heads=2)
    (mask,) = selected(x, 1, together=1)
    heads = mask.index_BHNM.shape[1]
    found = tiles(mask)
    rows = len(found) // heads
    assert heads == 4 and all(found[h * rows : (h + 1) * rows] == found[:rows] for h in range(heads))
    assert found != alone(x)
    counts = torch.tensor([len(row) for row in alone(x)[:rows]])
    assert counts.tolist() == [len(row) for row in found[:rows]]


def test_each_chunk_is_scored_anew() -> None:
    x = random_input(1500, q_heads=2, kv_heads=1)
    method = build(method_spec("shared_masks", {"share": 0.3, "every": 2, "min_tokens": 0}))
    states = [method.new_state(replace(spec_of(x), layer=layer)) for layer in range(2)]
    whole = [build(method_spec("xattention", {"share": 0.3, "min_tokens": 0}))] * 2
    for start, stop in ((0, 640), (640, 1500)):
        part = chunk_of(x, start, stop)
        expected, covered = whole[0].attend(part, whole[0].new_state(spec_of(x)))
        for state in states:
            found, seen = method.attend(part, state)
            assert_rows_close(found, expected)
            assert float(seen.computed) == float(covered.computed)


def moved(given: Any) -> Any:
    """Copy its tensors to the GPU where there is one."""
    tensors = {key: one for key, one in vars(given).items() if isinstance(one, torch.Tensor)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return replace(given, **{key: one.to(device) for key, one in tensors.items()})


def with_means(x: AttentionInput, mask: TileMask) -> torch.Tensor:
    backend = ideas.MeanTilesBackend(None)
    state = backend.new_state(spec_of(x))
    with poisoned_empty():
        return backend.attend(x, mask, state, no_phase)


@pytest.mark.parametrize("start", [0, 384])
def test_dropped_tiles_are_replaced_by_their_means(start: int) -> None:
    x = random_input(900, q_heads=4, kv_heads=2, head_dim=16, rows=900 - start)
    mask = random_mask(x, 0.3)
    kept_HNM = torch.zeros(4, x.query_blocks, x.key_blocks, dtype=torch.bool)
    for at, row in enumerate(tiles(mask)):
        kept_HNM[at // x.query_blocks, at % x.query_blocks, row] = True
    assert_rows_close(with_means(x, mask), mean_tiles(x, kept_HNM))
    kept, causal = int(kept_HNM.sum()), 4 * sum(x.first_block + n + 1 for n in range(x.query_blocks))
    backend = ideas.MeanTilesBackend(None)
    computed = backend.computed_tiles(x, mask, backend.new_state(spec_of(x)))
    assert float(computed) == pytest.approx(kept + (causal - kept) / BLOCK)


def test_the_kernel_takes_means_as_the_cpu_does() -> None:
    """It runs in the interpreter, or compiled where there is a GPU. The table of exact tiles is a slice."""
    x = random_input(900, q_heads=4, kv_heads=2, head_dim=16)
    mask = random_mask(x, 0.3)
    expected = with_means(x, mask)
    state = PackedRuns.empty(spec_of(x), BLOCK)
    state.extend(x.k_BGSD, BLOCK, ideas.ANY_COSINE)
    assert state.offset_BGC[0, 0].tolist() == list(range(900 // BLOCK + 1)), "a run for each whole tile"
    x, state = moved(x), moved(state)
    kept_BHNM = listed(x, moved(mask))
    with poisoned_empty():
        found = kernel_attend(x, ideas.causal_list(kept_BHNM, 0), state, kept_BHNM, means=True)
    assert_rows_close(found.cpu(), expected)


def test_tile_means_are_exact_for_full_masks_and_uniform_tiles() -> None:
    x = random_input(700, q_heads=2, kv_heads=1, head_dim=16)
    assert_rows_close(with_means(x, full_mask(x)), reference_attention(x))
    short = random_input(100, q_heads=2, kv_heads=1, head_dim=16)
    assert_rows_close(with_means(short, full_mask(short)), reference_attention(short))
    for kv in (x.k_BGSD, x.v_BGSD):
        kv.copy_(kv[:, :, torch.arange(700) // BLOCK * BLOCK])
    assert_rows_close(with_means(x, random_mask(x, 0.2)), reference_attention(x))


@pytest.mark.parametrize("start", [0, 256])
def test_rows_after_a_dense_row_get_its_difference(start: int) -> None:
    x = random_input(1100, q_heads=4, kv_heads=2, head_dim=16, rows=1100 - start)
    drift = torch.arange(x.q_BHTD.shape[2])[:, None] / 40
    x.q_BHTD.copy_(0.4 * x.q_BHTD + torch.cat([drift.sin(), drift.cos(), (3 * drift).sin()] * 6, 1)[:, :16])
    spec = method_spec("changed_rows", {"window": 200, "gamma": 16})
    options = options_for(spec)
    backend = part_of(registered(spec).backend)(options)
    mask = StreamingSelector(options).select(x, None, no_phase)
    state = backend.new_state(spec_of(x))
    found = backend.attend(x, mask, state, no_phase)
    is_dense_HT = state.is_dense_BHT[0]
    dense = reference_attention(x)
    assert_rows_close(found[0], corrected_rows(cpu_attend(x, mask)[0], dense[0], is_dense_HT))
    assert is_dense_HT[:, 1024 - start - BLOCK :].all(), "the prompt's last whole block and what follows"
    body_HT = is_dense_HT[:, : 1024 - start - BLOCK]
    assert 0.03 < body_HT.double().mean() < 0.09
    assert body_HT.sum(1).unique().numel() > 1, "heads differ"
    extra = sum((start + row) // BLOCK + 1 for _, row in is_dense_HT.nonzero().tolist()) / BLOCK
    assert float(backend.computed_tiles(x, mask, state)) == pytest.approx(float(mask.count_BHN.sum()) + extra)


def test_dense_rows_are_those_with_the_largest_query_drift() -> None:
    """One cosine divides them from the others, each measured to the last dense row before it."""
    x = random_input(1000, q_heads=2, kv_heads=1, head_dim=16)
    is_dense_HT = ideas.changed(x.q_BHTD, 4)[0]
    assert abs(int(is_dense_HT.sum()) - 500) < 25
    turned, kept = [], []
    for h in range(2):
        last = 0
        for row in range(1000):
            cosine = float(torch.cosine_similarity(x.q_BHTD[0, h, row], x.q_BHTD[0, h, last], dim=0))
            if row % 512:
                (turned if is_dense_HT[h, row] else kept).append(cosine)
            else:
                assert is_dense_HT[h, row]
            last = row if is_dense_HT[h, row] else last
    assert max(turned) < min(kept)


def test_benchmark_methods_register_under_the_benchmarks_package() -> None:
    """Another process imports the module of a method's options, and tests of what is served leave it out."""
    for name, preset in PRESETS.items():
        parts = [part for part in (preset.selector, preset.backend) if isinstance(part, str)]
        if any(part.startswith("deltafront.benchmarks.") for part in parts):
            assert preset.module.startswith("deltafront.benchmarks."), name
