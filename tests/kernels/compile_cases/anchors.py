"""Compile cases of DPXA's kernels."""

from __future__ import annotations

import torch

from deltafront.kernels.selectors.anchors import hopper, hopper_launch, scores, summary
from tests.kernels.descriptor_types import descriptor_type


def hopper_case(
    dim: int, q_slots: int, k_slots: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[object, dict[str, str], dict[str, object], dict[str, int]]:
    pointer = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    types = {
        "k": descriptor_type(dtype, 1, 16, 4, 2, dim),
        "count": descriptor_type(torch.float32, 1, 8, 4, 4),
        "q_ptr": pointer,
        **dict.fromkeys(("k_first_ptr", "q_first_ptr"), "*i32"),
        "q_count_ptr": "*fp32",
        "out_ptr": "*fp16",
        **dict.fromkeys(("stride_tb", "stride_tg", "stride_ob"), "i64"),
        **dict.fromkeys(("stride_oh", "stride_on", "stride_or"), "i64"),
        **dict.fromkeys(("kv_heads", "group", "query_blocks", "first_block"), "i32"),
        **dict.fromkeys(("first_row_block", "slab_blocks"), "i32"),
        "scale": "fp32",
    }
    plan = hopper_launch.plan_of(dim, q_slots, k_slots)
    return hopper.anchors_hopper_kernel, types, {"PLAN": plan}, {"num_warps": 4}


HOPPER_CASES = [
    hopper_case(128, 8, 32),
    hopper_case(128, 32, 8),
    hopper_case(128, 32, 64),
    hopper_case(64, 8, 32),
    hopper_case(64, 32, 64, torch.float16),
]


SCORE = {
    **dict.fromkeys(("q_ptr", "k_ptr"), "*bf16"),
    **dict.fromkeys(("q_first_ptr", "k_first_ptr"), "*i32"),
    **dict.fromkeys(("q_count_ptr", "k_count_ptr"), "*fp32"),
    "out_ptr": "*fp16",
    "scale_log2": "fp32",
    **dict.fromkeys(("stride_kb", "stride_kg", "stride_tb", "stride_tg"), "i64"),
    **dict.fromkeys(("stride_ob", "stride_oh", "stride_on", "stride_or"), "i64"),
    **dict.fromkeys(("kv_heads", "group", "query_blocks", "first_block"), "i32"),
    **dict.fromkeys(("first_row_block", "slab_blocks"), "i32"),
}

OURS = {"Q_SLOTS": 8, "K_SLOTS": 32, "X": scores._TILE, "W": 4, "STAGES": 2}

SCORES_CASES = [
    (scores._score_kernel, SCORE, {"D": 128, **OURS, "DIAGONAL": False}, {"num_warps": 8, "maxnreg": 128}),
    (scores._score_kernel, SCORE, {"D": 128, **OURS, "DIAGONAL": True}),
    (scores._score_kernel, SCORE, {"D": 64, **OURS, "DIAGONAL": False}),
    (scores._score_kernel, SCORE, {"D": 256, **OURS, "DIAGONAL": False}, {"num_warps": 8, "maxnreg": 128}),
    (scores._score_kernel, SCORE, {"D": 256, **OURS, "DIAGONAL": True}, {"num_warps": 8}),
    (scores._score_kernel, SCORE, {"D": 128, **OURS, "Q_SLOTS": 32, "K_SLOTS": 64, "DIAGONAL": False}),
]


X_STRIDES = dict.fromkeys(("stride_xb", "stride_xg", "stride_xs"), "i64")

NEXT = {
    "x_ptr": "*bf16",
    "next_ptr": "*u8",
    "cos": "fp32",
    "relaxed_cos": "fp32",
    "stride_nl": "i64",
    **X_STRIDES,
    **dict.fromkeys(("kv_heads", "rows", "blocks"), "i32"),
}

ORBIT = {"next_ptr": "*u8", "start_ptr": "*u8", "runs_ptr": "*i32", "lanes": "i32"}

FILL = {
    "x_ptr": "*bf16",
    "vector_ptr": "*bf16",
    "start_ptr": "*u8",
    **dict.fromkeys(("runs_ptr", "first_ptr"), "*i32"),
    "count_ptr": "*fp32",
    **X_STRIDES,
    **dict.fromkeys(("stride_vb", "stride_vg", "stride_ab", "stride_ag"), "i64"),
    **dict.fromkeys(("kv_heads", "rows", "blocks", "lanes", "first_block"), "i32"),
}

KEYS = {"CAP": 32, "LEVELS": 2}

SUMMARY_CASES = [
    (summary._next_kernel, NEXT, {"D": 128, "LEVELS": 2, "CENTRED": True}, {"maxnreg": 168}),
    (summary._next_kernel, NEXT, {"D": 128, "LEVELS": 2, "CENTRED": False}, {"maxnreg": 168}),
    (summary._next_kernel, NEXT, {"D": 64, "LEVELS": 1, "CENTRED": True}),
    (summary._next_kernel, NEXT, {"D": 256, "LEVELS": 2, "CENTRED": True}),
    (summary._orbit_kernel, ORBIT, {"Z": 32}),
    *((summary._fill_kernel, FILL, {"D": dim, **KEYS}) for dim in (128, 256)),
    (summary._fill_kernel, FILL, {"D": 128, "CAP": 64, "LEVELS": 2}),
    (summary._fill_kernel, FILL, {"D": 64, "CAP": 8, "LEVELS": 1}),
    (summary._fill_kernel, FILL, {"D": 128, "CAP": 1, "LEVELS": 1}),
]

COMPILE_CASES = [*HOPPER_CASES, *SCORES_CASES, *SUMMARY_CASES]
