"""Oracle of the int8 KV cache, number by number, by the definition in `kernels.layers.kv_int8`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

NONE = 255
_BYTES = range(8, 248)


def scale_of(byte: int) -> float:
    """Decode a scale byte: five bits of exponent and three of fraction."""
    exponent, fraction = divmod(byte, 8)
    if exponent == 31:
        return math.nan
    return (1 + fraction / 8) * 2.0 ** (exponent - 15 - 6) if exponent else fraction / 8 * 2.0**-20


def byte_of(row: Sequence[float]) -> int:
    """Return the byte of the smallest scale at which 127 · scale reaches the row's largest magnitude."""
    if not all(map(math.isfinite, row)):
        return NONE
    least = max(abs(x) for x in row) / 127
    return next((byte for byte in _BYTES if scale_of(byte) >= least * (1 - 2.0**-23)), NONE)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows, the last dimension of x. Return numbers and scales (uint8). A row that no scale fits has
    numbers 0.

    A channel is multiplied in float32 by 1 / scale, rounded to float32, and then rounded.
    """
    numbers, scales = [], []
    for row in x.double().flatten(0, -2).tolist():
        byte = byte_of(row)
        inverse = _float32(1 / scale_of(byte))
        scales.append(byte)
        numbers.append([0 if byte == NONE else round(_float32(one * inverse)) + 128 for one in row])
    both = torch.tensor(numbers, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8)
    return both[0].view(x.shape), both[1].view(x.shape[:-1])


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def row_of(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantise one row to float64."""
    return (numbers.double() - 128) * scale_of(int(scale))
