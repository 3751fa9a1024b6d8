"""Compile cases of the kernels between GEMMs, and of the Hopper GEMM."""

from __future__ import annotations

import torch

from deltafront.kernels.hopper.layouts import WARPGROUP_ROWS
from deltafront.kernels.layers import (
    fp8,
    kv_int8,
    linear_hopper,
    norm,
    one_shot_reduce,
    rope,
    swiglu,
    to_host,
)
from tests.kernels.descriptor_types import descriptor_type

FP8_TYPES = {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}

FP8_CASES = [(fp8.quantise_kernel, FP8_TYPES, {"COLUMNS": 4096, "BLOCK": 4096})]


def product_case(
    gated: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[object, dict[str, str], dict[str, object], dict[str, int]]:
    types = {
        "x": descriptor_type(dtype, WARPGROUP_ROWS, linear_hopper.DEPTH.value),
        "weight": descriptor_type(dtype, linear_hopper.PIECE.value, linear_hopper.DEPTH.value),
        "out": descriptor_type(dtype, WARPGROUP_ROWS, linear_hopper.PIECE.value),
        **dict.fromkeys(("row_tiles", "column_tiles", "steps", "apart"), "i32"),
    }
    return linear_hopper.linear_hopper_kernel, types, {"GATED": gated}, {"num_warps": 4}


PRODUCT_CASES = [product_case(False), product_case(True), product_case(True, torch.float16)]


NORM_TYPES = {
    **dict.fromkeys(("hidden_ptr", "update_ptr", "weight_ptr", "sum_ptr", "normed_ptr"), "*bf16"),
    "scale_ptr": "*fp32",
    "eps": "fp32",
}

SIZES = {"ADDS": True, "FP8": False, "COLUMNS": 4096, "BLOCK": 4096}

NORM_CASES = [
    (norm.add_norm_kernel, NORM_TYPES, SIZES),
    (norm.add_norm_kernel, {**NORM_TYPES, "normed_ptr": "*fp8e4nv"}, {**SIZES, "FP8": True}),
]


ROPE_TYPES = {
    **dict.fromkeys(("qkv_ptr", "weight_ptr", "k_ptr", "v_ptr"), "*bf16"),
    **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
    "rows_ptr": "*i64",
    "tokens": "i32",
    "eps": "fp32",
}

TILE = {"TOKENS": rope._TOKENS, "HEADS": rope._HEADS}

ROPE_SIZES = {"Q_HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 64, **TILE}

KV_TYPES = {
    **dict.fromkeys(("k_ptr", "v_ptr"), "*u8"),
    **dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*u8"),
    "rows_ptr": "*i64",
    "tokens": "i32",
}

ROPE_CASES = [
    *(
        (
            rope.rope_kernel,
            ROPE_TYPES,
            {"k_scale_ptr": None, "v_scale_ptr": None, "NORMS": norms, "INT8": False, **ROPE_SIZES},
        )
        for norms in (False, True)
    ),
    (rope.rope_kernel, {**ROPE_TYPES, **KV_TYPES}, {"NORMS": True, "INT8": True, **ROPE_SIZES}),
]

GATHER_CASES = [
    (
        kv_int8.gather_kernel,
        {**KV_TYPES, **dict.fromkeys(("k_out_ptr", "v_out_ptr"), "*bf16")},
        {"KV_HEADS": 8, "D": 128, "BLOCK": 128, "TOKENS": kv_int8._TOKENS},
    )
]


SWIGLU_CASES = [
    (
        swiglu.swiglu_kernel,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
        {"COLUMNS": 14336, "BLOCK": swiglu._PIECE, "GELU": False},
    ),
    (
        swiglu.swiglu_kernel,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
        {"COLUMNS": 10240, "BLOCK": swiglu._PIECE, "GELU": True},
    ),
    *(
        (
            swiglu.swiglu_fp8_kernel,
            {"gate_up_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
            {"COLUMNS": columns, "BLOCK": block, "GELU": columns == 10240},
            {"num_warps": fp8.row_warps(block)},
        )
        for columns, block in ((10240, 16384), (14336, 16384), (28672, 32768))
    ),
]

CHOICES_CASES = [
    (
        to_host.choices_kernel,
        {"ids_ptr": "*i64", "logprob_ptr": "*fp32", "host_ptr": "*fp64", "rows": "i32"},
        {"BLOCK": to_host._ROWS},
    )
]

SQUARED_RELU_CASES = [
    (
        swiglu.squared_relu_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16"},
        {"COLUMNS": 18432, "BLOCK": swiglu._PIECE},
    ),
    (
        swiglu.squared_relu_fp8_kernel,
        {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
        {"COLUMNS": 18432, "BLOCK": 32768},
        {"num_warps": fp8.row_warps(32768)},
    ),
]

REDUCE_CASES = [
    (
        one_shot_reduce.one_shot_reduce_kernel,
        {
            **dict.fromkeys(("x_ptr", "out_ptr"), pointer),
            "calls_ptr": "*i32",
            **dict.fromkeys(("places_ptr", "flags_ptr"), "*i64"),
            "numbers": "i32",
        },
        {"RANK": 1, "RANKS": ranks, "MAXIMUM": maximum, "ROOM": one_shot_reduce.ROOM, "BLOCK": 1024},
    )
    for ranks, maximum, pointer in ((2, False, "*bf16"), (4, True, "*fp32"))
]

REDUCE_CASES += [
    (
        one_shot_reduce.one_shot_add_norm_kernel,
        {
            **dict.fromkeys(("hidden_ptr", "update_ptr", "weight_ptr", "sum_ptr"), "*bf16"),
            "normed_ptr": "*fp8e4nv" if fp8_rows else "*bf16",
            "scale_ptr": "*fp32" if fp8_rows else "*bf16",
            "calls_ptr": "*i32",
            **dict.fromkeys(("places_ptr", "flags_ptr"), "*i64"),
            "eps": "fp32",
        },
        {
            "RANK": 1,
            "RANKS": ranks,
            "ROOM": one_shot_reduce.ROOM,
            "FP8": fp8_rows,
            "COLUMNS": columns,
            "BLOCK": 8192,
        },
        {"num_warps": fp8.row_warps(8192)},
    )
    for ranks, fp8_rows, columns in ((2, False, 8192), (4, True, 5120))
]

COMPILE_CASES = [
    *(*FP8_CASES, *PRODUCT_CASES, *NORM_CASES, *ROPE_CASES, *GATHER_CASES),
    *(*SWIGLU_CASES, *SQUARED_RELU_CASES, *CHOICES_CASES, *REDUCE_CASES),
]
