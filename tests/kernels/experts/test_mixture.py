"""Tests mixtures of experts: the CPU version and the kernels against the oracle, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafront.kernels.experts.gemm import TILES, ExpertOptions, Tile, tile_for, tiles_for
from deltafront.kernels.experts.mixture import compile_mixture, cpu_mixture, kernel_mixture, mixture
from deltafront.kernels.experts.routing import Router, cpu_route, kernel_route
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.layers.fp8 import Fp8Rows, quantise_rows
from deltafront.tests.numerics import assert_rows_close, poisoned_empty
from deltafront.tests.reference import experts as reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
"""Triton's interpreter computes bfloat16 wrongly."""
SMALL = Tile(rows=16, columns=32, step_bytes=128, warps=4, stages=2, most=0)
TOKENS = 21
TWO, QWEN3 = (Router(per_token=count, normed=True) for count in (2, 8))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def logits(kind: str, experts: int, per_token: int) -> torch.Tensor:
    """Draw router logits of different kinds. A token's logits all differ."""
    logits_TE = draw(TOKENS, experts)
    if kind == "all to the last ones":
        logits_TE[:, -per_token:] += 20
    elif kind == "ragged":  # every token chooses expert 0, no token expert 1
        logits_TE[:, 0] += 20
        logits_TE[:, 1] -= 20
    return logits_TE


def weights(experts: int, hidden: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up_JC = (draw(experts * 2 * columns, hidden) * hidden**-0.5).to(dtype)
    return gate_up_JC, (draw(experts * hidden, columns) * columns**-0.5).to(dtype)


def wanted(
    x_TC: torch.Tensor, logits_TE: torch.Tensor, gate_up: Any, down: Any, router: Router
) -> torch.Tensor:
    experts = logits_TE.shape[1]
    stacked = [w.cpu().view(experts, -1, w.shape[1]) for w in (gate_up, down)]
    return reference.mixture(x_TC.cpu(), logits_TE.cpu(), *stacked, router)  # type: ignore[call-arg]


ROUTINGS = ["even", "ragged", "all to the last ones"]


def assert_routed(logits_TE: torch.Tensor, router: Router) -> None:
    """Assert that CPU version and kernel route tokens like the oracle."""
    expert_TK, share_TK = cpu_route(logits_TE, router)
    with poisoned_empty():
        routes = kernel_route(logits_TE, router)
    order, ends = routes.order_M.tolist(), routes.counts_E.cumsum(0).tolist()
    assert sorted(order) == list(range(TOKENS * router.per_token))
    found: list[dict[int, float]] = [{} for _ in range(TOKENS)]
    for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        for one in order[begin:end]:
            found[one // router.per_token][expert] = float(routes.share_M[one])
    for token, logits_E in enumerate(logits_TE.tolist()):
        shares = reference.routed(logits_E, router)
        assert found[token] == pytest.approx(shares, rel=1e-5)
        of_cpu = zip(expert_TK[token].tolist(), share_TK[token].tolist(), strict=True)
        assert dict(of_cpu) == pytest.approx(shares, rel=1e-5)


@pytest.mark.parametrize(
    ("hidden", "columns", "tile"), [(64, 32, SMALL), (72, 40, SMALL), (64, 128, TILES[1])]
)
def test_biases_and_the_clamped_activation_equal_the_oracle(hidden: int, columns: int, tile: Tile) -> None:
    """Many gates and ups are clamped."""
    x_TC, logits_TE, router = draw(TOKENS, hidden), logits("ragged", 6, 3), Router(per_token=3, normed=True)
    gate_up_JC, down_CI = weights(6, hidden, columns, torch.float32)
    options = ExpertOptions(draw(6 * 2 * columns) * 8, draw(6 * hidden), clamped=True)
    given = (x_TC, logits_TE, gate_up_JC * 8, down_CI, router)
    stacked = [one.cpu().view(6, -1, one.shape[1]) for one in given[2:4]]
    wanted_TC = reference.mixture(x_TC.cpu(), logits_TE.cpu(), *stacked, router, options)  # type: ignore[call-arg]
    assert_rows_close(cpu_mixture(*given, options).cpu().double(), wanted_TC, dtype=torch.float32, factor=2.0)
    with poisoned_empty():
        found_TC = kernel_mixture(*given, tile, options)
    assert_rows_close(found_TC.cpu().double(), wanted_TC, dtype=torch.float32, factor=2.0)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("experts", "per_token"), [(8, 2), (5, 3), (128, 8), (4, 4)])
def test_tokens_go_to_their_most_probable_experts(
    experts: int, per_token: int, kind: str, normed: bool
) -> None:
    assert_routed(logits(kind, experts, per_token), Router(per_token=per_token, normed=normed))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("experts", "per_token", "groups", "chosen_groups"),
    [(8, 2, 1, 1), (160, 8, 1, 1), (12, 3, 4, 2), (12, 5, 3, 3), (24, 4, 6, 1), (128, 8, 8, 4)],
)
def test_bias_changes_which_experts_are_chosen_but_not_their_weights(
    experts: int, per_token: int, groups: int, chosen_groups: int, normed: bool
) -> None:
    """Groups of experts are ranked by the sum of their two best experts."""
    router = Router(
        per_token=per_token,
        normed=normed,
        bias_E=draw(experts) * 0.5,
        groups=groups,
        chosen_groups=chosen_groups,
        scale=2.5,
    )
    assert_routed(logits("even", experts, per_token), router)
    assert_routed(logits("ragged", experts, per_token), replace(router, bias_E=None, scale=1.0))


@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2), (4, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_ties_between_experts_go_to_the_lowest_index(biased: bool, groups: int, chosen_groups: int) -> None:
    bias_E = torch.tensor([0.0, 0.5] * 6, device=DEVICE) if biased else None
    router = Router(per_token=5, normed=True, bias_E=bias_E, groups=groups, chosen_groups=chosen_groups)
    logits_TE = torch.randint(0, 3, (TOKENS, 12), device=DEVICE).float()
    logits_TE[0] = 0.0
    assert_routed(logits_TE, router)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    ("experts", "per_token", "hidden", "columns", "tile"),
    [(6, 2, 64, 32, SMALL), (5, 3, 72, 40, SMALL), (8, 2, 128, 64, None), (3, 2, 64, 128, TILES[1])],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixture_equals_the_oracle(
    dtype: torch.dtype, experts: int, per_token: int, hidden: int, columns: int, tile: Tile | None, kind: str
) -> None:
    """Some widths are no multiple of the tiles."""
    x_TC, logits_TE = draw(TOKENS, hidden, dtype=dtype), logits(kind, experts, per_token)
    router = Router(per_token=per_token, normed=True)
    given = (x_TC, logits_TE, *weights(experts, hidden, columns, dtype), router)
    wanted_TC = wanted(*given)
    assert_rows_close(cpu_mixture(*given).cpu().double(), wanted_TC, dtype=dtype, factor=2.0)
    with poisoned_empty():
        found_TC = kernel_mixture(*given, tile)
    assert found_TC.dtype == dtype
    assert_rows_close(found_TC.cpu().double(), wanted_TC, dtype=dtype, factor=2.0)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 16, 200, 1000, 4096])
def test_qwen3_mixture_equals_float32_gemms_expert_by_expert(tokens: int, quantise: bool) -> None:
    """The kernels run directly and in a CUDA graph."""
    x_TC, logits_TE = draw(tokens, 2048, dtype=torch.bfloat16), draw(tokens, 128)
    given: list[Any] = list(weights(128, 2048, 768, torch.bfloat16))
    if quantise:
        given = [quantise_rows(weight) for weight in given]
    wide = [w.dequantised(torch.float32) if isinstance(w, Fp8Rows) else w.float() for w in given]
    wanted_TC = cpu_mixture(x_TC.float(), logits_TE, *wide, QWEN3)  # type: ignore[call-arg]
    kernel_mixture(x_TC, logits_TE, *given, QWEN3)  # type: ignore[call-arg]  # compiles
    with poisoned_empty():
        found_TC = kernel_mixture(x_TC, logits_TE, *given, QWEN3)  # type: ignore[call-arg]
    error_T = (found_TC.float() - wanted_TC).norm(dim=1) / wanted_TC.norm(dim=1)
    assert float(error_T.max()) < (0.08 if quantise else 0.01)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again_TC = kernel_mixture(x_TC, logits_TE, *given, QWEN3)  # type: ignore[call-arg]
    x_TC.copy_(x_TC.flip(0))
    logits_TE.copy_(logits_TE.flip(0))
    graph.replay()
    assert torch.equal(again_TC.flip(0), found_TC), "a token's sum depends on its place"


@pytest.mark.parametrize("kind", ROUTINGS)
def test_fp8_experts_stay_within_quantisation_error(kind: str) -> None:
    """Weights and inputs are quantised to e4m3. Outputs stay close to those of the unquantised mixture."""
    x_TC, logits_TE = draw(TOKENS, 64, dtype=torch.float16), logits(kind, 6, 2)
    gate_up, down = (quantise_rows(weight) for weight in weights(6, 64, 32, torch.float16))
    wide = [weight.dequantised(torch.float32) for weight in (gate_up, down)]
    wanted_TC = wanted(x_TC, logits_TE, *wide, TWO)  # type: ignore[call-arg]
    found_TC = cpu_mixture(x_TC, logits_TE, gate_up, down, TWO).cpu().double()
    error_T = (found_TC - wanted_TC).norm(dim=1) / wanted_TC.norm(dim=1)
    assert 1e-4 < float(error_T.max()) < 0.08


@pytest.mark.parametrize("groups", [1, 3])
def test_nan_in_one_row_leaves_other_rows_unchanged(groups: int) -> None:
    x_TC, logits_TE = draw(TOKENS, 64), draw(TOKENS, 6)
    given, bias_E = weights(6, 64, 32, torch.float32), None if groups == 1 else draw(6)
    router = Router(per_token=3, normed=True, bias_E=bias_E, groups=groups, chosen_groups=groups - 1 or 1)
    clean_TC = kernel_mixture(x_TC, logits_TE, *given, router, SMALL)
    x_TC[3], logits_TE[3] = float("nan"), float("nan")
    assert kernel_route(logits_TE, router).counts_E.sum() == 3 * TOKENS
    found_TC = kernel_mixture(x_TC, logits_TE, *given, router, SMALL)
    others = [row for row in range(TOKENS) if row != 3]
    assert found_TC[3].isnan().all()
    # The interpreter uses numpy's GEMM, which on some CPUs depends on a row's position.
    tolerance = 0.0 if GPU else 1e-6
    torch.testing.assert_close(found_TC[others], clean_TC[others], rtol=tolerance, atol=tolerance)


def test_mixture_refuses_shapes_and_dtypes_that_do_not_match() -> None:
    x_TC, logits_TE = draw(4, 64), draw(4, 6)
    gate_up_JC, down_CI = weights(6, 64, 32, torch.float32)
    assert mixture(x_TC, logits_TE, gate_up_JC, down_CI, TWO).shape == (4, 64)
    with pytest.raises(KernelInputError, match="7 of"):
        mixture(x_TC, logits_TE, gate_up_JC, down_CI, replace(TWO, per_token=7))
    with pytest.raises(KernelInputError, match="for 4 tokens"):
        mixture(x_TC, logits_TE, gate_up_JC, down_CI, replace(TWO, per_token=5, groups=3, chosen_groups=2))
    with pytest.raises(KernelInputError, match="4 groups of 6"):
        mixture(x_TC, logits_TE, gate_up_JC, down_CI, replace(TWO, per_token=1, groups=4, chosen_groups=2))
    with pytest.raises(KernelInputError, match="for 4 tokens"):
        mixture(x_TC, logits_TE[:3], gate_up_JC, down_CI, TWO)
    with pytest.raises(KernelInputError, match="6 experts of 64 and 32 channels"):
        mixture(x_TC, logits_TE, gate_up_JC[:-1], down_CI, TWO)
    with pytest.raises(KernelInputError, match="float16"):
        mixture(x_TC.half(), logits_TE, gate_up_JC, down_CI, TWO)
    with pytest.raises(KernelInputError, match="contiguous"):
        mixture(x_TC, logits_TE, gate_up_JC, down_CI.T.contiguous().T, TWO)


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 16), (16, 16), (256, 16), (512, 64), (1024, 64), (4096, 128), (16_384, 128)]
)
def test_chooses_larger_tiles_for_more_rows_per_expert(tokens: int, rows: int) -> None:
    assert tile_for(tokens * 8, 128, torch.bfloat16).rows == rows


def test_compiles_no_mixture_kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    name = "deltafront.kernels.experts.mixture.kernel_mixture"
    monkeypatch.setattr(name, lambda *given: launched.append(given) or given[0])
    compile_mixture(6, *weights(6, 64, 32, torch.float32), TWO, torch.float32)
    assert len(launched) == (len(tiles_for(torch.float32)) if GPU else 0)
