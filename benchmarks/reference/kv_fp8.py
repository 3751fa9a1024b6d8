"""K/V in 8 bits, number by number, from the definition in `kernels.layers.kv_fp8`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .layers import e4m3_numbers, nearest_e4m3

_LEAST, _MOST = -60, 60
_NAN = 0x7F


def exponent_of(row: Sequence[float]) -> int:
    """The power of two by which the largest magnitude lies within 2^7 .. 2^8."""
    largest = max(abs(x) for x in row)
    if largest == 0:
        return _LEAST
    _, above = math.frexp(largest)  # largest = fraction · 2^above with a fraction of 1/2 .. 1
    return min(max(above - 8, _LEAST), _MOST)


def pattern(x: float) -> int:
    """The bits of the nearest e4m3: sign, 4 of exponent, 3 of mantissa. NaN beyond the numbers."""
    if math.isnan(x) or abs(x) >= 464:
        return _NAN
    magnitude = e4m3_numbers().index(abs(nearest_e4m3(x)))
    return magnitude | (0x80 if math.copysign(1.0, x) < 0 else 0)


def number(bits: int) -> float:
    """The number that e4m3's bits stand for."""
    if bits & 0x7F == _NAN:
        return math.nan
    return (-1.0 if bits & 0x80 else 1.0) * e4m3_numbers()[bits & 0x7F]


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits (uint8) and exponents (int8) of rows, the last dimension of x."""
    bits, exponents = [], []
    for row in x.double().flatten(0, -2).tolist():
        exponent = exponent_of(row)
        exponents.append(exponent)
        bits.append([pattern(one * 2.0**-exponent) for one in row])
    values = torch.tensor(bits, dtype=torch.uint8).view(x.shape)
    return values, torch.tensor(exponents, dtype=torch.int8).view(x.shape[:-1])


def row_of(bits: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """One row, float64."""
    return torch.tensor([number(b) * 2.0 ** int(exponent) for b in bits.tolist()], dtype=torch.float64)
