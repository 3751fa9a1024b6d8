"""Tests paged decode attention over an int8 KV cache: CPU version against oracle, kernel against CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.layers.kv_int8 import NOT_A_NUMBER, Scales, quantise
from deltafront.kernels.paged_decode import cpu, dispatch, launch
from deltafront.kernels.paged_decode.launch import SplitPlan
from deltafront.kernels.paged_decode.page_selection import select_pages
from deltafront.kernels.paged_decode.pages import PagedInput
from deltafront.tests.numerics import assert_rows_close, poisoned_empty
from deltafront.tests.reference.paged_decode import paged_attention
from tests.kernels.paged_decode.test_paged_decode import (
    DTYPES,
    GPU,
    SHAPES,
    Shape,
    choose,
    integers,
    make,
)

PRECISION = torch.float16
"""Dtype in which the kernel multiplies, for any dtype of q. Tolerances follow from it."""
SMALL = None if GPU else SplitPlan(32, 2, score_blocks=2)


def in_8_bits(x: PagedInput, keys: float = 1.0) -> PagedInput:
    """Quantise x to int8 pages. Tokens get different magnitudes, and unused slots NaN.

    keys: Spread of the keys' magnitudes.
    """
    device = x.q_RHD.device
    by_slot = torch.linspace(-1, 1, PAGE_TOKENS, device=device)[None, :, None, None]
    quantised = []
    for x_PSGD, apart in ((x.k_PSGD, keys / 2), (x.v_PSGD, 9.0)):
        values, scales = quantise(x_PSGD.float() * 2 ** (apart * by_slot))
        owned = ~x_PSGD[..., 0].isnan()
        quantised.append((values, torch.where(owned, scales, NOT_A_NUMBER)))
    (k_PSGD, k_PSG), (v_PSGD, v_PSG) = quantised
    return replace(x, k_PSGD=k_PSGD, v_PSGD=v_PSGD, scales=Scales(k_PSG, v_PSG))


def wide(x: PagedInput) -> PagedInput:
    return replace(x, q_RHD=x.q_RHD.float())


def test_int8_paged_attention_on_the_cpu_equals_the_oracle() -> None:
    x = in_8_bits(make([1, 16, 37]))
    out_RHD, lse_RH, score_RP = cpu.paged_attention_scored(x)
    for request, pages in enumerate([1, 1, 3]):
        out_HD, lse_H, weights = paged_attention(x, request, list(range(pages)))
        assert_rows_close(out_RHD[request].cpu(), out_HD, dtype=torch.float32)
        torch.testing.assert_close(lse_RH[request].cpu().double(), lse_H, rtol=1e-5, atol=1e-5)
        expected = torch.zeros(score_RP.shape[1], dtype=torch.float64)
        expected[:pages] = weights.amax(0).sum(-1)
        torch.testing.assert_close(score_RP[request].cpu().double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
def test_int8_paged_attention_kernel_equals_the_cpu_version(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [8192, 4097, 4080, 1] if GPU else [1, 100, 144]
    x = in_8_bits(make(lengths, Shape(q_heads, kv_heads, head_dim, dtype=dtype), sharpness=2.0))
    with poisoned_empty():
        out_RHD, lse_RH, score_RP = launch.paged_attention_scored(x, SMALL)
        plain_RHD, plain_RH = launch.paged_attention(x, SMALL)
        _, _, token_RT = launch.paged_attention_scored(x, SMALL, span=1)
    assert out_RHD.dtype == dtype
    expected_RHD, expected_RH, expected_RP = cpu.paged_attention_scored(wide(x))
    assert_rows_close(out_RHD, expected_RHD, dtype=dtype if GPU else PRECISION)
    assert_rows_close(score_RP, expected_RP, dtype=PRECISION)
    assert_rows_close(token_RT, cpu.paged_attention_scored(wide(x), 1)[2], dtype=PRECISION)
    torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=2e-3)
    assert_rows_close(plain_RHD, expected_RHD, dtype=dtype if GPU else PRECISION)
    torch.testing.assert_close(plain_RH, lse_RH)
    assert (score_RP[-1, -(-lengths[-1] // PAGE_TOKENS) :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
def test_sparse_int8_kernel_equals_the_cpu_version(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    x = in_8_bits(make([100, 144, 5], Shape(q_heads, kv_heads, head_dim, dtype=dtype), sharpness=2.0))
    columns = [[0, 3, 6], [1, 2, 4, 5], [0]]
    mixed = integers([3, 0, 1])
    for counts in (integers([3, 4, 1]), mixed):
        chosen = replace(choose(x, columns), counts_R=counts)
        with poisoned_empty():
            out_RHD, lse_RH = launch.paged_attention_sparse(chosen, None if GPU else SplitPlan(32, 2))
        expected_RHD, expected_RH = cpu.paged_attention_sparse(replace(chosen, x=wide(x)))
        assert_rows_close(out_RHD, expected_RHD, dtype=dtype if GPU else PRECISION)
        torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("lengths", [[1, 700, 16, 1], [300], [5, 5, 5, 5, 5], [17, 200, 90]])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_divides_int8_splits_among_requests_by_their_pages(lengths: list[int], splits: int) -> None:
    x = in_8_bits(make(lengths, Shape(dtype=DTYPES[0])))
    with poisoned_empty():
        out_RHD, lse_RH, score_RP = launch.paged_attention_scored(x, SplitPlan(32, splits))
    expected_RHD, expected_RH, expected_RP = cpu.paged_attention_scored(wide(x))
    assert_rows_close(out_RHD, expected_RHD, dtype=DTYPES[0] if GPU else PRECISION)
    assert_rows_close(score_RP, expected_RP, dtype=PRECISION)
    torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_int8_kernel_supports_queries_of_any_magnitude(size: float) -> None:
    """bfloat16 has a larger range than float16, in which the kernel multiplies."""
    x = in_8_bits(make([90], Shape(dtype=torch.float32)))
    x = replace(x, q_RHD=x.q_RHD * size, scale=x.scale / size)
    x.q_RHD[0, 1] = 0
    out_RHD, lse_RH = launch.paged_attention(x, SMALL)
    expected_RHD, expected_RH = cpu.paged_attention(x)
    assert_rows_close(out_RHD, expected_RHD, dtype=PRECISION)
    torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=2e-3)


def test_int8_attention_keeps_the_weight_of_a_sink_with_tiny_values() -> None:
    """Most softmax weight is on a token whose values are 0 or tiny."""
    for tiny in (2.0**-20, 0.0):
        x = make([150], Shape(dtype=torch.float32))
        page = int(x.table_RP[0, 0])
        x.k_PSGD[page, 0] = 4 * x.q_RHD[0, :2]
        x.v_PSGD[page, 0] *= tiny
        y = in_8_bits(x, keys=0.0)
        expected_RHD, expected_RH, expected_RP = cpu.paged_attention_scored(y)
        out_RHD, lse_RH, score_RP = launch.paged_attention_scored(y, SMALL)
        assert float(expected_RP[0, 0]) > 0.9
        assert_rows_close(out_RHD, expected_RHD, dtype=PRECISION)
        assert_rows_close(score_RP, expected_RP, dtype=PRECISION)
        torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=5e-3)


def test_int8_sparse_decode_touches_only_selected_pages() -> None:
    x = in_8_bits(make([150]))
    chosen = choose(x, [[1, 4, 9]])
    expected, _ = cpu.paged_attention_sparse(chosen)
    assert x.scales is not None
    for column in set(range(10)) - {1, 4, 9}:
        page = int(x.table_RP[0, column])
        x.scales.k[page] = x.scales.v[page] = NOT_A_NUMBER
    for module in (cpu, launch):
        out_RHD, _ = module.paged_attention_sparse(chosen)
        assert_rows_close(out_RHD, expected, dtype=PRECISION)


def test_int8_page_scores_select_pages_for_the_next_layer() -> None:
    x = in_8_bits(make([150, 40]))
    args = (x.q_RHD, x.k_PSGD, x.v_PSGD, x.table_RP, x.lengths_R)
    how = {"scale": x.scale, "scales": x.scales}
    out_RHD, lse_RH, score_RP = dispatch.paged_attention_scored(*args, **how)
    full_RHD, full_RH = dispatch.paged_attention(*args, **how)
    assert_rows_close(out_RHD, full_RHD, dtype=PRECISION)
    torch.testing.assert_close(lse_RH, full_RH)
    selected_RK, counts_R = select_pages(score_RP, x.lengths_R, budget=10, recency=2)
    sparse_RHD, _ = dispatch.paged_attention_sparse(*args, selected_RK=selected_RK, counts_R=counts_R, **how)
    assert_rows_close(sparse_RHD, full_RHD, dtype=PRECISION)


def test_refuses_int8_pages_with_wrong_dtypes_scales_or_strides() -> None:
    x = in_8_bits(make([40]))
    e = x.scales
    assert e is not None
    with pytest.raises(KernelInputError, match=r"k: dtype torch\.uint8 is not float32"):
        replace(x, scales=None)
    with pytest.raises(KernelInputError, match="v: an 8-bit KV cache is uint8 with a uint8 scale a row"):
        replace(x, scales=Scales(e.k, e.v[:1]))
    with pytest.raises(KernelInputError, match="must have the same strides"):
        replace(x, v_PSGD=torch.stack([x.v_PSGD, x.v_PSGD], 2)[:, :, 0])
    odd = x.k_PSGD.new_zeros(*x.k_PSGD.shape[:3], 65)[..., :64]
    with pytest.raises(KernelInputError, match="8-bit pages are read in pairs"):
        replace(x, k_PSGD=odd, v_PSGD=odd)
