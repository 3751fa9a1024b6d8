"""Input makers, poisoned allocations and a row-wise comparison for kernel tests.

`reference/structured.py` makes structured inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from deltafront.kernels.interface import AttentionInput, StateSpec, TileMask

ROW_TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}
"""The largest permitted relative L2 error of a row, by the kernel's dtype."""


def random_input(
    tokens: int,
    *,
    q_heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    batch: int = 1,
    rows: int | None = None,
    prompt_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionInput:
    """Make Gaussian q, k, v with `tokens` keys. The queries are the last `rows` positions (default: all)."""
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def draw(heads: int, length: int) -> torch.Tensor:
        x = torch.randn(batch, heads, length, head_dim, generator=generator)
        return x.to(device=device, dtype=dtype)

    taken = tokens if rows is None else rows
    q_BHTD, k_BGSD, v_BGSD = draw(q_heads, taken), draw(kv_heads, tokens), draw(kv_heads, tokens)
    return AttentionInput.of(q_BHTD, k_BGSD, v_BGSD, prompt_tokens=prompt_tokens)


def chunk_of(x: AttentionInput, start: int, stop: int) -> AttentionInput:
    """Return the queries start .. stop-1 of an input, with the keys that they may see."""
    end = x.q_start + stop
    return AttentionInput.of(
        x.q_BHTD[:, :, start:stop],
        x.k_BGSD[:, :, :end],
        x.v_BGSD[:, :, :end],
        q_start=x.q_start + start,
        prompt_tokens=x.prompt_tokens,
        scale=x.scale,
    )


def spec_of(x: AttentionInput) -> StateSpec:
    batch, heads, _, dim = x.q_BHTD.shape
    return StateSpec(batch, heads, x.k_BGSD.shape[1], dim, x.prompt_tokens, x.q_BHTD.device, x.q_BHTD.dtype)


def tiles(mask: TileMask) -> list[list[int]]:
    columns = mask.index_BHNM.shape[-1]
    index, count = mask.index_BHNM.reshape(-1, columns), mask.count_BHN.reshape(-1)
    return [index[row, : int(count[row])].tolist() for row in range(count.shape[0])]


def full_mask(x: AttentionInput) -> TileMask:
    return mask_of(x, torch.ones(x.query_blocks, x.key_blocks, dtype=torch.bool, device=x.q_BHTD.device))


def random_mask(x: AttentionInput, density: float, seed: int = 0) -> TileMask:
    """Make a random mask with each causal tile with probability `density`, and always the diagonal and block
    0."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = (*x.q_BHTD.shape[:2], x.query_blocks, x.key_blocks)
    return mask_of(x, (torch.rand(shape, generator=generator) < density).to(x.q_BHTD.device))


def mask_of(x: AttentionInput, kept_BHNM: torch.Tensor) -> TileMask:
    """Make a mask from a boolean table. Makes it causal, and adds sink and diagonal. Scores are random.

    Entries after a row's count are -1, so that a kernel that reads them is caught.
    """
    batch, heads = x.q_BHTD.shape[:2]
    device = kept_BHNM.device
    row_N1 = x.first_block + torch.arange(x.query_blocks, device=device)[:, None]
    column_M = torch.arange(x.key_blocks, device=device)
    kept_BHNM = (kept_BHNM | (column_M == row_N1) | (column_M == 0)) & (column_M <= row_N1)
    kept_BHNM = kept_BHNM.expand(batch, heads, x.query_blocks, x.key_blocks)
    count_BHN = kept_BHNM.sum(-1, dtype=torch.int32)
    order = torch.where(kept_BHNM, column_M, x.key_blocks).sort(-1).values
    index_BHNM = torch.where(order < x.key_blocks, order, -1).to(torch.int16)
    generator = torch.Generator(device="cpu").manual_seed(x.key_blocks)
    score_BHNM = torch.rand(index_BHNM.shape, generator=generator).to(device)
    return TileMask(index_BHNM.contiguous(), count_BHN, score_BHNM)


def row_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Compute each row's relative L2 error (last dimension) in float64. NaN stays NaN.

    The error of a very small row is relative to 1% of the rows' mean norm.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    wanted = expected.detach().to(torch.float64)
    norm = wanted.norm(dim=-1)
    floor = 0.01 * norm.mean() + torch.finfo(torch.float32).tiny
    difference: torch.Tensor = (actual.detach().to(torch.float64) - wanted).norm(dim=-1)
    return difference / torch.maximum(norm, floor)


def assert_rows_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    factor: float = 1.0,
) -> None:
    """Check that every row of `actual` is within `factor` times ROW_TOLERANCE of `expected`. The error names
    the worst row.

    dtype: the kernel's, if not actual's.
    """
    errors = row_errors(actual, expected)
    limit = factor * ROW_TOLERANCE[actual.dtype if dtype is None else dtype]
    bad = ~(errors <= limit)
    if bool(bad.any()):
        ranked = torch.where(errors.isnan(), torch.inf, errors)
        where = torch.unravel_index(ranked.argmax(), errors.shape)
        row = tuple(int(i) for i in where)
        raise AssertionError(
            f"{int(bad.sum())} of {errors.numel()} rows differ by more than {limit:.1e}; "
            f"worst row {row}: {float(errors[row]):.3e}"
        )


def _poison(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point():
        return x.fill_(float("nan"))
    return x.fill_(True if x.dtype == torch.bool else -1)


@contextmanager
def synchronising_raises() -> Iterator[None]:
    """In the `with` block, torch raises RuntimeError if the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """In the `with` block, torch.empty and similar functions return NaN (-1 for integers), so that unwritten
    output is detected."""

    def poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            return _poison(make(*args, **kwargs))

        return wrapped

    with (
        mock.patch.object(torch, "empty", poisoning(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoning(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty)),
    ):
        yield
