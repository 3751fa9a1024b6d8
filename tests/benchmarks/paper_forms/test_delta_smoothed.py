"""Tests the Δ correction with smoothed differences against the oracle (Δ Attention, appendix J)."""

from __future__ import annotations

import pytest
import torch

from deltafront.benchmarks.paper_forms.delta_smoothed import filtered
from deltafront.benchmarks.paper_forms.oracle import smoothed_rows
from deltafront.kernels.build import build
from deltafront.kernels.interface import Attention, AttentionInput, KernelInputError, StateSpec
from deltafront.kernels.methods import load, method_spec
from deltafront.tests.numerics import assert_rows_close, chunk_of, random_input
from deltafront.tests.reference.attention import reference_attention

load("deltafront.benchmarks.paper_forms.methods")

FORMS: dict[str, dict[str, float]] = {
    "the correction itself": {},
    "interpolation": {"linear": 1},
    "EMA": {"alpha": 0.5},
    "filter": {"alpha": 0.2, "beta": 0.05, "acceleration": 0.0035},
}


def method(name: str, **options: float) -> Attention:
    return build(method_spec(name, {"window": 200, "min_tokens": 0, **options}))


def read(x: AttentionInput, attention: Attention) -> tuple[torch.Tensor, float]:
    batch, heads, tokens, dim = x.q_BHTD.shape
    spec = StateSpec(batch, heads, x.k_BGSD.shape[1], dim, tokens, x.q_BHTD.device, x.q_BHTD.dtype)
    out_BHTD, covered = attention.attend(x, attention.new_state(spec))
    return out_BHTD, float(covered.computed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gamma", [1, 16, 48])
def test_smoothed_correction_equals_the_oracle(form: str, gamma: int) -> None:
    x = random_input(900, q_heads=4, kv_heads=2, head_dim=16)
    found, _ = read(x, method("streaming_smoothed", gamma=gamma, **FORMS[form]))
    sparse, _ = read(x, method("streaming"))
    dense = reference_attention(x)
    tail = (900 // 128 - 1) * 128
    given = FORMS[form]
    numbers = given.get("alpha", 1.0), given.get("beta", 0.0), given.get("acceleration", 0.0)
    for h in range(4):
        expected = smoothed_rows(
            sparse[0, h, :tail], dense[0, h, :tail], gamma, linear=bool(given.get("linear")), numbers=numbers
        )
        assert_rows_close(found[:, h, :tail], expected[None])
    assert_rows_close(found[:, :, tail:], dense[:, :, tail:])


def test_output_without_smoothing_equals_the_delta_correction() -> None:
    x = random_input(900, q_heads=4, kv_heads=2, head_dim=16)
    found, computed = read(x, method("streaming_smoothed", gamma=16))
    expected, tiles = read(x, method("streaming+delta", gamma=16))
    assert_rows_close(found, expected)
    assert computed == pytest.approx(tiles)


@pytest.mark.parametrize("tokens, first", [(900, 896), (896, 832)])
def test_dense_tail_leaves_a_multiple_of_gamma_rows(tokens: int, first: int) -> None:
    x = random_input(tokens, q_heads=2, kv_heads=1, head_dim=16)
    found, computed = read(x, method("streaming_smoothed", gamma=64, paper_end=1))
    usual, more = read(x, method("streaming_smoothed", gamma=64))
    begin = (tokens // 128 - 1) * 128
    assert_rows_close(found[:, :, :begin], usual[:, :, :begin])
    assert not torch.allclose(found[:, :, begin:first], usual[:, :, begin:first], atol=1e-3)
    assert_rows_close(found[:, :, first:], reference_attention(x)[:, :, first:])
    rows = [row for row in range(begin, first) if row % 64]
    assert more - computed == pytest.approx(2 * sum(row // 128 + 1 for row in rows) / 128)


def test_smoothing_leaves_equal_differences_unchanged() -> None:
    difference_BHRD = torch.ones(1, 2, 5, 4)
    for numbers in ((0.5, 0.0, 0.0), (0.2, 0.05, 0.0035)):
        found = filtered(difference_BHRD, 8, 37, *numbers)
        assert found.shape == (1, 2, 37, 4)
        torch.testing.assert_close(found, torch.ones_like(found))


def test_refuses_a_chunk_of_a_prompt() -> None:
    x = random_input(900, q_heads=2, kv_heads=1, head_dim=16)
    with pytest.raises(KernelInputError, match="whole prompt"):
        read(chunk_of(x, 0, 512), method("streaming_smoothed"))
