"""Tests sliding-window attention: the CPU version against the oracle, the kernel against the CPU version."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltafront.kernels.attention import block_sparse, dense
from deltafront.kernels.attention.inputs import causal_tiles
from deltafront.kernels.build import Windowed, build
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.methods import method_spec
from deltafront.tests.numerics import assert_rows_close, chunk_of, poisoned_empty, random_input, spec_of
from deltafront.tests.reference.attention import reference_attention

from .test_attention_backends import DEVICE, TYPES, mask_on_cpu, on_cpu, random_mask

WINDOWS = [1, 17, 100, 128, 129, 300, 4096]
SMALL = {"q_heads": 2, "kv_heads": 1, "head_dim": 16}


def oracle(x: AttentionInput, window: int) -> torch.Tensor:
    """Compute sliding-window attention row by row."""
    rows = []
    for row in range(x.q_BHTD.shape[2]):
        end = x.q_start + row + 1
        keys = slice(max(0, end - window), end)
        seen = x.k_BGSD[:, :, keys], x.v_BGSD[:, :, keys]
        one = AttentionInput.of(x.q_BHTD[:, :, row : row + 1], *seen, scale=x.scale)
        rows.append(reference_attention(one))
    return torch.cat(rows, dim=2)


@pytest.mark.parametrize("window", WINDOWS)
def test_window_attention_on_the_cpu_equals_the_oracle(window: int) -> None:
    whole = random_input(400, **SMALL)
    expected = oracle(whole, window)
    for start, end in ((0, 400), (0, 37), (37, 165), (128, 400), (399, 400)):
        found = dense.cpu_attend(chunk_of(whole, start, end), window)
        assert_rows_close(found, expected[:, :, start:end])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("start", "end"), [(0, 400), (37, 300), (399, 400)])
def test_window_kernel_equals_the_cpu_version(window: int, dtype: torch.dtype, start: int, end: int) -> None:
    whole = random_input(400, **SMALL | {"head_dim": 64}, dtype=dtype, device=DEVICE)
    x = chunk_of(whole, start, end)
    with poisoned_empty():
        found = dense.kernel_attend(x, window)
    assert_rows_close(found.cpu(), dense.cpu_attend(on_cpu(x), window), dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_attention_kernels_support_heads_of_256_channels(dtype: torch.dtype) -> None:
    """Tiles of such heads have 64 keys in place of 128."""
    x = random_input(300, q_heads=2, kv_heads=1, head_dim=256, dtype=dtype, device=DEVICE)
    mask, y = random_mask(x, 0.5), on_cpu(x)
    with poisoned_empty():
        plain, windows = (dense.kernel_attend(x, window) for window in (0, 100))
        listed = block_sparse.kernel_attend(x, mask)
    assert_rows_close(plain.cpu(), dense.cpu_attend(y), dtype=dtype)
    assert_rows_close(windows.cpu(), dense.cpu_attend(y, 100), dtype=dtype)
    assert_rows_close(listed.cpu(), block_sparse.cpu_attend(y, mask_on_cpu(mask)), dtype=dtype)


@pytest.mark.parametrize("window", WINDOWS)
def test_counts_causal_tiles_inside_a_window(window: int) -> None:
    whole = random_input(700, **SMALL)
    for start, end in ((0, 700), (128, 300), (384, 700)):
        x, tiles = chunk_of(whole, start, end), 0
        for row in range(start // BLOCK, -(-end // BLOCK)):
            seen = range(max(0, row * BLOCK + 1 - window), (row + 1) * BLOCK)
            tiles += len({key // BLOCK for key in seen})
        assert causal_tiles(x, window) == 2 * tiles


def test_layers_with_a_window_ignore_the_sparse_method() -> None:
    spec = method_spec("streaming", {"sink": 1, "window": 1, "min_tokens": 0})
    method = build(spec, windows={1: 40, 2: 200})
    x = random_input(500, **SMALL)
    for layer, window in ((0, None), (1, 40), (2, 200)):
        out, counts = method.attend(x, method.new_state(replace(spec_of(x), layer=layer)))
        if window is None:
            alone = build(spec)
            wanted, covered = alone.attend(x, alone.new_state(spec_of(x)))
            assert torch.equal(out, wanted) and counts.computed == covered.computed
        else:
            assert_rows_close(out, oracle(x, window))
            assert float(counts.computed) == causal_tiles(x, window) < counts.causal
    assert not isinstance(build(spec, windows={}), Windowed)
