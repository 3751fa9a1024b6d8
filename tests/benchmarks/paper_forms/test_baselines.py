"""Tests MInference's block-sparse pattern and SpargeAttn against oracles."""

from __future__ import annotations

import pytest
import torch

from deltafront.benchmarks.accuracy.quest import page_bounds
from deltafront.benchmarks.paper_forms.baselines import BlockTopSelector, SpargeSelector, top_mass
from deltafront.benchmarks.paper_forms.methods import BlockTopOptions, SpargeOptions
from deltafront.benchmarks.paper_forms.oracle import sparge_tiles
from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput, no_phase
from deltafront.kernels.methods import load, method_spec
from deltafront.tests.numerics import chunk_of, random_input, spec_of, tiles
from deltafront.tests.reference.selection import pooled_scores
from deltafront.tests.reference.structured import structured_input

load("deltafront.benchmarks.paper_forms.methods")


def some_alike(tokens: int = 1100) -> AttentionInput:
    """Make an input in which some blocks of keys and queries have similar rows."""
    x = random_input(tokens, q_heads=2, kv_heads=1, head_dim=16)
    for rows, seed in ((x.q_BHTD, 1), (x.k_BGSD, 2)):
        generator = torch.Generator().manual_seed(seed)
        for m in range(tokens // 128 + 1):
            block = slice(m * 128, min((m + 1) * 128, tokens))
            if m % 4 != seed:
                rows[:, :, block] = 0.5 * rows[:, :, block] + torch.randn(16, generator=generator)
    return x


@pytest.mark.parametrize("tau", [0.3, 0.8, 0.97])
def test_sparge_selection_equals_the_oracle(tau: float) -> None:
    x = some_alike()
    for part in (x, chunk_of(x, 512, 1100)):
        selector = SpargeSelector(SpargeOptions(tau=tau, theta=0.4))
        found = tiles(selector.select(part, None, no_phase))
        expected = [sorted(row) for head in sparge_tiles(part, tau, 0.4) for row in head]
        assert found == expected
    assert 0 < sum(map(len, found)) < sum(n + 1 for n in range(4, 9)) * 2


def test_sparge_keeps_mass_up_to_tau_but_at_least_one_tile() -> None:
    mass = torch.tensor([[[[0.5, 0.1, 0.3, 0.1], [0.9, 0.05, 0.05, 0.0]]]])
    assert top_mass(mass, 0.85).tolist() == [[[[True, False, True, False], [True, False, False, False]]]]


def test_minference_keeps_the_blocks_with_the_best_means() -> None:
    x = structured_input(1300, q_heads=2, kv_heads=1, head_dim=16)
    selector = BlockTopSelector(BlockTopOptions(top=3))
    found = iter(tiles(selector.select(x, selector.new_state(spec_of(x)), no_phase)))
    scores = pooled_scores(x)
    for h in range(2):
        for n in range(x.query_blocks):
            others = sorted(range(1, n), key=lambda m: -float(scores[0, h, n, m]))
            assert next(found) == sorted({0, n, *others[:3]})


@pytest.mark.parametrize("name", ["sparge", "minference_block_sparse"])
def test_baselines_give_the_same_output_in_chunks(name: str) -> None:
    x = some_alike()
    method = build(
        method_spec(name, {"min_tokens": 0, **({"theta": 0.4} if name == "sparge" else {"top": 2})})
    )
    whole, covered = method.attend(x, method.new_state(spec_of(x)))
    assert 0 < float(covered.computed) < covered.causal
    for start, stop in ((0, 384), (384, 1100)):
        part, _ = method.attend(chunk_of(x, start, stop), method.new_state(spec_of(x)))
        torch.testing.assert_close(part, whole[:, :, start:stop])


@pytest.mark.parametrize("keys", [16, 100])
def test_quest_bounds_come_from_each_pages_own_keys(keys: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    q_HD, k_SHD = torch.randn(3, 8, generator=generator), torch.randn(keys, 3, 8, generator=generator)
    found_PH = page_bounds(q_HD, k_SHD)
    assert found_PH.shape == (-(-keys // 16), 3)
    for page, page_SHD in enumerate(torch.split(k_SHD, 16)):
        low_HD, high_HD = page_SHD.amin(0), page_SHD.amax(0)
        torch.testing.assert_close(found_PH[page], torch.maximum(q_HD * low_HD, q_HD * high_HD).sum(-1))
        assert ((page_SHD * q_HD).sum(-1) <= found_PH[page] + 1e-5).all()
