"""One-shot all-reduce (sum or max) over the GPUs of one host, for tensors so small that only latency counts.

Each GPU writes its numbers into every other GPU's memory, sets a flag in that memory, and adds up the numbers
that it received ("one-shot", as in FlashInfer and TensorRT-LLM). All GPUs add in one order, so all get the
same bits.

Each program has a double buffer in every other GPU's memory and alternates between the halves. It reuses a
half two calls later. By then the other GPU has set its flag for the call in between, so it has already read
the half. A GPU may be one call ahead of another, so a flag holds the number of the sender's last call.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from deltafront.kernels.launches import next_power_of_2
from deltafront.kernels.layers.fp8 import empty_rows, row_warps, store_fp8_row
from deltafront.kernels.layers.norm import LinearInput

_BLOCK = 1024
ROOM = 1024 * _BLOCK
"""Maximum number of elements in one call."""
_WIDEST = 8192
"""Maximum number of channels in a row. One program holds a row."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _send(
    x, inside, call, place, program, places_ptr, flags_ptr,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    for other in tl.static_range(RANKS):
        if other != RANK:
            theirs = tl.load(places_ptr + other) + place + RANK * ROOM * 4
            tl.store(theirs.to(tl.pointer_type(x.dtype)) + lane, x, mask=inside)
    tl.debug_barrier()  # wait until all threads have written, then raise the flags
    for other in tl.static_range(RANKS):
        if other != RANK:
            flag = tl.load(flags_ptr + other).to(tl.pointer_type(tl.int32)) + RANK * (ROOM // 1024) + program
            tl.atomic_xchg(flag, call, sem="release", scope="sys")


@triton.jit
def _receive(
    x, inside, call, place, program, places_ptr, flags_ptr, other,
    RANK: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    flag = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + other * (ROOM // 1024) + program
    while tl.atomic_cas(flag, call, call, sem="acquire", scope="sys") - call < 0:
        pass
    theirs = (tl.load(places_ptr + RANK) + place + other * ROOM * 4).to(tl.pointer_type(x.dtype))
    return tl.load(theirs + tl.arange(0, BLOCK), mask=inside, other=0.0, volatile=True).to(tl.float32)


@triton.jit(do_not_specialize=["numbers"])
def one_shot_reduce_kernel(
    x_ptr, out_ptr, calls_ptr, places_ptr, flags_ptr, numbers,
    RANK: tl.constexpr, RANKS: tl.constexpr, MAXIMUM: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce BLOCK numbers over ranks.

    places_ptr, flags_ptr: addresses of every rank's buffers and flags, by rank. calls_ptr: number of calls
    so far, by program.
    """
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    call = tl.load(calls_ptr + program) + 1
    # Offsets are in bytes of the widest dtype, so that a program has one place for every dtype.
    place = ((call & 1) * RANKS * ROOM + program * BLOCK) * 4
    _send(x, inside, call, place, program, places_ptr, flags_ptr, RANK, RANKS, ROOM, BLOCK)
    acc = tl.full([BLOCK], float("-inf"), tl.float32) if MAXIMUM else tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        if other == RANK:
            part = x.to(tl.float32)
        else:
            part = _receive(x, inside, call, place, program, places_ptr, flags_ptr, other, RANK, ROOM, BLOCK)
        acc = tl.maximum(acc, part) if MAXIMUM else acc + part
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(calls_ptr + program, call)


@triton.jit
def one_shot_add_norm_kernel(
    hidden_ptr, update_ptr, weight_ptr, sum_ptr, normed_ptr, scale_ptr, calls_ptr, places_ptr, flags_ptr, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr,
    FP8: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All-reduce the update, then add it to hidden and apply RMSNorm as `add_norm_kernel` does. One program
    per row."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    at = row.to(tl.int64) * COLUMNS + column
    update = tl.load(update_ptr + at, mask=inside, other=0.0)
    call = tl.load(calls_ptr + row) + 1
    place = ((call & 1) * RANKS * ROOM + row * BLOCK) * 4
    _send(update, inside, call, place, row, places_ptr, flags_ptr, RANK, RANKS, ROOM, BLOCK)
    hidden = tl.load(hidden_ptr + at, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        if other == RANK:
            acc += update.to(tl.float32)
        else:
            acc += _receive(update, inside, call, place, row, places_ptr, flags_ptr, other, RANK, ROOM, BLOCK)
    acc = acc.to(hidden.dtype).to(tl.float32)  # rounded as `one_shot_reduce_kernel` rounds it
    x = (hidden.to(tl.float32) + acc).to(hidden.dtype)
    tl.store(sum_ptr + at, x, mask=inside)
    x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / COLUMNS + eps) * weight
    if FP8:
        store_fp8_row(normed, normed_ptr, scale_ptr, row.to(tl.int64), column, inside, COLUMNS)
    else:
        tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)
    tl.store(calls_ptr + row, call)


def own_memory(ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the buffers and flags that other ranks map and write to."""
    places = torch.zeros(2 * ranks * ROOM, dtype=torch.float32, device=device)
    return places, torch.zeros(ranks * (ROOM // _BLOCK), dtype=torch.int32, device=device)


class _OneShot:
    """Base of `OneShotReduce` and `OneShotAddNorm`. All ranks make the same calls in the same order.

    Args:
        memory: The `own_memory` of every rank, by rank, mapped into this process.
    """

    def __init__(self, rank: int, memory: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._rank, self._memory = rank, memory
        device = memory[rank][0].device
        self._places, self._flags = (
            torch.tensor([each[n].data_ptr() for each in memory], dtype=torch.int64, device=device)
            for n in range(2)
        )
        self._calls = torch.zeros(ROOM // _BLOCK, dtype=torch.int32, device=device)


class OneShotReduce(_OneShot):
    def takes(self, x: torch.Tensor) -> bool:
        return x.dtype in _DTYPES and 0 < x.numel() <= ROOM

    def __call__(self, x: torch.Tensor, maximum: bool) -> torch.Tensor:
        """Return the sum over ranks, or the maximum. x must be contiguous and satisfy `takes`."""
        out = torch.empty_like(x)
        one_shot_reduce_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
            x,
            out,
            self._calls,
            self._places,
            self._flags,
            x.numel(),
            RANK=self._rank,
            RANKS=len(self._memory),
            MAXIMUM=maximum,
            ROOM=ROOM,
            BLOCK=_BLOCK,
        )
        return out


class OneShotAddNorm(_OneShot):
    """All-reduces the update and computes `add_norm`, in one launch instead of two. It must not share memory
    with a `OneShotReduce`, because the two kernels use different offsets."""

    def takes(self, update_TC: torch.Tensor) -> bool:
        rows, width = update_TC.shape
        fits = next_power_of_2(width) <= _WIDEST and 0 < rows * next_power_of_2(width) <= ROOM
        return update_TC.dtype in _DTYPES and fits

    def __call__(
        self,
        hidden_TC: torch.Tensor,
        update_TC: torch.Tensor,
        weight_C: torch.Tensor,
        eps: float,
        fp8: bool,
    ) -> tuple[torch.Tensor, LinearInput]:
        """Compute `norm.add_norm` with the sum of all ranks' updates.

        update_TC: This rank's addend, contiguous as hidden_TC is. The addend must satisfy `takes`.
        """
        rows, width = update_TC.shape
        quantised = empty_rows(rows, width, hidden_TC.device) if fp8 else None
        sum_TC = torch.empty_like(hidden_TC)
        normed_TC = torch.empty_like(hidden_TC) if quantised is None else quantised.values_TI
        block = next_power_of_2(width)
        one_shot_add_norm_kernel[(rows,)](
            hidden_TC,
            update_TC,
            weight_C,
            sum_TC,
            normed_TC,
            normed_TC if quantised is None else quantised.scale_T1,
            self._calls,
            self._places,
            self._flags,
            eps,
            RANK=self._rank,
            RANKS=len(self._memory),
            ROOM=ROOM,
            FP8=fp8,
            COLUMNS=width,
            BLOCK=block,
            num_warps=row_warps(block),
        )
        return sum_TC, normed_TC if quantised is None else quantised
