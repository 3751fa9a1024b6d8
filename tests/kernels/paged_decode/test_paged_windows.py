"""Tests sliding-window decode attention: CPU versions against the oracle, kernels against CPU versions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.layers.kv_int8 import NOT_A_NUMBER
from deltafront.kernels.paged_decode import cpu, dispatch, launch
from deltafront.kernels.paged_decode.launch import SplitPlan
from deltafront.kernels.paged_decode.pages import PagedInput
from deltafront.tests.numerics import assert_rows_close, poisoned_empty
from deltafront.tests.reference.paged_decode import paged_attention

from .test_paged_decode import DTYPES, GPU, Shape, fp32, make
from .test_paged_decode_int8 import PRECISION, in_8_bits, wide

WINDOWS = [1, 16, 37, 100, 500]
CUT = None if GPU else SplitPlan(32, 3)
LENGTHS = [1, 37, 144, 300]


def poisoned_before(x: PagedInput) -> PagedInput:
    """Write NaN to all slots before each request's window, so that reading one would show."""
    for request, length in enumerate(x.lengths_R.tolist()):
        for place in range(length - x.window):
            page = int(x.table_RP[request, place // PAGE_TOKENS])
            for x_PSGD in (x.k_PSGD, x.v_PSGD):
                x_PSGD[page, place % PAGE_TOKENS] = NOT_A_NUMBER if x.scales else float("nan")
    return x


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("int8", [False, True])
def test_paged_window_attention_on_the_cpu_equals_the_oracle(window: int, int8: bool) -> None:
    plain = make(LENGTHS)
    x = replace(in_8_bits(plain) if int8 else plain, window=window)
    out_RHD, lse_RH = cpu.paged_attention(x)
    for request, length in enumerate(LENGTHS):
        out_HD, lse_H, _ = paged_attention(x, request, list(range(-(-length // PAGE_TOKENS))))
        assert_rows_close(out_RHD[request].cpu(), out_HD, dtype=torch.float32)
        torch.testing.assert_close(lse_RH[request].cpu().double(), lse_H, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_window_kernel_equals_the_cpu_version_and_reads_no_older_keys(
    window: int, dtype: torch.dtype, head_dim: int
) -> None:
    lengths = [8192, 4097, 300, 1] if GPU else LENGTHS
    made = make(lengths, Shape(4, 2, head_dim, dtype=dtype), sharpness=2.0)
    x = poisoned_before(replace(made, window=window))
    with poisoned_empty():
        out_RHD, lse_RH = launch.paged_attention(x, CUT)
    expected_RHD, expected_RH = cpu.paged_attention(fp32(x))
    assert_rows_close(out_RHD, expected_RHD)
    torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_int8_kernel_equals_the_cpu_version_inside_a_window(window: int, head_dim: int) -> None:
    x = replace(in_8_bits(make(LENGTHS, Shape(4, 2, head_dim, dtype=DTYPES[0]))), window=window)
    with poisoned_empty():
        out_RHD, lse_RH = launch.paged_attention(x, CUT)
    expected_RHD, expected_RH = cpu.paged_attention(wide(x))
    assert_rows_close(out_RHD, expected_RHD, dtype=DTYPES[0] if GPU else PRECISION)
    torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=1e-3)


def test_a_window_longer_than_the_request_changes_nothing() -> None:
    x = make(LENGTHS)
    args = x.q_RHD, x.k_PSGD, x.v_PSGD, x.table_RP, x.lengths_R
    whole, long, short = (dispatch.paged_attention(*args, scale=x.scale, window=n)[0] for n in (0, 300, 40))
    assert_rows_close(long, whole)
    assert_rows_close(short[:2], whole[:2])
    assert float((short[2:] - whole[2:]).abs().max()) > 0.01
