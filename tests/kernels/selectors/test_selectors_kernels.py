"""Tests selector kernels against their CPU versions, row by row, and in chunks.

Scores are compared in place of masks, because rounding may move a score across the threshold. Masks are
compared exactly with those that follow from the kernel's scores. Shape suffixes are those of
`kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, TileMask, no_phase
from deltafront.kernels.options import AnchorsOptions, AntidiagonalOptions, StreamingOptions
from deltafront.kernels.selectors.anchors import scores
from deltafront.kernels.selectors.anchors.cpu import cpu_summarise
from deltafront.kernels.selectors.anchors.form import AnchorSettings, SideSettings
from deltafront.kernels.selectors.anchors.selector import AnchorsSelector
from deltafront.kernels.selectors.anchors.summary import empty_table, kernel_summarise
from deltafront.kernels.selectors.grouped.antidiagonal import AntidiagonalSelector
from deltafront.kernels.selectors.rules import cpu as rules
from deltafront.kernels.selectors.rules import sums
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.kernels.selectors.streaming import StreamingSelector
from deltafront.tests.numerics import assert_rows_close, chunk_of, poisoned_empty, spec_of, tiles
from deltafront.tests.reference.structured import structured_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ANCHORS = AnchorsOptions(tau=0.8, outside=False, window=1, k_anchors=16, cos=0.75, centred=False)
SCORED: dict[str, Callable[[], ScoredSelector]] = {
    "antidiagonal": lambda: AntidiagonalSelector(AntidiagonalOptions(tau=0.8, stride=16)),
    "antidiagonal_4": lambda: AntidiagonalSelector(AntidiagonalOptions(tau=0.8, stride=4)),
    "antidiagonal_64": lambda: AntidiagonalSelector(AntidiagonalOptions(tau=0.8, stride=64)),
    "anchors": lambda: AnchorsSelector(ANCHORS),
    "anchors_centred": lambda: AnchorsSelector(replace(ANCHORS, cos=0.43, centred=True)),
    "anchors_finest": lambda: AnchorsSelector(replace(ANCHORS, q_anchors=32, k_anchors=64, cos=0.85)),
    "anchors_fewest": lambda: AnchorsSelector(replace(ANCHORS, q_anchors=1, k_anchors=8)),
}
IN_EIGHT_BITS = ("antidiagonal", "antidiagonal_4", "antidiagonal_64")
"""Selectors that convert 16-bit inputs to FP8. Tests give them inputs that FP8 represents exactly."""


def sample(tokens: int, dtype: torch.dtype = torch.float32, **changes: Any) -> AttentionInput:
    settings: dict[str, Any] = {"q_heads": 3, "kv_heads": 1, "head_dim": 32, "seed": tokens, **changes}
    return structured_input(tokens, dtype=dtype, device=DEVICE, **settings)


def wide(x: AttentionInput) -> AttentionInput:
    return replace(x, q_BHTD=x.q_BHTD.float(), k_BGSD=x.k_BGSD.float(), v_BGSD=x.v_BGSD.float())


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def kernel_scores(selector: ScoredSelector, x: AttentionInput) -> torch.Tensor:
    with poisoned_empty():
        return selector.kernel_scores(x, selector.new_state(spec_of(x)), no_phase)


def kernel_mask(selector: ScoredSelector, x: AttentionInput) -> TileMask:
    with poisoned_empty():
        return selector.kernel_select(x, selector.new_state(spec_of(x)), no_phase)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in SCORED),
        *((name, torch.float32) for name in ("antidiagonal", "anchors")),
    ],
)
def test_selector_kernels_equal_the_cpu_versions(name: str, dtype: torch.dtype) -> None:
    x = sample(300, dtype, batch=2 if name == "anchors" else 1)
    if name in IN_EIGHT_BITS:
        x = replace(x, q_BHTD=eight_bits(x.q_BHTD), k_BGSD=eight_bits(x.k_BGSD))
    selector = SCORED[name]()
    score_BHNM = kernel_scores(selector, x)
    exact = wide(x)
    expected_BHNM = selector.cpu_scores(exact, selector.new_state(spec_of(exact)), no_phase)
    assert_rows_close(score_BHNM, expected_BHNM, dtype=torch.float16, factor=2)
    assert tiles(kernel_mask(selector, x)) == tiles(rules.select(score_BHNM, selector.rule, 0))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize("name", ["antidiagonal", "anchors"])
def test_kernel_scores_equal_the_cpu_version_for_any_query_group(
    name: str, q_heads: int, kv_heads: int
) -> None:
    x = sample(200, q_heads=q_heads, kv_heads=kv_heads, head_dim=16)
    selector = SCORED[name]()
    expected_BHNM = selector.cpu_scores(x, selector.new_state(spec_of(x)), no_phase)
    assert_rows_close(kernel_scores(selector, x), expected_BHNM, dtype=torch.float16)


@pytest.mark.parametrize("name", ["antidiagonal", "anchors", "anchors_fewest"])
def test_kernel_scores_equal_the_cpu_version_for_256_channels(name: str) -> None:
    """Gemma has such heads. Kernels use other tile sizes for them."""
    x = sample(300, torch.float16, q_heads=2, head_dim=256)
    if name in IN_EIGHT_BITS:
        x = replace(x, q_BHTD=eight_bits(x.q_BHTD), k_BGSD=eight_bits(x.k_BGSD))
    selector, exact = SCORED[name](), wide(x)
    expected_BHNM = selector.cpu_scores(exact, selector.new_state(spec_of(exact)), no_phase)
    score_BHNM = kernel_scores(selector, x)
    assert_rows_close(score_BHNM, expected_BHNM, dtype=torch.float16, factor=2)
    assert tiles(kernel_mask(selector, x)) == tiles(rules.select(score_BHNM, selector.rule, 0))


@pytest.mark.parametrize("name", ["antidiagonal", "anchors", "anchors_centred"])
def test_kernels_select_the_same_tiles_in_chunks(name: str) -> None:
    x = sample(385, torch.float16, q_heads=2)
    selector = SCORED[name]()
    whole = kernel_mask(selector, x)
    state = selector.new_state(spec_of(x))
    for start, stop in ((0, 128), (128, 384), (384, 385)):
        part = selector.kernel_select(chunk_of(x, start, stop), state, no_phase)
        first, blocks = start // BLOCK, part.count_BHN.shape[2]
        index_BHNM = whole.index_BHNM[:, :, first : first + blocks]
        count_BHN = whole.count_BHN[:, :, first : first + blocks]
        assert tiles(part) == tiles(TileMask(index_BHNM, count_BHN))


@pytest.mark.parametrize("programs", [3, 1 << 20])
def test_scores_do_not_depend_on_the_number_of_key_splits(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = sample(900, torch.float16)
    selector = AnchorsSelector(replace(ANCHORS, q_anchors=2, k_anchors=32))
    monkeypatch.setattr(scores, "_PROGRAMS", 1)
    alone = selector.kernel_scores(x, selector.new_state(spec_of(x)), no_phase)
    monkeypatch.setattr(scores, "_PROGRAMS", programs)
    monkeypatch.setattr(scores, "_LEAST_STEPS", 1)
    shared = selector.kernel_scores(x, selector.new_state(spec_of(x)), no_phase)
    assert torch.equal(alone, shared)


def test_scoring_in_slabs_does_not_change_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample(1300, torch.float16, q_heads=1, head_dim=16)
    for name in ("antidiagonal_64", "anchors"):
        selector = SCORED[name]()
        whole = tiles(kernel_mask(selector, x))
        with monkeypatch.context() as patch:
            patch.setattr(sums, "PART_BYTES", 1)
            assert len(list(sums.slabs(x, 1))) == 2
            assert tiles(kernel_mask(selector, x)) == whole


@pytest.mark.parametrize("name", ["antidiagonal", "anchors", "anchors_centred"])
@pytest.mark.parametrize("kind", ["duplicates", "zeros", "large", "absurd", "one token"])
def test_kernel_scores_equal_the_cpu_version_for_degenerate_rows(name: str, kind: str) -> None:
    x = sample(200, q_heads=1, head_dim=16)
    if kind == "one token":
        x = chunk_of(sample(129, q_heads=1, head_dim=16), 128, 129)
    factor = {"duplicates": 1.0, "zeros": 0.0, "large": 8.0, "absurd": 300.0, "one token": 1.0}[kind]
    q, k = x.q_BHTD * factor, x.k_BGSD * factor
    if kind == "duplicates":
        q, k = q[:, :, :1].expand_as(q).contiguous(), k[:, :, :1].expand_as(k).contiguous()
    x = replace(x, q_BHTD=q, k_BGSD=k)
    selector = SCORED[name]()
    expected_BHNM = selector.cpu_scores(x, selector.new_state(spec_of(x)), no_phase)
    score_BHNM = kernel_scores(selector, x)
    if kind == "large":  # logits in the thousands: 16-bit logarithms still give the same best tile
        assert torch.equal(score_BHNM.argmax(-1), expected_BHNM.argmax(-1))
    elif kind != "absurd":  # beyond the range of 16 bits tiles tie, so any valid mask is right
        assert_rows_close(score_BHNM, expected_BHNM, dtype=torch.float16)
    assert not bool(score_BHNM.isnan().any())
    assert all(kept[0] == 0 for kept in tiles(kernel_mask(selector, x)))


@pytest.mark.parametrize("relax", [None, 0.3])
@pytest.mark.parametrize("bias", [None, 0.0, 20.0])
def test_anchor_slots_of_the_kernel_equal_the_cpu_version(relax: float | None, bias: float | None) -> None:
    """bias: Constant added to some channels of all rows. With a bias, `centred` is set."""
    x = sample(300, torch.float16).k_BGSD[:, :, :, :]
    x[0, 0, 140:150] = 0.0
    x[..., :8] += bias or 0.0
    side = SideSettings(8, relax)
    form = AnchorSettings(0.75 if bias is None else 0.4, side, side, centred=bias is not None)
    with poisoned_empty():
        table = empty_table(x, side.cap)
        kernel_summarise(x, form, side, table, 0, 5)
    expected = cpu_summarise(x, form, side, 5)
    used = expected.count_BGMA > 0
    assert torch.equal(table.count_BGMA, expected.count_BGMA)
    assert torch.equal(table.first_BGMA[used], expected.first_BGMA[used])
    assert_rows_close(table.vector_BGMAD[used], expected.vector_BGMAD[used], dtype=torch.float16)


@pytest.mark.parametrize(("sink", "window"), [(1, 1), (130, 300), (5000, 5000)])
def test_streaming_keeps_tiles_that_any_row_of_a_block_sees(sink: int, window: int) -> None:
    x = sample(900)
    selector = StreamingSelector(StreamingOptions(sink=sink, window=window))
    for part in (x, chunk_of(x, 512, 900)):
        with poisoned_empty():
            found = tiles(selector.select(part, None, no_phase))
        batch, heads = part.q_BHTD.shape[:2]
        expected = []
        for start in range(part.q_start, 900, BLOCK):
            seen = {*range(min(sink, start + 1)), *range(max(0, start - window + 1), start + BLOCK)}
            expected.append(sorted({key // BLOCK for key in seen}))
        assert found == expected * (batch * heads)
