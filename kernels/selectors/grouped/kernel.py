"""Computes XAttention's scores between groups of `step` rows, on the GPU.

Shape suffixes: I, J query and key groups, F = step x D, X query groups and Y key groups of a tile, W key
blocks of a tile.

The logit of groups i and j is the sum over u < step of q[step i + u] . k[step j + step-1-u]: one dot product
of length F of packed groups. The kernel is bound by reads from L2, so 16-bit inputs are converted to FP8.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from deltafront.kernels.anchor_scan import check_head_dim
from deltafront.kernels.constants import BLOCK, LOG2E
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.launches import strides
from deltafront.kernels.selectors.rules.kernel import fast_log2, in_16_bits
from deltafront.kernels.selectors.rules.sums import empty_parts

_TILE_X, _TILE_Y = 128, 256


@triton.jit(do_not_specialize=["rows"])
def _pack_kernel(
    x_ptr, out_ptr, stride_xb, stride_xg, stride_xs, x_heads, rows, padded_I,
    D: tl.constexpr, STEP: tl.constexpr, REVERSED: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Concatenate each group's rows, clamped to +-LIMIT, with zeros after the last row."""
    lane = tl.program_id(1).to(tl.int64)
    x_ptr += lane // x_heads * stride_xb + lane % x_heads * stride_xg
    place_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_R = place_R
    if REVERSED:
        row_R = place_R // STEP * STEP + STEP - 1 - place_R % STEP
    column_D = tl.arange(0, D)
    x_RD = tl.load(
        x_ptr + row_R[:, None].to(tl.int64) * stride_xs + column_D[None, :],
        mask=(row_R < rows)[:, None],
        other=0.0,
    )
    x_RD = tl.minimum(tl.maximum(x_RD.to(tl.float32), -LIMIT), LIMIT)
    place_RD = (lane * padded_I * STEP + place_R[:, None]) * D + column_D[None, :]
    tl.store(out_ptr + place_RD, x_RD.to(out_ptr.dtype.element_ty), mask=(place_R < padded_I * STEP)[:, None])


@triton.jit(do_not_specialize=["rows", "q_start", "groups_I"])
def _own_kernel(
    q_ptr, k_ptr, own_ptr, stride_qb, stride_qh, stride_qt, stride_kb, stride_kg, stride_ks, heads, group,
    rows, q_start, groups_I, scale_log2,
    D: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    group_I = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // group * stride_kg
    column_D = tl.arange(0, D)
    sum_I = tl.zeros((ROWS,), tl.float32)
    for slot in range(STEP // 2, STEP):
        row_I = group_I * STEP + slot
        valid_I1 = (row_I < rows)[:, None]
        key_I = q_start + group_I * STEP + STEP - 1 - slot
        q_ID = tl.load(
            q_ptr + row_I[:, None].to(tl.int64) * stride_qt + column_D[None, :], mask=valid_I1, other=0.0
        )
        k_ID = tl.load(
            k_ptr + key_I[:, None].to(tl.int64) * stride_ks + column_D[None, :], mask=valid_I1, other=0.0
        )
        sum_I += tl.sum(q_ID.to(tl.float32) * k_ID.to(tl.float32), axis=1)
    pairs_I = tl.minimum(tl.maximum(rows - group_I * STEP - STEP // 2, 0), STEP - STEP // 2)
    own_I = tl.where(pairs_I > 0, sum_I * scale_log2 / tl.maximum(pairs_I, 1), float("-inf"))
    tl.store(own_ptr + tl.program_id(1).to(tl.int64) * groups_I + group_I, own_I, mask=group_I < groups_I)


def packed(x_BGSD: torch.Tensor, step: int, multiple: int, *, reverse: bool) -> torch.Tensor:
    batch, heads, rows, dim = x_BGSD.shape
    check_head_dim(dim)
    padded = triton.cdiv(triton.cdiv(rows, step), multiple) * multiple
    dtype = torch.float8_e4m3fn if x_BGSD.element_size() == 2 else x_BGSD.dtype
    out_XF = torch.empty((batch * heads * padded, step * dim), dtype=dtype, device=x_BGSD.device)
    _pack_kernel[(triton.cdiv(padded * step, 64), batch * heads)](
        x_BGSD,
        out_XF,
        *strides(x_BGSD),
        heads,
        rows,
        padded,
        D=dim,
        STEP=step,
        REVERSED=reverse,
        LIMIT=torch.finfo(dtype).max,
        ROWS=64,
        num_warps=4,
    )
    return out_XF


def packed_keys(k_BGSD: torch.Tensor, step: int) -> torch.Tensor:
    """Concatenate the rows of each of k's groups in reverse order: (lanes x padded groups, step x D)."""
    return packed(k_BGSD, step, _TILE_Y, reverse=True)


def own_logits(x: AttentionInput, step: int) -> torch.Tensor:
    """Compute each query group's logit with the key group at the same positions, over causal pairs of rows
    only: float32 own_BHI, times log2 e. -inf: no causal pair exists."""
    batch, heads, rows, dim = x.q_BHTD.shape
    check_head_dim(dim)
    row_groups = x.query_blocks * (BLOCK // step)
    own_BHI = torch.empty((batch, heads, row_groups), dtype=torch.float32, device=x.q_BHTD.device)
    sizes = (heads, x.group, rows, x.q_start, row_groups)
    _own_kernel[(triton.cdiv(row_groups, 32), batch * heads)](
        x.q_BHTD,
        x.k_BGSD,
        own_BHI,
        *strides(x.q_BHTD, x.k_BGSD),
        *sizes,
        x.scale * LOG2E,
        D=dim,
        STEP=step,
        ROWS=32,
        num_warps=4,
    )
    return own_BHI


@triton.jit(do_not_specialize=["rows", "own_groups", "start_group", "first_group", "last_group"])
def _grouped_kernel(
    q_desc, k_desc, own_ptr, out_ptr, stride_ob, stride_oh, stride_oi, heads, group, rows, padded_I,
    padded_J, own_groups, start_group, first_group, last_group, scale_log2,
    STEP: tl.constexpr, PER_BLOCK: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, X: tl.constexpr,
    Y: tl.constexpr, STAGES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Compute log2 sums of a tile of X query groups over the causal key groups of each key block.

    The slab is q's groups first_group .. last_group-1; q begins at the prompt's group start_group. own_ptr:
    `own_logits`.
    """
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # long rows first
    lane = tl.program_id(0)
    batch = lane // heads
    head = lane % heads
    W: tl.constexpr = Y // PER_BLOCK
    group_X = first_group + tile * X + tl.arange(0, X)
    absolute_X = start_group + group_X
    valid_X = group_X < last_group
    filled_X = tl.minimum(tl.maximum(rows - group_X * STEP, 0), STEP)
    factor_X = scale_log2 / tl.maximum(filled_X, 1)
    own_X = tl.load(own_ptr + lane.to(tl.int64) * own_groups + group_X, mask=valid_X, other=float("-inf"))
    own_X = own_X / factor_X
    q_row = lane * padded_I + tile * X
    k_row = (batch * (heads // group) + head // group) * padded_J
    column_Y = tl.arange(0, Y)
    block_W = tl.arange(0, W)
    out_X = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_X += (group_X - first_group).to(tl.int64) * stride_oi
    end = (tl.minimum(first_group + tile * X + X, last_group) - 1 + start_group) // PER_BLOCK + 1
    for block in tl.range(0, end, W, flatten=FLATTEN):
        score_XY = tl.zeros((X, Y), tl.float32)
        for part in tl.range(0, F, BF, num_stages=STAGES):
            q_XF = q_desc.load([q_row, part])
            k_YF = k_desc.load([k_row + block * PER_BLOCK, part])
            score_XY = tl.dot(q_XF, tl.trans(k_YF), score_XY, input_precision="ieee")
        group_Y = block * PER_BLOCK + column_Y
        if (block + W) * PER_BLOCK > start_group + first_group + tile * X:
            score_XY = tl.where(group_Y[None, :] == absolute_X[:, None], own_X[:, None], score_XY)
            score_XY = tl.where(group_Y[None, :] <= absolute_X[:, None], score_XY, float("-inf"))
        score_XWP = tl.reshape(score_XY, (X, W, PER_BLOCK))
        m_XW = tl.max(score_XWP, axis=2)
        base_XW = tl.where(m_XW == float("-inf"), 0.0, m_XW * factor_X[:, None])
        p_XWP = tl.exp2(score_XWP * factor_X[:, None, None] - base_XW[:, :, None])
        lse_XW = base_XW + fast_log2(tl.sum(p_XWP, axis=2))
        lse_XW = tl.where((filled_X > 0)[:, None], lse_XW, float("-inf"))
        tl.store(
            out_X[:, None] + (block + block_W[None, :]),
            in_16_bits(lse_XW),
            mask=valid_X[:, None] & (block + block_W[None, :] < end),
        )


def log_sums(
    x: AttentionInput, k_XF: torch.Tensor, own_BHI: torch.Tensor, step: int, first_row: int, blocks: int
) -> torch.Tensor:
    """Compute log2 of the sum of e^logit for each query group and key block, for N = `blocks` query blocks
    from `first_row` on.

    Args:
        k_XF: `packed_keys` of x.
        own_BHI: `own_logits` of x.

    Returns:
        part_BHNRM, fp16. R: groups per block. M: key blocks up to the last query block.
    """
    per_block = BLOCK // step
    batch, heads, rows, _ = x.q_BHTD.shape
    lanes = batch * heads
    slab = x.q_BHTD[:, :, first_row * BLOCK : (first_row + blocks) * BLOCK]
    q_XF = packed(slab, step, _TILE_X, reverse=False)
    columns = x.first_block + first_row + blocks
    part = empty_parts(q_XF, (batch, heads, blocks, per_block), columns)
    width = q_XF.shape[1]
    per_load = min(width, 128 // q_XF.element_size())
    padded = (q_XF.shape[0] // lanes, k_XF.shape[0] // (lanes // x.group))
    slab_groups = (first_row * per_block, (first_row + blocks) * per_block)
    _grouped_kernel[(lanes, triton.cdiv(blocks * per_block, _TILE_X))](
        TensorDescriptor.from_tensor(q_XF, [_TILE_X, per_load]),
        TensorDescriptor.from_tensor(k_XF, [_TILE_Y, per_load]),
        own_BHI,
        part,
        *part.stride()[:2],
        part.stride(3),
        heads,
        x.group,
        rows,
        *padded,
        own_BHI.shape[2],
        x.q_start // step,
        *slab_groups,
        x.scale * LOG2E,
        STEP=step,
        PER_BLOCK=per_block,
        F=width,
        BF=per_load,
        X=_TILE_X,
        Y=_TILE_Y,
        STAGES=3,
        FLATTEN=True,
        num_warps=8,
    )
    return part
