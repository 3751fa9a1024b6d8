"""Tests the Δ correction against the oracle, in any chunks, and its kernels against the CPU versions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from deltafront.kernels.build import build
from deltafront.kernels.correction import (
    Correction,
    cpu_add_differences,
    cpu_dense_rows,
    kernel_add_differences,
    kernel_dense_rows,
)
from deltafront.kernels.interface import (
    AttentionInput,
    KernelInputError,
    Phase,
    StateSpec,
    TileCounts,
    no_phase,
)
from deltafront.kernels.methods import method_spec
from deltafront.tests.numerics import (
    assert_rows_close,
    chunk_of,
    poisoned_empty,
    random_input,
    spec_of,
)
from deltafront.tests.reference.attention import corrected, reference_attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]


class Noise:
    """A bad method: dense attention plus noise that depends only on the position."""

    def __init__(self, whole: AttentionInput) -> None:
        generator = torch.Generator().manual_seed(9)
        self.out_BHTD = reference_attention(whole) + torch.randn(whole.q_BHTD.shape, generator=generator)

    def new_state(self, spec: StateSpec) -> None:
        del spec

    def attend(
        self, x: AttentionInput, state: None, phase: Phase = no_phase
    ) -> tuple[torch.Tensor, TileCounts]:
        rows = slice(x.q_start, x.q_start + x.q_BHTD.shape[2])
        return self.out_BHTD[:, :, rows].clone(), TileCounts(torch.zeros((), dtype=torch.float64), 1, 0.0)


def in_chunks(method: Correction, x: AttentionInput, cuts: list[int]) -> torch.Tensor:
    state = method.new_state(spec_of(x))
    edges = [0, *cuts, x.q_BHTD.shape[2]]
    parts = [method.attend(chunk_of(x, a, b), state)[0] for a, b in pairwise(edges)]
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("gamma", [1, 48, 64, 200])
@pytest.mark.parametrize("tokens", [640, 600])
@pytest.mark.parametrize("spread", [1, 0.25, 0])
def test_correction_equals_the_oracle_however_a_prompt_is_chunked(
    tokens: int, gamma: int, spread: float
) -> None:
    x = random_input(tokens, q_heads=3, kv_heads=1, head_dim=16)
    noise = Noise(x)
    method = Correction(noise, gamma, spread=spread)
    expected = corrected(x, noise.out_BHTD, gamma, spread=spread)
    for cuts in ([], [128], [256, 384, 512]):
        assert_rows_close(in_chunks(method, x, cuts), expected)


def test_corrects_prompts_below_two_blocks_to_dense_attention() -> None:
    for tokens in (1, 127, 128, 255):
        x = random_input(tokens, head_dim=16)
        method = Correction(Noise(x), 64)
        assert_rows_close(in_chunks(method, x, []), reference_attention(x))


def test_correcting_dense_attention_changes_nothing() -> None:
    x = random_input(500, q_heads=4, kv_heads=2)
    method = build(method_spec("dense+delta", {"gamma": 48}))
    out, counts = method.attend(x, method.new_state(spec_of(x)))
    assert_rows_close(out, reference_attention(x))
    dense_rows = [row for row in range(500) if row >= 256 or row % 48 == 0]
    extra = 4 * sum(row // 128 + 1 for row in dense_rows) / 128
    assert float(counts.computed) == pytest.approx(counts.causal + extra)


@pytest.mark.usefixtures("split_keys")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "first", "gamma", "tail"),
    [(600, 600, 0, 64, 384), (700, 188, 30, 48, 188), (513, 129, 5, 200, 100), (400, 144, 3, 64, 3)],
)
def test_correction_kernels_equal_the_cpu_versions(
    dtype: torch.dtype, tokens: int, rows: int, first: int, gamma: int, tail: int
) -> None:
    x = random_input(tokens, rows=rows, q_heads=2, kv_heads=1, dtype=dtype, device=DEVICE)
    y = AttentionInput.of(*(t.float().cpu() for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD)))
    with poisoned_empty():
        found = kernel_dense_rows(x, first, gamma, tail)
    expected = cpu_dense_rows(y, first, gamma, tail)
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.shape == wanted.shape
        if wanted.numel():
            assert_rows_close(ours.cpu(), wanted, dtype=dtype)
    out = torch.randn(y.q_BHTD.shape)
    carried = torch.randn(1, 2, 64)
    theirs = out.clone()
    mine = out.to(DEVICE)
    if expected[0].shape[2]:
        wanted_carry = cpu_add_differences(theirs[:, :, :tail], expected[0], carried, first, gamma)
        dense = expected[0].to(DEVICE)
        carry = kernel_add_differences(mine[:, :, :tail], dense, carried.to(DEVICE), first, gamma)
        assert_rows_close(mine.cpu(), theirs)
        assert_rows_close(carry.cpu(), wanted_carry)


def test_rows_before_the_first_dense_row_use_the_carried_difference() -> None:
    out = torch.zeros(1, 1, 10, 4)
    carried = torch.full((1, 1, 4), 3.0)
    cpu_add_differences(out, torch.ones(1, 1, 1, 4), carried, 6, 64)
    assert out[0, 0, :, 0].tolist() == [3.0] * 6 + [1.0] * 4


def test_correction_refuses_a_gamma_below_one() -> None:
    x = random_input(128)
    with pytest.raises(KernelInputError, match="gamma"):
        Correction(Noise(x), 0)


def test_corrects_a_wrong_head_without_changing_other_heads() -> None:
    """A constant error in one head is corrected exactly, and the other head stays as it was."""
    x = random_input(512, q_heads=2, kv_heads=1, head_dim=16)
    noise = Noise(x)
    noise.out_BHTD = reference_attention(x)
    noise.out_BHTD[:, 1] += 5.0
    found = in_chunks(Correction(noise, 64), replace(x), [256])
    assert_rows_close(found, reference_attention(x))
