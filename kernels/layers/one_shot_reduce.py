"""Sums and maxima over the GPUs of one host, for tensors so small that latency is all of their time.

Each GPU writes its numbers into every other's memory, raises a flag there, and adds up what it was sent
("one-shot"; FlashInfer and TensorRT-LLM have the like). All GPUs add in one order, so all get the same bits.

A program's place in the others' memory has two halves, used in turn. A half is written again two calls
later: by then the other GPU has raised its flag of the call between, so it has ended the call before. It may
be a call ahead, so a flag says the number of its last call.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024
ROOM = 1024 * _BLOCK
"""Most numbers of one call."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["numbers"])
def one_shot_reduce_kernel(
    x_ptr, out_ptr, calls_ptr, places_ptr, flags_ptr, numbers,
    RANK: tl.constexpr, RANKS: tl.constexpr, MAXIMUM: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """places_ptr, flags_ptr: addresses of every rank's memory, by rank. calls_ptr: calls so far of each
    program."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    call = tl.load(calls_ptr + program) + 1
    # In bytes, so that a program has one place for numbers of any size.
    half = ((call & 1) * RANKS * ROOM + program * BLOCK) * 4
    lane = tl.arange(0, BLOCK)
    for other in tl.static_range(RANKS):
        if other != RANK:
            theirs = tl.load(places_ptr + other) + half + RANK * ROOM * 4
            tl.store(theirs.to(tl.pointer_type(x_ptr.dtype.element_ty)) + lane, x, mask=inside)
    tl.debug_barrier()  # all threads have written before one raises the flags
    for other in tl.static_range(RANKS):
        if other != RANK:
            flag = tl.load(flags_ptr + other).to(tl.pointer_type(tl.int32)) + RANK * (ROOM // BLOCK) + program
            tl.atomic_xchg(flag, call, sem="release", scope="sys")
    ours = tl.load(places_ptr + RANK) + half
    own_flags = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32))
    acc = tl.full([BLOCK], float("-inf"), tl.float32) if MAXIMUM else tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        if other == RANK:
            part = x.to(tl.float32)
        else:
            flag = own_flags + other * (ROOM // BLOCK) + program
            while tl.atomic_cas(flag, call, call, sem="acquire", scope="sys") - call < 0:
                pass
            place = (ours + other * ROOM * 4).to(tl.pointer_type(x_ptr.dtype.element_ty)) + lane
            part = tl.load(place, mask=inside, other=0.0, volatile=True).to(tl.float32)
        acc = tl.maximum(acc, part) if MAXIMUM else acc + part
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(calls_ptr + program, call)


def own_memory(ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places and the flags that the other ranks write to, for each to map."""
    places = torch.zeros(2 * ranks * ROOM, dtype=torch.float32, device=device)
    return places, torch.zeros(ranks * (ROOM // _BLOCK), dtype=torch.int32, device=device)


class OneShotReduce:
    """Reduces over ranks that all make the same calls in the same order.

    Args:
        memory: Every rank's `own_memory`, as mapped here, by rank.
    """

    def __init__(self, rank: int, memory: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._rank, self._memory = rank, memory
        device = memory[rank][0].device
        self._places, self._flags = (
            torch.tensor([each[n].data_ptr() for each in memory], dtype=torch.int64, device=device)
            for n in range(2)
        )
        self._calls = torch.zeros(ROOM // _BLOCK, dtype=torch.int32, device=device)

    def takes(self, x: torch.Tensor) -> bool:
        return x.dtype in _DTYPES and 0 < x.numel() <= ROOM

    def __call__(self, x: torch.Tensor, maximum: bool) -> torch.Tensor:
        """Return the sum over ranks, or the maximum. x: contiguous, and `takes` it."""
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
