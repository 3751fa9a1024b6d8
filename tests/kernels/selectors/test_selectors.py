"""Tests the selectors' CPU versions against oracles, and properties of every selector.

Shape suffixes are those of `kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, KernelInputError, TileMask, no_phase
from deltafront.kernels.options import AnchorsOptions, AntidiagonalOptions, StreamingOptions
from deltafront.kernels.selectors.anchors.cpu import cpu_summarise
from deltafront.kernels.selectors.anchors.form import AnchorSettings, SideSettings
from deltafront.kernels.selectors.anchors.selector import AnchorsSelector
from deltafront.kernels.selectors.grouped.antidiagonal import AntidiagonalSelector
from deltafront.kernels.selectors.rules import cpu
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.kernels.selectors.streaming import StreamingSelector
from deltafront.tests.numerics import chunk_of, random_input, spec_of, tiles
from deltafront.tests.reference.selection import (
    anchor_scores,
    antidiagonal_scores,
    true_masses,
)
from deltafront.tests.reference.structured import structured_input

ANCHORS = AnchorsOptions(tau=0.8, outside=False, window=1, q_anchors=4, k_anchors=8, cos=0.75, centred=False)
CENTRED = replace(ANCHORS, cos=0.4, centred=True)
SCORED: dict[str, Callable[[], ScoredSelector]] = {
    "antidiagonal": lambda: AntidiagonalSelector(AntidiagonalOptions(tau=0.8)),
    "anchors": lambda: AnchorsSelector(ANCHORS),
    "anchors_centred": lambda: AnchorsSelector(CENTRED),
}
CHUNKABLE: dict[str, Callable[[], Any]] = {
    **SCORED,
    "streaming": lambda: StreamingSelector(StreamingOptions(sink=1, window=200)),
}


def select(selector: Any, x: AttentionInput) -> TileMask:
    mask: TileMask = selector.select(x, selector.new_state(spec_of(x)), no_phase)
    return mask


def sample(tokens: int = 330, **changes: Any) -> AttentionInput:
    settings: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 16, "seed": tokens, **changes}
    return structured_input(tokens, **settings)


def check_scores(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stride", [4, 8, 16, 64])
@pytest.mark.parametrize("tokens", [300, 261])
def test_antidiagonal_scores_equal_the_oracle(stride: int, tokens: int) -> None:
    x = sample(tokens)
    selector = AntidiagonalSelector(AntidiagonalOptions(stride=stride))
    check_scores(selector.scores(x, None, no_phase), antidiagonal_scores(x, stride))
    tail = chunk_of(x, 256, tokens)
    check_scores(selector.scores(tail, None, no_phase), antidiagonal_scores(tail, stride))


@pytest.mark.parametrize("options", [ANCHORS, CENTRED, replace(ANCHORS, k_anchors=64)])
def test_anchor_scores_equal_the_oracle(options: AnchorsOptions) -> None:
    x = sample(300)
    if options.centred:
        x = biased(x)
    selector = AnchorsSelector(options)
    score = selector.scores(x, selector.new_state(spec_of(x)), no_phase)
    check_scores(score, anchor_scores(x, selector.form))


def test_lowers_the_cosine_threshold_only_in_blocks_with_many_anchors() -> None:
    x = sample(256)

    def counts(side: SideSettings) -> torch.Tensor:
        return cpu_summarise(x.k_BGSD, AnchorSettings(0.75, side, side), side).count_BGMA

    strict, relaxed = counts(SideSettings(8)), counts(SideSettings(8, 0.3))
    assert int(relaxed.sum()) > int(strict.sum())
    roomy = SideSettings(128, 0.3)
    plain = counts(replace(roomy, relax=None))
    assert torch.equal(counts(roomy), plain)
    assert int(plain.sum()) == 256


def biased(x: AttentionInput, size: float = 40.0) -> AttentionInput:
    """Add a bias to queries and keys, as in Qwen2: a large constant in a few channels that RoPE rotates
    slowly. The bias of keys does not change the softmax."""
    bias_D = torch.zeros(x.k_BGSD.shape[3])
    bias_D[[6, 7, 14, 15]] = torch.tensor([size, -size, size / 2, size / 4])
    return replace(x, k_BGSD=x.k_BGSD + bias_D, q_BHTD=x.q_BHTD + 0.1 * bias_D)


def test_a_key_bias_does_not_change_the_anchors_of_centred_keys() -> None:
    x = sample(512)
    side = SideSettings(32, 0.15)
    plain, centred = (AnchorSettings(cos, side, side, centred=c) for cos, c in ((0.75, False), (0.4, True)))

    def runs(x: AttentionInput, form: AnchorSettings) -> torch.Tensor:
        return (cpu_summarise(x.k_BGSD, form, side).count_BGMA > 0).sum(-1)

    assert (runs(biased(x), plain) == 1).all()
    assert torch.equal(runs(biased(x), centred), runs(x, centred)) and (runs(x, centred) > 8).all()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("antidiagonal", 0.5, 1.0),
        ("anchors", -1.0, 0.4),  # without `centred` a block has one run, so the scores are poor
        ("anchors_served", 0.9, 1.0),
    ],
)
def test_centring_lets_anchors_rank_tiles_despite_a_key_bias(name: str, low: float, high: float) -> None:
    """The kept mass is scaled so that a random choice of tiles has 0 and the best choice 1."""
    x = biased(sample(2048, head_dim=64, seed=5))
    selector = AnchorsSelector(AnchorsOptions()) if name == "anchors_served" else SCORED[name]()
    score_BHNM = selector.scores(x, selector.new_state(spec_of(x)), no_phase)
    true_BHNM = true_masses(x).float()
    chance_BHNM = torch.rand(true_BHNM.shape, generator=torch.Generator().manual_seed(0))
    chance, found, best = (_mass_kept(s, true_BHNM) for s in (chance_BHNM, score_BHNM, true_BHNM))
    assert low < (found - chance) / (best - chance) <= high


def _mass_kept(score_BHNM: torch.Tensor, true_BHNM: torch.Tensor) -> float:
    mask = cpu.select(score_BHNM, Rule("top_k", 0.25), 0)
    entry_M = torch.arange(mask.index_BHNM.shape[-1])
    listed_BHNM = entry_M < mask.count_BHN[..., None]
    index_BHNM = torch.where(listed_BHNM, mask.index_BHNM, 0).long()
    return float((true_BHNM.gather(-1, index_BHNM) * listed_BHNM)[:, :, 4:].sum(-1).mean())


@pytest.mark.parametrize("name", CHUNKABLE)
@pytest.mark.parametrize("kind", ["duplicates", "zeros", "large", "one token"])
def test_selectors_give_valid_masks_for_degenerate_rows(name: str, kind: str) -> None:
    x = random_input(513, head_dim=16, rows=1 if kind == "one token" else None)
    factor = {"duplicates": 1.0, "zeros": 0.0, "large": 300.0, "one token": 1.0}[kind]
    q, k = x.q_BHTD * factor, x.k_BGSD * factor
    if kind == "duplicates":
        q, k = q[:, :, :1].expand_as(q).contiguous(), k[:, :, :1].expand_as(k).contiguous()
    x = replace(x, q_BHTD=q, k_BGSD=k)
    for row in range(x.query_blocks):
        for kept in tiles(select(CHUNKABLE[name](), x))[row :: x.query_blocks]:
            diagonal = x.first_block + row
            assert kept == sorted(set(kept)) and {0, diagonal} <= set(kept) and max(kept) == diagonal


def test_streaming_keeps_sink_and_window() -> None:
    x = sample(1000)
    rows = tiles(select(StreamingSelector(StreamingOptions(sink=130, window=200)), x))[:8]
    for n, kept in enumerate(rows):
        seen = {key // BLOCK for row in range(n * BLOCK, (n + 1) * BLOCK) for key in window(row, 200)}
        sink = {0, 1} if n else {0}
        assert kept == sorted(seen | sink)


def window(row: int, size: int) -> range:
    return range(max(0, row - size + 1), row + 1)


def test_mask_contains_the_scores_of_kept_tiles_on_request() -> None:
    x = sample(400)
    options = AntidiagonalOptions(tau=0.8)
    selector = AntidiagonalSelector(options, with_scores=True)
    mask = select(selector, x)
    assert mask.score_BHNM is not None
    score = selector.scores(x, None, no_phase)
    for n in range(4):
        kept = mask.index_BHNM[0, 1, n, : mask.count_BHN[0, 1, n]].long()
        assert torch.equal(mask.score_BHNM[0, 1, n, : kept.numel()], score[0, 1, n, kept])
    assert select(AntidiagonalSelector(options), x).score_BHNM is None


def test_selectors_refuse_misplaced_chunks_and_bad_scales() -> None:
    x = random_input(300, head_dim=16)
    for name, make in CHUNKABLE.items():
        misplaced = random_input(300, head_dim=16, rows=100)
        with pytest.raises(KernelInputError, match="multiple of 128"):
            select(make(), misplaced)
        if name in SCORED:
            with pytest.raises(KernelInputError, match="scale"):
                select(make(), replace(x, scale=-1.0))
    selector = AnchorsSelector(ANCHORS)
    small = replace(spec_of(x), max_tokens=256)
    with pytest.raises(KernelInputError, match="state"):
        selector.select(x, selector.new_state(small), no_phase)
    with pytest.raises(KernelInputError, match="state"):
        selector.select(x, selector.new_state(replace(spec_of(x), dtype=torch.float16)), no_phase)
    with pytest.raises(KernelInputError):
        AnchorsSelector(replace(ANCHORS, q_anchors=3))
    with pytest.raises(KernelInputError, match="stride"):
        AntidiagonalSelector(AntidiagonalOptions(stride=5))
