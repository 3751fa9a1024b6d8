"""Compile cases of the whole-prompt baselines."""

from __future__ import annotations

from typing import Any

from deltafront.benchmarks.whole_prompt import lines_kernel
from deltafront.kernels.constants import BLOCK

POINTERS = {"q_ptr": "*bf16", "k_ptr": "*bf16", "m_ptr": "*fp32", "l_ptr": "*fp32"}

NUMBERS = {
    **dict.fromkeys(("stride_qb", "stride_qh", "stride_qt", "stride_kb", "stride_kg", "stride_ks"), "i64"),
    **dict.fromkeys(("heads", "group", "rows", "keys", "per_split"), "i32"),
    "scale_log2": "fp32",
}

SUMS = {**POINTERS, **NUMBERS}

MASSES = {**SUMS, "vertical_ptr": "*fp32", "band_ptr": "*fp32", "first_band": "i32"}

WIDE = {"q_ptr": "*fp32", "k_ptr": "*fp32"}


def lines_cases(last: int, stages: int, inputs: dict[str, str]) -> list[Any]:
    sizes = {"D": 128, "R": last, "BLOCK": BLOCK}
    options = {"num_warps": last // 16, "num_stages": stages}
    return [
        (lines_kernel._sums_kernel, {**SUMS, **inputs}, sizes, options),
        (lines_kernel._masses_kernel, {**MASSES, **inputs}, {**sizes, "C": lines_kernel._SPLITS}, options),
    ]


COMPILE_CASES = [*lines_cases(64, 3, {}), *lines_cases(128, 3, {}), *lines_cases(128, 2, WIDE)]
