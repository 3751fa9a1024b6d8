"""Writes a decode step's tokens to host memory. Shape suffixes: R rows of the batch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.launches import Launcher, cdiv

_ROWS = 128
"""Rows of one program."""


def choices_to_host(ids_R: torch.Tensor, logprob_R: torch.Tensor, host_R2: torch.Tensor) -> None:
    """Write each row's token id and log-probability into pinned host memory.

    A kernel stores them, because a copy would wait for earlier copies, such as KV cache offloads.

    Args:
        ids_R: int64, on the device.
        logprob_R: float32, on the device.
        host_R2: float64, which holds both exactly. Synchronise with an event before you read it.

    Raises:
        KernelInputError: A shape or dtype differs from these.
    """
    given = [(x.dtype, tuple(x.shape)) for x in (ids_R, logprob_R, host_R2)]
    rows = len(ids_R)
    if given != [(torch.int64, (rows,)), (torch.float32, (rows,)), (torch.float64, (rows, 2))]:
        raise KernelInputError(f"choices_to_host: {given} are not ids, log-probabilities and room for both")
    if not all(x.is_contiguous() for x in (ids_R, logprob_R, host_R2)):
        raise KernelInputError("choices_to_host: inputs must be contiguous")
    _choices[(cdiv(rows, _ROWS),)](ids_R, logprob_R, host_R2, rows, BLOCK=_ROWS)


@triton.jit
def choices_kernel(ids_ptr, logprob_ptr, host_ptr, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    ids = tl.load(ids_ptr + row, mask=inside)
    logprob = tl.load(logprob_ptr + row, mask=inside)
    tl.store(host_ptr + 2 * row, ids.to(tl.float64), mask=inside)
    tl.store(host_ptr + 2 * row + 1, logprob.to(tl.float64), mask=inside)


_choices = Launcher(choices_kernel)
