"""Compile cases of XAttention's scores, of selection rules, of the anchor scan and of blocks' masses."""

from __future__ import annotations

from typing import Any

import torch

from deltafront.kernels import anchor_scan, block_mass
from deltafront.kernels.attention.flash import tile_constants
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.selectors.grouped import kernel as grouped
from deltafront.kernels.selectors.rules import kernel as rule
from deltafront.kernels.selectors.rules.rule import LEVELS

SCAN = {
    "x_ptr": "*bf16",
    "anchor_ptr": "*i8",
    "cos": "fp32",
    "heads": "i32",
    "rows": "i32",
    **dict.fromkeys(("stride_xb", "stride_xg", "stride_xs"), "i64"),
}

SCAN_CASES = [
    (anchor_scan._scan_kernel, SCAN, {"CHUNK": BLOCK, "D": 64}),
    (anchor_scan._scan_kernel, SCAN, {"CHUNK": 512, "D": 128}),
]


GROUPED = {
    "q_desc": "tensordesc<fp8e4nv[128, 128]>",
    "k_desc": "tensordesc<fp8e4nv[256, 128]>",
    "own_ptr": "*fp32",
    "out_ptr": "*fp16",
    "scale_log2": "fp32",
    **dict.fromkeys(("stride_ob", "stride_oh", "stride_oi"), "i64"),
    **dict.fromkeys(("heads", "group", "rows", "padded_I", "padded_J", "own_groups"), "i32"),
    **dict.fromkeys(("start_group", "first_group", "last_group"), "i32"),
}

TILES = {"BF": 128, "X": grouped._TILE_X, "Y": grouped._TILE_Y, "STAGES": 3, "FLATTEN": True}

GROUPED_CASES = [
    (
        grouped._grouped_kernel,
        GROUPED,
        {"STEP": 8, "PER_BLOCK": 16, "F": 1024, **TILES},
        {"num_warps": 8},
    ),
    (
        grouped._grouped_kernel,
        GROUPED,
        {"STEP": 64, "PER_BLOCK": 2, "F": 8192, **TILES},
        {"num_warps": 8},
    ),
    (grouped._grouped_kernel, GROUPED, {"STEP": 4, "PER_BLOCK": 32, "F": 512, **TILES}),
]


PACK = {
    "x_ptr": "*bf16",
    "out_ptr": "*fp8e4nv",
    **dict.fromkeys(("stride_xb", "stride_xg", "stride_xs"), "i64"),
    **dict.fromkeys(("x_heads", "rows", "padded_I"), "i32"),
}

OWN = {
    "q_ptr": "*bf16",
    "k_ptr": "*bf16",
    "own_ptr": "*fp32",
    "scale_log2": "fp32",
    **dict.fromkeys(("stride_qb", "stride_qh", "stride_qt", "stride_kb", "stride_kg", "stride_ks"), "i64"),
    **dict.fromkeys(("heads", "group", "rows", "q_start", "groups_I"), "i32"),
}

PACKING_CASES = [
    (
        grouped._pack_kernel,
        PACK,
        {"D": 128, "STEP": 8, "REVERSED": True, "LIMIT": 448.0, "ROWS": 64},
    ),
    (grouped._own_kernel, OWN, {"D": 128, "STEP": 8, "ROWS": 32}),
]


RULE = {
    "in_ptr": "*fp16",
    "threshold_ptr": "*fp32",
    "index_ptr": "*i16",
    "count_ptr": "*i32",
    "score_ptr": "*fp32",
    **dict.fromkeys(("stride_ib", "stride_ih", "stride_in", "stride_ir"), "i64"),
    **dict.fromkeys(("stride_mb", "stride_mh", "stride_mn", "stride_cb", "stride_ch"), "i64"),
    **dict.fromkeys(("heads", "first_block", "sink_blocks", "window_blocks"), "i32"),
}

LONG = {"R": 8, "W": 1024, "LEVELS": LEVELS, "WITH_SCORES": False}

RULE_CASES = [
    *(
        (rule._rule_kernel, RULE, {**LONG, "KIND": kind, "OUTSIDE": False})
        for kind in (*rule._KINDS.values(), rule._SCORES_ONLY.value)
    ),
    *((rule._rule_kernel, RULE, {**LONG, "KIND": kind, "OUTSIDE": True}) for kind in rule._KINDS.values()),
    (
        rule._rule_kernel,
        RULE,
        {
            **LONG,
            "R": 16,
            "W": 4096,
            "KIND": rule._CUMULATIVE.value,
            "OUTSIDE": False,
            "WITH_SCORES": True,
        },
    ),
]


BLOCK_LSE = {
    **dict.fromkeys(("q_ptr", "k_ptr"), "*bf16"),
    "lse_ptr": "*fp32",
    **dict.fromkeys(("stride_qt", "stride_qh", "stride_kg", "stride_ks"), "i32"),
    **dict.fromkeys(("rows", "keys", "blocks", "per_program"), "i32"),
    "scale_log2": "fp32",
}


def block_lse_case(dim: int, group: int, dtype: torch.dtype) -> Any:
    constants = tile_constants(torch.empty((1, 1, 1, dim), dtype=dtype))
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    inputs = dict.fromkeys(("q_ptr", "k_ptr"), "*bf16" if dtype == torch.bfloat16 else "*fp32")
    return block_mass._block_lse_kernel, {**BLOCK_LSE, **inputs}, {**constants, "J": group}, options


BLOCK_LSE_CASES = [
    block_lse_case(64, 7, torch.bfloat16),
    block_lse_case(128, 4, torch.bfloat16),
    block_lse_case(256, 2, torch.bfloat16),
    block_lse_case(128, 4, torch.float32),
]


COMPILE_CASES = [*SCAN_CASES, *GROUPED_CASES, *PACKING_CASES, *RULE_CASES, *BLOCK_LSE_CASES]
