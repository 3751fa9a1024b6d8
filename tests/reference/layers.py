"""Oracles of the kernels between GEMMs, row by row in float64. Suffixes are those of `kernels.layers`."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache

import torch


def rms_normed(hidden_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    rows = []
    for x_C in hidden_TC.double():
        mean_square = sum(float(x) ** 2 for x in x_C) / len(x_C)
        rows.append(x_C / math.sqrt(mean_square + eps) * weight_C.double())
    return torch.stack(rows)


def swiglu(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    half = gate_up_TJ.shape[1] // 2
    rows = []
    for row in gate_up_TJ.double().tolist():
        rows.append([g / (1 + math.exp(-g)) * u for g, u in zip(row[:half], row[half:], strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def geglu(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    half = gate_up_TJ.shape[1] // 2
    rows = []
    for row in gate_up_TJ.double().tolist():
        slopes = [math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)) for g in row[:half]]
        rows.append([g * (1 + t) / 2 * u for g, t, u in zip(row[:half], slopes, row[half:], strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def squared_relu(x_TI: torch.Tensor) -> torch.Tensor:
    rows = [[max(x, 0.0) ** 2 for x in row] for row in x_TI.double().tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def rotated(x_HD: torch.Tensor, position: int, frequency_F: torch.Tensor, magnitude: float) -> torch.Tensor:
    """Rotate one token's heads in float64. Channels (f, f + D/2) are one complex number."""
    half = x_HD.shape[1] // 2
    pairs = torch.complex(x_HD[:, :half].double(), x_HD[:, half:].double())
    turned = pairs * torch.polar(torch.full((half,), magnitude).double(), position * frequency_F.double())
    return torch.cat((turned.real, turned.imag), dim=1)


@cache
def e4m3_numbers() -> tuple[float, ...]:
    """Return every finite non-negative e4m3 number, ascending (Micikevicius et al. 2022, table 1).

    e4m3 has 4 bits of exponent with bias 7, 3 bits of mantissa, subnormals below 2^-6 and no infinity.
    """
    small = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return (*small, *normal[:-1])  # the last bit pattern is NaN


def nearest_e4m3(x: float) -> float:
    """Round to e4m3. Ties go to the even bit pattern, and larger numbers become the largest e4m3 number."""
    numbers = e4m3_numbers()
    above = bisect_left(numbers, abs(x), hi=len(numbers) - 1)
    nearest = min(max(above - 1, 0), above, key=lambda n: (abs(numbers[n] - abs(x)), n % 2))
    return math.copysign(numbers[nearest], x)


def quantised(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows. Return values_TI, which are e4m3 numbers, and scale_T1, both float64."""
    values, scales = [], []
    for row in x_TI.double().tolist():
        scale = max(1e-12, *(abs(x) for x in row)) / 448
        values.append([nearest_e4m3(x / scale) for x in row])
        scales.append([scale])
    return torch.tensor(values, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)


def dequantised_product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    x, weight = (values * scale for values, scale in (quantised(x_TI), quantised(weight_OI)))
    return x @ weight.T
