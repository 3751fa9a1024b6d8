"""Tests the int8 KV cache against oracles: quantisation, RoPE with a quantised write, and gather."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.layers import kv_int8, rope
from deltafront.kernels.layers.kv_int8 import Scales
from deltafront.tests.numerics import assert_rows_close, poisoned_empty
from deltafront.tests.reference import kv_int8 as reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float32, torch.float16]
POISON = 77
"""A scale byte that no test writes, to detect rows that were not to be written."""


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def both(x: torch.Tensor, y: torch.Tensor) -> Scales:
    return Scales(x, y)


@given(st.lists(st.floats(-2e5, 2e5, width=32), min_size=1, max_size=24))
def test_quantised_kv_rows_equal_the_oracle(row: list[float]) -> None:
    numbers, scale = kv_int8.quantise(torch.tensor(row))
    wanted, byte = reference.quantised(torch.tensor([row]))
    assert int(scale) == int(byte[0])
    back = kv_int8.dequantise(numbers, scale, torch.float32)
    if scale == kv_int8.NOT_A_NUMBER:
        assert bool(back.isnan().all())
        return
    assert torch.equal(back.double(), reference.row_of(numbers, scale))
    steps = torch.tensor(row).double() / reference.scale_of(int(scale))
    assert numbers.tolist() == wanted[0].tolist()
    assert bool(((numbers.double() - 128 - steps).abs() < 0.5001).all()) and int(numbers.min()) > 0


@pytest.mark.parametrize(
    "largest", [2.0**-126, 1e-30, 2.0**-13, 1.0, 447.0, 65504.0, 121_920.0, 122_000.0, 3e38]
)
def test_quantisation_error_is_small_relative_to_the_rows_maximum(largest: float) -> None:
    """An error is at most half a step. A step is at most 9/8 of the row's maximum / 127, or 2^-20."""
    x = torch.tensor([largest, -largest / 3, 0.0, largest / 1000])
    back = kv_int8.dequantise(*kv_int8.quantise(x), torch.float32)
    if largest > 121_920:
        assert bool(back.isnan().all())
    else:
        assert bool(((back - x).abs() <= max(1.13 * largest / 127, 2.0**-20) / 2).all())


def test_rows_with_nan_or_infinity_dequantise_to_nan() -> None:
    x = torch.tensor([[1.0, math.inf], [math.nan, 2.0], [0.0, -0.0]])
    back = kv_int8.dequantise(*kv_int8.quantise(x), torch.float32)
    assert back.isnan().all(1).tolist() == [True, True, False]
    assert not back[2].any()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x400000])
def test_every_nan_bit_pattern_quantises_to_the_nan_scale(bits: int) -> None:
    x = torch.tensor([[0, bits]], dtype=torch.int32).view(torch.float32)
    assert int(kv_int8.quantise(x)[1]) == kv_int8.NOT_A_NUMBER


def test_zeroed_memory_dequantises_to_zeros() -> None:
    zeros = torch.zeros(3, dtype=torch.uint8)
    assert not kv_int8.dequantise(zeros, zeros[0], torch.float32).any()


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle_T1F = torch.rand(tokens, 1, half) * 6
    return angle_T1F.cos().to(DEVICE), angle_T1F.sin().to(DEVICE)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(2, 2, 64), (9, 3, 64), (4, 1, 128), (16, 2, 64), (3, 1, 24)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_writes_the_same_int8_pages_as_quantising_16_bit_pages(
    dtype: torch.dtype, q_heads: int, kv_heads: int, dim: int, norms: bool
) -> None:
    """Other rows of the pages stay as they were. On a GPU the last bit may differ, because the compiler fuses
    multiplications differently. In bfloat16 that is up to half a step of a large channel."""
    bits = int(torch.cuda.is_available())
    tokens = 5
    cos_T1F, sin_T1F = angles(tokens, dim // 2)
    size = torch.logspace(-3, 2, tokens, device=DEVICE)[:, None, None]
    qkv_TXD = (draw(tokens, q_heads + 2 * kv_heads, dim) * size).to(dtype)
    qkv_TXD[2, q_heads:] = 0
    head_norm = None
    if norms:
        head_norm = rope.HeadNorm(1 + 0.3 * draw(q_heads + kv_heads, dim, dtype=dtype), 1e-5)
    rows_T = torch.tensor([7, 3, 4, 0, 9], device=DEVICE)
    for function in (rope.cpu_rotate_and_store, rope.kernel_rotate_and_store):
        k_RGD, v_RGD = (torch.zeros(12, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in "kv")
        plain = rope.KVRows(k_RGD, v_RGD, rows_T)
        q_THD = function(qkv_TXD.clone(), cos_T1F, sin_T1F, head_norm, plain)
        bytes_k, bytes_v = (
            torch.full((12, kv_heads, dim), POISON, dtype=torch.uint8, device=DEVICE) for _ in "kv"
        )
        scales = both(*(torch.full((12, kv_heads), POISON, dtype=torch.uint8, device=DEVICE) for _ in "kv"))
        narrow = rope.KVRows(bytes_k, bytes_v, rows_T, scales)
        q_narrow_THD = function(qkv_TXD.clone(), cos_T1F, sin_T1F, head_norm, narrow)
        assert torch.allclose(q_narrow_THD, q_THD, rtol=bits * 2 * torch.finfo(dtype).eps, atol=bits * 1e-6)
        others = torch.ones(12, dtype=torch.bool, device=DEVICE).index_fill(0, rows_T, False)
        for found, scale, source in (
            (bytes_k, scales.k, k_RGD),
            (bytes_v, scales.v, v_RGD),
        ):
            written = kv_int8.dequantise(found[rows_T], scale[rows_T], torch.float32)
            step = kv_int8.dequantise(torch.full_like(found[rows_T], 129), scale[rows_T], torch.float32)
            assert bool(((written - source[rows_T].float()).abs() <= step).all())
            wanted, byte = reference.quantised(source[rows_T].cpu())
            off = (scale[rows_T].cpu().int() - byte.int()).abs()
            steps = (found[rows_T].cpu().int() - wanted.int()).abs()[off == 0]
            assert off.max() <= bits and off.float().mean() <= 0.1 * bits
            assert steps.max() <= bits and steps.float().mean() <= 0.05 * bits
            assert bool((found[others] == POISON).all() and (scale[others] == POISON).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_write_kernel_stores_a_row_with_infinity_as_nan(bad: float) -> None:
    qkv_TXD = draw(1, 3, 64)
    qkv_TXD[0, 2, 5] = bad
    k_RGD, v_RGD = (torch.zeros(1, 1, 64, dtype=torch.uint8, device=DEVICE) for _ in "kv")
    scales = both(*(torch.zeros(1, 1, dtype=torch.uint8, device=DEVICE) for _ in "kv"))
    rows_T = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    rope.kernel_rotate_and_store(qkv_TXD, *angles(1, 32), None, rope.KVRows(k_RGD, v_RGD, rows_T, scales))
    for gathered in (kv_int8.gather, kv_int8.kernel_gather):
        k_GSD, v_GSD = gathered((k_RGD, v_RGD), scales, rows_T, torch.float32)
        assert bool(k_GSD.isfinite().all()) and bool(v_GSD.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "dim", "tokens"), [(1, 64, 1), (3, 64, 33), (2, 24, 16), (8, 128, 5)])
def test_gather_dequantises_the_requested_rows(
    dtype: torch.dtype, kv_heads: int, dim: int, tokens: int
) -> None:
    rows = 50
    (k_RGD, k_RG), (v_RGD, v_RG) = (
        kv_int8.quantise(
            draw(rows, kv_heads, dim) * torch.logspace(-2, 2, rows, device=DEVICE)[:, None, None]
        )
        for _ in "kv"
    )
    rows_S = torch.randperm(rows)[:tokens].to(DEVICE)
    for gathered in (kv_int8.gather, kv_int8.kernel_gather):
        with poisoned_empty():
            sides = gathered((k_RGD, v_RGD), both(k_RG, v_RG), rows_S, dtype)
        for found_GSD, x_RGD, x_RG in zip(sides, (k_RGD, v_RGD), (k_RG, v_RG), strict=True):
            assert found_GSD.is_contiguous() and found_GSD.dtype == dtype
            for s, row in enumerate(rows_S.tolist()):
                for g in range(kv_heads):
                    wanted = reference.row_of(x_RGD[row, g].cpu(), x_RG[row, g].cpu())
                    assert torch.equal(found_GSD[g, s].cpu(), wanted.to(dtype))


def test_dequantised_rows_are_close_to_the_original_rows() -> None:
    x = draw(100, 2, 128)
    back = kv_int8.dequantise(*kv_int8.quantise(x), torch.float32)
    assert_rows_close(back, x, dtype=torch.bfloat16, factor=3)


def test_refuses_int8_tensors_with_wrong_dtypes_or_shapes() -> None:
    rows, scales = torch.zeros(9, 1, 8, dtype=torch.uint8), torch.zeros(9, 1, dtype=torch.uint8)
    rows_T = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelInputError, match=r"k: an 8-bit KV cache is uint8 .* not torch.float32"):
        kv_int8.gather((rows.float(), rows), both(scales, scales), rows_T, torch.float32)
    with pytest.raises(KernelInputError, match=r"v: an 8-bit KV cache .* with torch.uint8 \(3, 1\)"):
        kv_int8.gather((rows, rows), both(scales, scales[:3]), rows_T, torch.float32)
    with pytest.raises(KernelInputError, match="must be contiguous and alike"):
        kv_int8.gather((rows, rows[..., ::2]), both(scales, scales), rows_T, torch.float32)
    qkv_TXD, cos_T1F = torch.zeros(2, 4, 8), torch.zeros(2, 1, 4)
    with pytest.raises(KernelInputError, match="rotate_and_store: v: an 8-bit KV cache"):
        kv = rope.KVRows(rows, rows, rows_T, both(scales, scales.int()))
        rope.rotate_and_store(qkv_TXD, cos_T1F, cos_T1F, None, kv)
