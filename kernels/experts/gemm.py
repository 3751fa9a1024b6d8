"""Grouped GEMM: multiplies each row with its expert's matrix.

A tile covers rows of one expert and some output columns. The grid has the maximum number of tiles that any
routing needs. Each program finds its expert from the counts on the device, so the host does not wait for the
counts.

Shape suffixes: M assignments, E experts, I input width, O output width, R rows and C columns of a tile, D a
step along the inputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from deltafront.kernels.experts.routing import Routes
from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2
from deltafront.kernels.layers.fp8 import Fp8Rows
from deltafront.kernels.layers.norm import LinearInput


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch options.

    Attributes:
        step_bytes: Bytes of a row that one step along the input width multiplies.
        most: Largest mean number of rows per expert at which this tile is used.
    """

    rows: int
    columns: int
    step_bytes: int
    warps: int
    stages: int
    most: float


TILES = (
    Tile(rows=16, columns=32, step_bytes=256, warps=4, stages=5, most=16),
    Tile(rows=64, columns=128, step_bytes=128, warps=4, stages=4, most=96),
    Tile(rows=128, columns=128, step_bytes=128, warps=8, stages=4, most=float("inf")),
)
"""Tiles for decode, for short prefill chunks and for long ones."""
_WIDE = (*TILES[:1], Tile(rows=32, columns=32, step_bytes=128, warps=4, stages=2, most=float("inf")))
"""Tiles for float32, which tensor cores do not multiply."""


LIMIT, STEEP = 7.0, 1.702
"""Constants of gpt-oss's activation, `mixture.clamped_swiglu`."""
_LIMIT, _STEEP = tl.constexpr(LIMIT), tl.constexpr(STEEP)


@dataclass(frozen=True)
class ExpertOptions:
    """The parts of experts that only some families have.

    Attributes:
        gate_up_bias, down_bias: All experts' biases, in the order of the matrices' rows. None: no biases.
        clamped: The activation is `mixture.clamped_swiglu` instead of SiLU(gate) · up.
    """

    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    clamped: bool = False


PLAIN = ExpertOptions()


@triton.jit
def experts_kernel(  # noqa: PLR0915
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, order_ptr, counts_ptr, share_ptr, bias_ptr,
    out_ptr, GATED: tl.constexpr, CLAMPED: tl.constexpr, FP8: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute one tile. With GATED, compute SiLU(gate) · up (with CLAMPED, `mixture.clamped_swiglu`) of rows
    in token order and write rows sorted by expert. Otherwise read rows sorted by expert and write rows in
    token order, times their routing weights. bias_ptr None: experts have no biases.
    """
    ACROSS: tl.constexpr = (COLUMNS + COLUMNS_TILE - 1) // COLUMNS_TILE
    block = tl.program_id(0) // ACROSS
    expert_E = tl.arange(0, EXPERTS_BLOCK)
    counts_E = tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0)
    blocks_E = (counts_E + ROWS_TILE - 1) // ROWS_TILE
    expert = tl.sum((tl.cumsum(blocks_E, 0) <= block).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    earlier_E = expert_E < expert
    begin = tl.sum(tl.where(earlier_E, counts_E, 0), 0)
    end = begin + tl.sum(tl.where(expert_E == expert, counts_E, 0), 0)
    place_R = begin + (block - tl.sum(tl.where(earlier_E, blocks_E, 0), 0)) * ROWS_TILE
    place_R = place_R + tl.arange(0, ROWS_TILE)
    inside_R = place_R < end
    order_R = tl.load(order_ptr + place_R, mask=inside_R, other=0)
    from_R = (order_R // PER_TOKEN if GATED else place_R).to(tl.int64)

    column_C = (tl.program_id(0) % ACROSS) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    inside_C = column_C < COLUMNS
    step_D = tl.arange(0, STEP)
    OUTPUTS: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    row_C = expert.to(tl.int64) * OUTPUTS + column_C
    x_at = x_ptr + from_R[:, None] * WIDTH + step_D[None, :]
    weight_at = weight_ptr + row_C[None, :] * WIDTH + step_D[:, None]
    acc_RC = tl.zeros([ROWS_TILE, COLUMNS_TILE], tl.float32)
    up_RC = tl.zeros([ROWS_TILE, COLUMNS_TILE], tl.float32)
    for begins in range(0, WIDTH, STEP):
        inside_RD, inside_DC = inside_R[:, None], inside_C[None, :]
        if not EVEN:
            inside_D = begins + step_D < WIDTH
            inside_RD = inside_R[:, None] & inside_D[None, :]
            inside_DC = inside_C[None, :] & inside_D[:, None]
        x_RD = tl.load(x_at + begins, mask=inside_RD, other=0.0)
        acc_RC = tl.dot(x_RD, _weights(weight_at + begins, inside_DC, EVEN), acc_RC, input_precision="ieee")
        if GATED:
            up_DC = _weights(weight_at + COLUMNS * WIDTH + begins, inside_DC, EVEN)
            up_RC = tl.dot(x_RD, up_DC, up_RC, input_precision="ieee")
    if FP8:
        scale_R = tl.load(x_scale_ptr + from_R, mask=inside_R, other=0.0)[:, None]
        acc_RC *= scale_R * tl.load(weight_scale_ptr + row_C, mask=inside_C, other=0.0)[None, :]
        if GATED:
            up_RC *= scale_R * tl.load(weight_scale_ptr + COLUMNS + row_C, mask=inside_C, other=0.0)[None, :]
    if bias_ptr is not None:
        acc_RC += tl.load(bias_ptr + row_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_RC += tl.load(bias_ptr + COLUMNS + row_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if CLAMPED:
            acc_RC = tl.minimum(acc_RC, _LIMIT)
            up_RC = tl.minimum(tl.maximum(up_RC, -_LIMIT), _LIMIT) + 1.0
            acc_RC = acc_RC / (1.0 + tl.exp(acc_RC * -_STEEP)) * up_RC
        else:
            acc_RC = acc_RC / (1.0 + tl.exp(-acc_RC)) * up_RC
        to_R = place_R.to(tl.int64)
    else:
        acc_RC *= tl.load(share_ptr + order_R, mask=inside_R, other=0.0)[:, None]
        to_R = order_R.to(tl.int64)
    out_at = out_ptr + to_R[:, None] * COLUMNS + column_C[None, :]
    tl.store(out_at, acc_RC.to(out_ptr.dtype.element_ty), mask=inside_R[:, None] & inside_C[None, :])


@triton.jit
def _weights(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


_product = Launcher(experts_kernel)


def tiles_for(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the candidate tiles for weights of this dtype."""
    return _WIDE if dtype == torch.float32 else TILES


def tile_for(assignments: int, experts: int, dtype: torch.dtype) -> Tile:
    return next(tile for tile in tiles_for(dtype) if assignments <= tile.most * experts)


def kernel_gemm(
    x: LinearInput,
    weight: LinearInput,
    routes: Routes,
    per_token: int,
    dtype: torch.dtype,
    *,
    gated: bool,
    tile: Tile | None = None,
    options: ExpertOptions = PLAIN,
) -> torch.Tensor:
    """Multiply each assignment's row with its expert's matrix.

    Args:
        x: If gated, one row per token; otherwise one per assignment, sorted by expert.
        weight: All experts' matrices, stacked by rows. If gated, each is gate and then up.
        dtype: The outputs' type.
        tile: None: chosen by the mean number of rows per expert.

    Returns:
        If gated, the activation's output, sorted by expert. Otherwise outputs times routing weights, in token
        order.
    """
    experts, assignments = len(routes.counts_E), len(routes.order_M)
    x_values, x_scale = _parts(x)
    values, scale = _parts(weight)
    width, columns = values.shape[1], len(values) // experts // (2 if gated else 1)
    tile = tile or tile_for(assignments, experts, values.dtype)
    step = tile.step_bytes // values.element_size()
    blocks = min(assignments, cdiv(assignments, tile.rows) + experts)
    out = torch.empty((assignments, columns), dtype=dtype, device=values.device)
    constants: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    _product[(blocks * cdiv(columns, tile.columns),)](
        x_values.contiguous(),
        x_scale,
        values,
        scale,
        routes.order_M,
        routes.counts_E,
        routes.share_M,
        options.gate_up_bias if gated else options.down_bias,
        out,
        GATED=gated,
        CLAMPED=gated and options.clamped,
        FP8=isinstance(weight, Fp8Rows),
        EXPERTS=experts,
        EXPERTS_BLOCK=next_power_of_2(experts),
        PER_TOKEN=per_token,
        WIDTH=width,
        COLUMNS=columns,
        EVEN=not (width % step or columns % tile.columns),
        ROWS_TILE=tile.rows,
        COLUMNS_TILE=tile.columns,
        STEP=step,
        **constants,
    )
    return out


def _parts(x: LinearInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 values and scales of x. If x is not quantised, return x in both places, because the
    kernel then reads no scales."""
    return (x.values_TI, x.scale_T1) if isinstance(x, Fp8Rows) else (x, x)
