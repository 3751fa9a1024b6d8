"""Tests attention sinks: each backend against the oracle, and kernels against the CPU versions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.kernels.attention import block_sparse, dense
from deltafront.kernels.attention.packed import delta_kv, delta_xattention, delta_xattention_kernel
from deltafront.kernels.attention.packed.delta_kv import CHUNK
from deltafront.kernels.attention.packed.runs import PackedRuns
from deltafront.kernels.attention.sinks import with_sinks
from deltafront.kernels.build import build
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.correction import cpu_dense_rows, kernel_dense_rows
from deltafront.kernels.interface import AttentionInput, KernelInputError
from deltafront.kernels.methods import method_spec
from deltafront.tests.numerics import assert_rows_close, full_mask, poisoned_empty, random_input, spec_of
from deltafront.tests.reference.attention import reference_attention

from .test_attention_backends import DEVICE, TYPES, mask_on_cpu, random_mask, state_on_cpu, with_runs

TOKENS = 600


def input_with_sinks(dtype: torch.dtype = torch.float32, device: str = "cpu") -> AttentionInput:
    """The sinks take between almost nothing and almost everything. The first channel of v is 1, so an
    output's first channel is the share that its sink leaves."""
    x = with_runs(random_input(TOKENS, q_heads=4, kv_heads=2, dtype=dtype, device=device))
    x.v_BGSD[..., 0] = 1.0
    return replace(x, sink_H=torch.tensor([-5.0, 1.0, 5.0, 9.0], device=device, dtype=dtype))


def on_cpu(x: AttentionInput) -> AttentionInput:
    sink_H = None if x.sink_H is None else x.sink_H.cpu()
    return AttentionInput.of(*(t.cpu() for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD)), sink_H=sink_H)


def oracle(x: AttentionInput, window: int = 0) -> torch.Tensor:
    """Compute attention with the sinks as one more column of scores, in float64."""
    k_BHSD, v_BHSD = (side.double().repeat_interleave(x.group, 1) for side in (x.k_BGSD, x.v_BGSD))
    scores_BHTS = x.q_BHTD.double() @ k_BHSD.mT * x.scale
    place_T = torch.arange(x.k_BGSD.shape[2])
    unseen_TS = place_T > place_T[:, None]
    if window:
        unseen_TS |= place_T <= place_T[:, None] - window
    assert x.sink_H is not None
    sink_BHT1 = x.sink_H.double()[:, None, None].expand(*scores_BHTS.shape[:3], 1)
    scores_BHTS = torch.cat([scores_BHTS.masked_fill(unseen_TS, float("-inf")), sink_BHT1], dim=3)
    return (scores_BHTS.softmax(3)[..., :-1] @ v_BHSD).float()


@pytest.mark.parametrize("window", [0, 100, 128])
def test_dense_attention_with_sinks_equals_the_oracle(window: int) -> None:
    x = input_with_sinks()
    assert_rows_close(dense.cpu_attend(x, window), oracle(x, window))
    if not window:
        assert_rows_close(block_sparse.cpu_attend(x, full_mask(x)), oracle(x))


def test_sinks_leave_the_share_of_the_output_that_lse_says() -> None:
    x = input_with_sinks()
    scores_BHTS = x.q_BHTD @ x.k_BGSD.repeat_interleave(2, 1).mT * x.scale
    lse_BHT = scores_BHTS.masked_fill(~torch.ones(TOKENS, TOKENS).tril().bool(), float("-inf")).logsumexp(3)
    assert x.sink_H is not None
    found = with_sinks(reference_attention(replace(x, sink_H=None)), lse_BHT, x.sink_H[:, None])
    assert_rows_close(found, oracle(x))


@pytest.mark.parametrize("values", [{"spread": 1.0}, {"spread": 0.25}, {"spread": 0.0}])
def test_correction_of_dense_attention_keeps_its_sinks(values: dict[str, Any]) -> None:
    """Dense and sparse rows both have the sinks before their difference is taken."""
    x = input_with_sinks()
    method = build(method_spec("dense+delta", {"gamma": 48, **values}))
    assert_rows_close(method.attend(x, method.new_state(spec_of(x)))[0], oracle(x))


@pytest.mark.parametrize("name", ["xattention", "dpxa", "delta_kv"])
def test_sinks_scale_all_channels_of_a_sparse_row_alike(name: str) -> None:
    x = input_with_sinks()
    with_, without = (one.attend(y, one.new_state(spec_of(y)))[0] for one, y in _pairs(name, x))
    assert float(with_[:, 3, BLOCK:, 0].max()) < 0.5 < float(with_[:, 0, BLOCK:, 0].min())
    assert_rows_close(with_, without * with_[..., :1])


def _pairs(name: str, x: AttentionInput) -> list[tuple[Any, AttentionInput]]:
    spec = method_spec(name, {"min_tokens": 0} if name == "dpxa" else {})
    return [(build(spec), x), (build(spec), replace(x, sink_H=None))]


@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_with_sinks_equal_the_cpu_versions(dtype: torch.dtype) -> None:
    x = input_with_sinks(dtype, DEVICE)
    mask, y = random_mask(x, 0.5), on_cpu(x)
    with poisoned_empty():
        plain, windows = (dense.kernel_attend(x, window) for window in (0, 128))
        listed = block_sparse.kernel_attend(x, mask)
        rows = kernel_dense_rows(x, 0, 64, 384)
    assert_rows_close(plain.cpu(), dense.cpu_attend(y), dtype=dtype)
    assert_rows_close(windows.cpu(), dense.cpu_attend(y, 128), dtype=dtype)
    assert_rows_close(listed.cpu(), block_sparse.cpu_attend(y, mask_on_cpu(mask)), dtype=dtype)
    for found, expected in zip(rows, cpu_dense_rows(y, 0, 64, 384), strict=True):
        assert_rows_close(found.cpu(), expected, dtype=dtype)


def test_packed_kernels_with_sinks_equal_the_cpu_versions() -> None:
    x = input_with_sinks(device=DEVICE)
    y, mask, state, blocks = on_cpu(x), random_mask(x, 0.5), runs_of(x, CHUNK), runs_of(x, BLOCK)
    exact_BHNM = delta_xattention_kernel.kernel_exact_table(mask, 0.3)
    with poisoned_empty():
        packed = delta_kv.kernel_attend(x, state, critical=128, means=True)
        mixed = delta_xattention_kernel.kernel_attend(x, mask, blocks, exact_BHNM, means=True)
    expected = delta_kv.cpu_attend(y, state_on_cpu(state), critical=128, means=True)
    assert_rows_close(packed.cpu(), expected)
    table = delta_xattention.cpu_exact_table(mask_on_cpu(mask), 0.3)
    expected = delta_xattention.cpu_attend(y, mask_on_cpu(mask), state_on_cpu(blocks), table, means=True)
    assert_rows_close(mixed.cpu(), expected)


def runs_of(x: AttentionInput, chunk: int) -> PackedRuns:
    state = PackedRuns.empty(spec_of(x), chunk)
    state.extend(x.k_BGSD, chunk, 0.8)
    return state


def test_refuses_sinks_of_another_number_of_heads() -> None:
    x = input_with_sinks()
    with pytest.raises(KernelInputError, match="sinks"):
        AttentionInput.of(x.q_BHTD, x.k_BGSD, x.v_BGSD, sink_H=torch.zeros(3))
