"""An MLP that is a mixture of experts (Shazeer et al. 2017, section 2; SwiGLU experts as Jiang et al. 2024).

Shape suffixes: T tokens, C hidden size, E experts, K experts of a token, M = T K, I an expert's width,
J = 2 I.
"""

import torch
import torch.nn.functional as F

from deltafront.kernels.experts.gemm import LIMIT, PLAIN, STEEP, ExpertOptions, Tile, kernel_gemm, tiles_for
from deltafront.kernels.experts.routing import Router, cpu_route, kernel_route
from deltafront.kernels.interface import KernelInputError, runs_on_cpu
from deltafront.kernels.layers.fp8 import Fp8Rows, quantise_rows
from deltafront.kernels.layers.norm import LinearInput
from deltafront.kernels.layers.rows import check_rows


def mixture(
    x_TC: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up: LinearInput,
    down: LinearInput,
    router: Router,
    tile: Tile | None = None,
    options: ExpertOptions = PLAIN,
) -> torch.Tensor:
    """Compute each token's MLP output: the sum of its experts' outputs times their routing weights.

    Routing weights are float32. If the weights are quantised, the inputs are quantised, too.

    Args:
        gate_up: [E J, C], the gate and up matrices of all experts, stacked.
        down: [E C, I], the down matrices of all experts, stacked.
        tile: None: chosen by the number of tokens. CPUs ignore it.

    Raises:
        KernelInputError: Widths, dtypes or numbers of experts do not fit together.
    """
    _check(x_TC, logits_TE, gate_up, down, router)
    if runs_on_cpu(x_TC, "mixture"):
        return cpu_mixture(x_TC, logits_TE, gate_up, down, router, options)
    return kernel_mixture(x_TC, logits_TE, gate_up, down, router, tile, options)


def compile_mixture(
    experts: int,
    gate_up: LinearInput,
    down: LinearInput,
    router: Router,
    dtype: torch.dtype,
    options: ExpertOptions = PLAIN,
) -> None:
    """Compile the kernels that `mixture` launches with these weights, for every number of tokens.

    Args:
        dtype: The activations' dtype.
    """
    values = down.values_TI if isinstance(down, Fp8Rows) else down
    if not values.is_cuda:
        return
    x_TC = torch.zeros((1, len(values) // experts), dtype=dtype, device=values.device)
    of_logits = dtype if router.bias_E is None else torch.float32
    logits_TE = torch.zeros((1, experts), dtype=of_logits, device=values.device)
    for tile in tiles_for(values.dtype):
        mixture(x_TC, logits_TE, gate_up, down, router, tile, options)


def cpu_mixture(
    x_TC: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up: LinearInput,
    down: LinearInput,
    router: Router,
    options: ExpertOptions = PLAIN,
) -> torch.Tensor:
    expert_TK, share_TK = cpu_route(logits_TE, router)
    x, experts = _input(x_TC, gate_up), logits_TE.shape[1]
    sum_TC = torch.zeros_like(x_TC, dtype=torch.float32)
    for expert in sorted({*expert_TK.flatten().tolist()}):
        token_R, slot_R = (expert_TK == expert).nonzero(as_tuple=True)
        gate_up_JC, down_CI = (_of_expert(rows, expert, experts) for rows in (gate_up, down))
        bias_J, bias_C = (
            None if bias is None else bias.view(experts, -1)[expert].to(gate_up_JC.dtype)
            for bias in (options.gate_up_bias, options.down_bias)
        )
        gate_RI, up_RI = F.linear(_plain(x)[token_R], gate_up_JC, bias_J).chunk(2, dim=-1)
        active_RI = clamped_swiglu(gate_RI, up_RI) if options.clamped else F.silu(gate_RI) * up_RI
        active = _input(active_RI.to(x_TC.dtype), down)
        update_RC = F.linear(_plain(active), down_CI, bias_C).float()
        sum_TC.index_add_(0, token_R, update_RC * share_TK[token_R, slot_R, None])
    return sum_TC.to(x_TC.dtype)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute gate · sigmoid(1.702 gate) · (up + 1), gate at most 7, up between -7 and 7 (gpt-oss)."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(STEEP * gate))


def kernel_mixture(
    x_TC: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up: LinearInput,
    down: LinearInput,
    router: Router,
    tile: Tile | None = None,
    options: ExpertOptions = PLAIN,
) -> torch.Tensor:
    routes, per_token = kernel_route(logits_TE, router), router.per_token
    x, dtype = _input(x_TC, gate_up), x_TC.dtype
    active_MI = kernel_gemm(x, gate_up, routes, per_token, dtype, gated=True, tile=tile, options=options)
    active = _input(active_MI, down)
    out_MC = kernel_gemm(active, down, routes, per_token, dtype, gated=False, tile=tile, options=options)
    return out_MC.view(-1, per_token, x_TC.shape[1]).sum(1)


def _input(x_TI: torch.Tensor, weight: LinearInput) -> LinearInput:
    return quantise_rows(x_TI) if isinstance(weight, Fp8Rows) else x_TI


def _of_expert(weight: LinearInput, expert: int, experts: int) -> torch.Tensor:
    if not isinstance(weight, Fp8Rows):
        return weight.view(experts, -1, weight.shape[1])[expert]
    rows = slice(expert * (size := len(weight.values_TI) // experts), (expert + 1) * size)
    return Fp8Rows(weight.values_TI[rows], weight.scale_T1[rows]).dequantised(torch.float32)


def _plain(x: LinearInput) -> torch.Tensor:
    return x.dequantised(torch.float32) if isinstance(x, Fp8Rows) else x


def _check(
    x_TC: torch.Tensor, logits_TE: torch.Tensor, gate_up: LinearInput, down: LinearInput, router: Router
) -> None:
    check_rows("mixture", x=x_TC)
    (tokens, hidden), experts = x_TC.shape, logits_TE.shape[-1]
    first, second = (w.values_TI if isinstance(w, Fp8Rows) else w for w in (gate_up, down))
    columns = second.shape[-1]
    size = experts // router.groups
    most = experts if router.groups == 1 else size * router.chosen_groups
    if logits_TE.shape != (tokens, experts) or not 1 <= router.per_token <= most:
        raise KernelInputError(
            f"mixture: {router.per_token} of {tuple(logits_TE.shape)} experts for {tokens} tokens"
        )
    if experts % router.groups or (router.groups > 1 and size < 2):
        raise KernelInputError(f"mixture: {router.groups} groups of {experts} experts")
    if first.shape != (2 * experts * columns, hidden) or second.shape != (experts * hidden, columns):
        raise KernelInputError(
            f"mixture: {experts} experts of {hidden} and {columns} channels cannot be "
            f"{tuple(first.shape)} and {tuple(second.shape)}"
        )
    if first.dtype != second.dtype or (x_TC.dtype != first.dtype and not isinstance(gate_up, Fp8Rows)):
        raise KernelInputError(f"mixture: x is {x_TC.dtype}, experts are {first.dtype} and {second.dtype}")
    if not (first.is_contiguous() and second.is_contiguous()):
        raise KernelInputError("mixture: experts' matrices must be contiguous")
