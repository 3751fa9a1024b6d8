"""Computes the largest share of attention that queries give each block of keys. A decode worker recomputes
the blocks with the largest shares (`workers/model/decoder/recompute.py`).

Logits are not stored: `_block_lse_kernel` keeps one log-sum-exp for each query row and block.

Shape suffixes: M blocks of BLOCK keys, J = H / G, X = T x J. Row x of a KV head is its query head x % J at
token x // J.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltafront.kernels.attention.flash import tile_constants
from deltafront.kernels.constants import BLOCK, LOG2E
from deltafront.kernels.interface import runs_on_cpu
from deltafront.kernels.launches import cdiv

KEYS_AT_ONCE = 1 << 17
"""Maximum number of keys that the CPU scores at once, to bound memory."""
_PROGRAMS = 528
"""Target number of programs: four for each multiprocessor of an H200."""
_LN2 = tl.constexpr(math.log(2))


def attention_by_block(q_THD: torch.Tensor, k_GSD: torch.Tensor) -> torch.Tensor:
    """Return mass_M (float32): the largest share of attention that any query gives each block in any head. No
    causal mask is applied."""
    log_sums = cpu_log_sums if runs_on_cpu(k_GSD, "attention_by_block") else kernel_log_sums
    lse_GXM = log_sums(q_THD, k_GSD)
    return (lse_GXM - lse_GXM.logsumexp(-1, keepdim=True)).amax((0, 1)).exp()


def cpu_log_sums(q_THD: torch.Tensor, k_GSD: torch.Tensor) -> torch.Tensor:
    """Return lse_GXM (float32): the log of the sum of e^logit over each block's keys."""
    groups, _, dim = k_GSD.shape
    q_TGJD = (q_THD * dim**-0.5).reshape(len(q_THD), groups, -1, dim)
    q_GXD = q_TGJD.transpose(0, 1).flatten(1, 2).to(k_GSD.dtype)
    return torch.stack(
        [
            torch.cat([_log_sums(q_XD, part_SD) for part_SD in k_SD.split(KEYS_AT_ONCE)], dim=1)
            for q_XD, k_SD in zip(q_GXD, k_GSD, strict=True)
        ]
    )


def _log_sums(q_XD: torch.Tensor, k_SD: torch.Tensor) -> torch.Tensor:
    logits_XS = F.pad((q_XD @ k_SD.T).float(), (0, -len(k_SD) % BLOCK), value=float("-inf"))
    return logits_XS.view(len(q_XD), -1, BLOCK).logsumexp(-1)


@triton.jit(do_not_specialize=["rows", "keys", "blocks", "per_program"])
def _block_lse_kernel(
    q_ptr, k_ptr, lse_ptr, stride_qt, stride_qh, stride_kg, stride_ks, rows, keys, blocks, per_program,
    scale_log2,
    J: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute lse_GMX of ROWS rows of one KV head over `per_program` blocks. The grid is (row tile, KV head,
    part of the blocks)."""
    g = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    valid_row = row < rows
    q_at = (row // J).to(tl.int64) * stride_qt + (g * J + row % J) * stride_qh
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=valid_row[:, None], other=0.0)
    k_base = k_ptr + g * stride_kg
    begin = tl.program_id(2) * per_program
    for block in range(begin, tl.minimum(begin + per_program, blocks)):
        m_i = tl.full([ROWS], float("-inf"), tl.float32)  # finite after the first part, which has a key
        l_i = tl.zeros([ROWS], tl.float32)
        for part in tl.static_range(0, BLOCK, COLS):
            key = block * BLOCK + part + tl.arange(0, COLS)
            k_at = key.to(tl.int64)[:, None] * stride_ks + dim[None, :]
            k = tl.load(k_base + k_at, mask=(key < keys)[:, None], other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            s = tl.where((key < keys)[None, :], s, float("-inf"))
            m_ij = tl.maximum(m_i, tl.max(s, 1))
            l_i = l_i * tl.exp2(m_i - m_ij) + tl.sum(tl.exp2(s - m_ij[:, None]), 1)
            m_i = m_ij
        lse = (m_i + tl.log2(l_i)) * _LN2
        tl.store(lse_ptr + (g * blocks + block) * rows + row, lse, mask=valid_row)


def kernel_log_sums(q_THD: torch.Tensor, k_GSD: torch.Tensor) -> torch.Tensor:
    """Compute `cpu_log_sums` on the GPU. The head dimension must be contiguous."""
    (tokens, heads, dim), (groups, keys, _) = q_THD.shape, k_GSD.shape
    q_THD = q_THD.to(k_GSD.dtype)
    rows, blocks = tokens * heads // groups, cdiv(keys, BLOCK)
    constants = tile_constants(q_THD[None])
    tiles = cdiv(rows, constants["ROWS"])
    per_program = cdiv(blocks, max(1, _PROGRAMS // (tiles * groups)))
    lse_GMX = torch.empty((groups, blocks, rows), dtype=torch.float32, device=k_GSD.device)
    _block_lse_kernel[(tiles, groups, cdiv(blocks, per_program))](
        q_THD,
        k_GSD,
        lse_GMX,
        *q_THD.stride()[:2],
        *k_GSD.stride()[:2],
        rows,
        keys,
        blocks,
        per_program,
        dim**-0.5 * LOG2E,
        J=heads // groups,
        **constants,
    )
    return lse_GMX.transpose(1, 2)
