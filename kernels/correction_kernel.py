"""The Δ correction's steps on the GPU. R dense rows; other suffixes as in `interface.py`.

A strided row tile is an ordinary one of a view of q whose row stride is gamma times as long: 128 rows of a
tile span 128 * gamma positions, and the causal limit is taken row by row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .executors.launch import QueryRows, launch
from .interface import AttentionInput


@triton.jit(do_not_specialize=["rows", "differences", "first", "gamma"])
def add_kernel(
    out_ptr, difference_ptr, stride_ob, stride_oh, stride_ot, heads, rows, differences, first, gamma,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head: add the difference of the last dense row at or before each."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owner = (row - first + gamma) // gamma  # 0: carried from the chunk before (first < gamma)
    dim = tl.arange(0, D)
    inside = (row < rows)[:, None]
    place = out_ptr + b * stride_ob + h * stride_oh + row.to(tl.int64)[:, None] * stride_ot + dim[None, :]
    from_ptr = (
        difference_ptr + (tl.program_id(1).to(tl.int64) * differences + owner)[:, None] * D + dim[None, :]
    )
    out = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.load(from_ptr, mask=inside, other=0.0)
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)


def kernel_dense_rows(
    x: AttentionInput, first: int, gamma: int, tail: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `correction.cpu_dense_rows`."""
    made = []
    for rows, row0, step in ((slice(first, tail, gamma), first, gamma), (slice(tail, None), tail, 1)):
        q_BHRD = x.q_BHTD[:, :, rows]
        out_BHRD = torch.empty(q_BHRD.shape, dtype=q_BHRD.dtype, device=q_BHRD.device)
        made.append(QueryRows(q_BHRD, out_BHRD, x.q_start + row0, step))
    present = [rows for rows in made if rows.q_BHRD.shape[2] > 0]
    if present:
        launch(x, *present)
    return made[0].out_BHRD, made[1].out_BHRD


def kernel_add_differences(
    out_BHTD: torch.Tensor, dense_BHRD: torch.Tensor, carried_BHD: torch.Tensor, first: int, gamma: int
) -> torch.Tensor:
    """See `correction.cpu_add_differences`."""
    batch, heads, rows, dim = out_BHTD.shape
    sparse_BHRD = out_BHTD[:, :, first::gamma].float()
    difference_BHRD = torch.cat([carried_BHD[:, :, None], dense_BHRD.float() - sparse_BHRD], dim=2)
    size = 64
    add_kernel[(triton.cdiv(rows, size), batch * heads)](
        out_BHTD,
        difference_BHRD,
        *out_BHTD.stride()[:3],
        heads,
        rows,
        difference_BHRD.shape[2],
        first,
        gamma,
        D=dim,
        ROWS=size,
        num_warps=4,
    )
    return difference_BHRD[:, :, -1].clone()


_NUMBERS = ("stride_ob", "stride_oh", "stride_ot", "heads", "rows", "differences", "first", "gamma")
_TYPES = {"out_ptr": "*bf16", "difference_ptr": "*fp32", **dict.fromkeys(_NUMBERS, "i32")}

COMPILE_CASES = [(add_kernel, _TYPES, {"D": 128, "ROWS": 64})]
"""What tests/kernels compiles for sm_90: function, types of its arguments, constants."""
