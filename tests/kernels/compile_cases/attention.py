"""Compile cases of attention kernels and of the Δ correction."""

from __future__ import annotations

from typing import Any

import torch

from deltafront.kernels import correction
from deltafront.kernels.attention import flash
from deltafront.kernels.attention.hopper import attention, hopper_plan, split
from deltafront.kernels.attention.packed import delta_xattention_kernel, pack
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.hopper.layouts import WARPGROUP_ROWS
from tests.kernels.descriptor_types import descriptor_type

FLASH_STRIDES = [f"{name}_strides" for name in ("q", "k", "v", "out", "packed")]

FLASH_NUMBERS = ("stride_ib", "stride_ih", "stride_in", "heads", "group", "rows", "keys", "row0", "step",
                 "critical", "chunk", "packed_slots", "chunk_slots")  # fmt: skip

FLASH_TYPES = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "packed_k_ptr", "packed_v_ptr"), "*bf16"),
    "weight_ptr": "*fp32",
    "packed_ptr": "*i32",
    "index_ptr": "*i16",
    "count_ptr": "*i32",
    **dict.fromkeys(FLASH_STRIDES, ("i32", "i32", "i32")),
    **dict.fromkeys(FLASH_NUMBERS, "i32"),
    "scale": "fp32",
}

FLASH_SIZES = {"ROWS": BLOCK, "COLS": BLOCK, "BLOCK": BLOCK, "PRECISION": "tf32"}

FLASH_CASES = [
    (
        flash.flash_kernel,
        FLASH_TYPES | ({"sink_ptr": "*bf16"} if sinks else {}),
        {"LISTED": kind == "listed", "PACKED": kind == "packed", "WINDOW": window, "D": dim, **FLASH_SIZES}
        | ({"COLS": 64} if dim == 256 else {})
        | ({} if sinks else {"sink_ptr": None}),
        {"num_warps": 8, "num_stages": 2},
    )
    for kind, window, dim, sinks in (
        *(("dense", 0, 128, False), ("listed", 0, 64, False), ("packed", 0, 128, False)),
        *(("dense", 4096, 128, False), ("dense", 0, 256, False), ("listed", 0, 256, False)),
        *(("packed", 0, 256, False), ("dense", 1024, 256, False)),
        *(("dense", 128, 64, True), ("dense", 0, 64, True), ("listed", 0, 64, True), ("packed", 0, 64, True)),
    )
]


def hopper_case(
    dim: int, *, dtype: torch.dtype = torch.bfloat16, **kind: Any
) -> tuple[object, dict[str, str], dict[str, object], dict[str, int]]:
    plan = hopper_plan.plan_of(dim, **kind)
    own, tile = (descriptor_type(dtype, 1, 1, rows, dim) for rows in (WARPGROUP_ROWS, BLOCK))
    types = {
        **dict.fromkeys(("q", "out", "q_tail", "out_tail"), own),
        **dict.fromkeys(("k", "v", "packed_k", "packed_v"), tile),
        "weight": descriptor_type(torch.float32, 1, 1, BLOCK) if plan.packed else tile,
        "index_ptr": "*i16",
        "order_ptr": "*i64" if plan.by_length else "*i32",
        **dict.fromkeys(("counter_ptr", "packed_ptr"), "*i32"),
        **dict.fromkeys(("stride_ib", "stride_ih", "stride_in", "items", "batch", "heads"), "i32"),
        **dict.fromkeys(("group", "tiles", "tail_tiles", "keys", "row0", "step", "tail_row0"), "i32"),
        **dict.fromkeys(("critical", "chunk", "chunk_slots", "splits", "rows"), "i32"),
        "lse_ptr": "*fp32" if plan.split else "*i32",
        "scale": "fp32",
    }
    return attention.hopper_kernel, types, {"PLAN": plan}, {"num_warps": 4}


HOPPER_CASES = [
    *(hopper_case(dim, split=split) for dim in (64, 128) for split in (False, True)),
    *(hopper_case(dim, listed=True) for dim in (64, 128)),
    *(hopper_case(dim, packed=True) for dim in (64, 128)),
    hopper_case(64, listed=True, order=hopper_plan.BY_LENGTH),
    hopper_case(64, packed=True, dtype=torch.float16),
]


MIXED_STRIDES = [f"stride_{name}" for name in "qb qh qt kb kg ks vb vg vs ob oh ot ib ih in en".split()]

MIXED_NUMBERS = (*MIXED_STRIDES, "heads", "group", "rows", "keys", "row0", "packed_slots", "offset_slots")

MIXED_TYPES = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "packed_k_ptr", "packed_v_ptr"), "*bf16"),
    "weight_ptr": "*fp32",
    **dict.fromkeys(("offset_ptr", "count_ptr"), "*i32"),
    "index_ptr": "*i16",
    "exact_ptr": "*i8",
    **dict.fromkeys(MIXED_NUMBERS, "i32"),
    "scale": "fp32",
}

EXACT = {
    "score_ptr": "*fp32",
    "count_ptr": "*i32",
    "exact_ptr": "*i8",
    "stride_sn": "i32",
    "exact_share": "fp32",
}

MIXED_CASES = [
    *(
        (
            delta_xattention_kernel.mixed_kernel,
            MIXED_TYPES | ({"sink_ptr": "*bf16"} if sinks else {}),
            {"D": dim, "ROWS": BLOCK, "COLS": cols, "BLOCK": BLOCK, "PRECISION": "tf32"}
            | ({} if sinks else {"sink_ptr": None}),
            {"num_warps": 8, "num_stages": 2},
        )
        for dim, cols, sinks in ((128, 64, False), (256, 32, False), (64, 64, True))
    ),
    (delta_xattention_kernel.exact_kernel, EXACT, {"ENTRIES": 1024}),
]


PACK_NUMBERS = ("stride_kb", "stride_kg", "stride_ks", "stride_vb", "stride_vg", "stride_vs", "heads",
            "start_slots", "offset_slots", "packed_slots", "chunks")  # fmt: skip

PACK_TYPES = {
    **dict.fromkeys(("k_ptr", "v_ptr", "packed_k_ptr", "packed_v_ptr"), "*bf16"),
    **dict.fromkeys(("start_ptr", "offset_ptr"), "*i32"),
    "weight_ptr": "*fp32",
    **dict.fromkeys(PACK_NUMBERS, "i32"),
}

PACK_SIZES = {"D": 128, "RUNS": 64, "ROWS": 64, "MEANS": True, "PRECISION": "tf32"}

PACK_CASES = [
    (pack.pack_kernel, PACK_TYPES, PACK_SIZES),
    (pack.pack_kernel, PACK_TYPES, PACK_SIZES | {"MEANS": False}),
]


ADD_NUMBERS = ("stride_ob", "stride_oh", "stride_ot", "heads", "rows", "differences", "first", "gamma")

ADD_TYPES = {"out_ptr": "*bf16", "difference_ptr": "*fp32", **dict.fromkeys(ADD_NUMBERS, "i32")}

ADD_CASES = [(correction.add_kernel, ADD_TYPES, {"D": 128, "ROWS": 64})]

MERGE_TYPES = {
    **dict.fromkeys(("split_ptr", "out_ptr"), "*bf16"),
    "lse_ptr": "*fp32",
    **dict.fromkeys(("stride_ob", "stride_oh", "stride_or", "heads", "rows", "splits"), "i32"),
}

MERGE_CASES = [(split.merge_splits_kernel, MERGE_TYPES, {"D": 128, "ROWS": 16})]

COMPILE_CASES = [*FLASH_CASES, *HOPPER_CASES, *MIXED_CASES, *PACK_CASES, *ADD_CASES, *MERGE_CASES]
