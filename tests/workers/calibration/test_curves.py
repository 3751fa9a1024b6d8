"""Tests the curves of error and density of each head against masked attention."""

from __future__ import annotations

import random

import pytest
import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.options import AntidiagonalOptions
from deltafront.kernels.selectors.grouped.antidiagonal import AntidiagonalSelector
from deltafront.kernels.selectors.rules import cpu as rules
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.workers.calibration import curves as made
from deltafront.workers.calibration.dense_pass import embedded, read_densely
from deltafront.workers.calibration.probes import Document
from deltafront.workers.model.decoder.stack import LayerStack

IDS = random.Random(1).choices(range(199), k=5 * BLOCK + 40)
QUOTAS = (0.0, 0.5, 1.0)
SELECTOR = AntidiagonalSelector(AntidiagonalOptions(tau=0.5, outside=True))


def test_calibration_curves_equal_those_of_masked_attention(
    tiny_stack: LayerStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "sampled_blocks", lambda count: [2, count - 1])
    facts = [range(3 * BLOCK + 5, 3 * BLOCK + 20), range(4 * BLOCK - 2, 4 * BLOCK + 9)]
    found = made.curves(tiny_stack, Document(IDS, [], facts), SELECTOR, QUOTAS)
    without = made.curves(tiny_stack, Document(IDS, []), SELECTOR, QUOTAS)
    assert torch.equal(without.error_LHI, found.error_LHI)
    assert torch.equal(without.fact_error_LHI, found.error_LHI)
    expected: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def look(layer: int, x: AttentionInput) -> torch.Tensor:
        k_HSD, v_HSD = (t[0].repeat_interleave(x.group, 0) for t in (x.k_BGSD, x.v_BGSD))
        logit_HTS = x.q_BHTD[0] @ k_HSD.transpose(1, 2) * x.scale
        logit_HTS = logit_HTS.masked_fill(torch.ones(len(IDS), len(IDS)).triu(1) > 0, float("-inf"))
        score = SELECTOR.cpu_scores(x, None, lambda _: torch.no_grad())
        given = x.q_BHTD.shape[1], logit_HTS, v_HSD, score, tiny_stack.layer(layer).output_weight_CO
        expected.append((*_slowly(*given, [2, 5]), _slowly(*given, [3])[1]))
        return (logit_HTS.softmax(-1) @ v_HSD)[None]

    read_densely(tiny_stack, embedded(tiny_stack, IDS), look)
    for layer, (density_HI, error_HI, fact_error_HI) in enumerate(expected):
        torch.testing.assert_close(found.density_LHI[layer], density_HI, atol=1e-6, rtol=0)
        torch.testing.assert_close(found.error_LHI[layer], error_HI, atol=1e-7, rtol=1e-3)
        torch.testing.assert_close(found.fact_error_LHI[layer], fact_error_HI, atol=1e-7, rtol=1e-3)
    assert float(found.error_LHI[..., 0].min()) > 0
    assert torch.equal(found.density_LHI[..., 2], torch.ones_like(found.density_LHI[..., 2]))


def _slowly(
    heads: int,
    logit_HTS: torch.Tensor,
    v_HSD: torch.Tensor,
    score: torch.Tensor,
    output_CO: torch.Tensor,
    blocks: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute density_HI and error_HI over these query blocks from whole masks."""
    rows = torch.cat([torch.arange(b * BLOCK, min((b + 1) * BLOCK, len(IDS))) for b in blocks])
    dense_HTD = (logit_HTS.softmax(-1) @ v_HSD)[:, rows]
    slices = output_CO.view(output_CO.shape[0], heads, -1)
    total = torch.einsum("htd,chd->tc", dense_HTD, slices).square().sum()
    density, error = torch.zeros(heads, len(QUOTAS)), torch.zeros(heads, len(QUOTAS))
    for i, quota in enumerate(QUOTAS):
        kept = rules.kept_table(score, Rule("cumulative", quota, 1, 1, True), 0)[0]
        tile_HTS = kept.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, : len(IDS), : len(IDS)]
        sparse = logit_HTS.masked_fill(~tile_HTS, float("-inf")).softmax(-1) @ v_HSD
        change_HTD = sparse[:, rows] - dense_HTD
        density[:, i] = sum(kept[:, b].sum(1) / (b + 1) for b in blocks) / len(blocks)
        error[:, i] = torch.einsum("htd,chd->htc", change_HTD, slices).square().sum((1, 2)) / total
    return density, error


@pytest.mark.parametrize("count", [1, 2, 30, 256, 1024])
def test_sampled_blocks_represent_all_query_blocks(count: int) -> None:
    """The mean share of sink and window tiles in the sample is close to that in all query blocks."""
    blocks = made.sampled_blocks(count)
    assert blocks == sorted(set(blocks)) and blocks[0] >= 0 and blocks[-1] < count
    exact = sum(min(10, block + 1) for block in range(count)) / (count * (count + 1) / 2)
    assert sum(min(10, block + 1) / (block + 1) for block in blocks) / len(blocks) == pytest.approx(
        exact, rel=0.1
    )


def test_picks_blocks_with_facts_evenly_over_the_document() -> None:
    assert made.fact_blocks([]) == []
    assert made.fact_blocks([range(5, 9), range(130, 300), range(200, 210)]) == [0, 1]
    facts = [range(start, start + 20) for start in range(0, 1000 * BLOCK, 2 * BLOCK)]
    blocks = made.fact_blocks(facts)
    assert len(blocks) == made.FACT_BLOCKS and blocks == sorted(set(blocks))
    assert all(block % 2 == 0 for block in blocks)
    assert sum(blocks) / len(blocks) == pytest.approx(499, rel=0.01)
