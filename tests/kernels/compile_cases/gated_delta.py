"""Compile cases of gated delta networks, in the sizes of Qwen3.5."""

from __future__ import annotations

from deltafront.kernels.gated_delta import convolution, gated_norm, step_kernels

CHANNELS = 2 * 16 * 128 + 32 * 128

COMPILE_CASES = [
    (
        convolution.convolve_kernel,
        {
            **dict.fromkeys(("x_ptr", "weight_ptr", "before_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(("tokens", "x_stride"), "i32"),
        },
        {
            "CHANNELS": CHANNELS,
            "INPUTS": 4,
            "ROWS": convolution._ROWS,
            "BLOCK": convolution._CHANNELS,
        },
    ),
    (
        gated_norm.gated_norm_kernel,
        {
            **dict.fromkeys(("x_ptr", "z_ptr", "out_ptr"), "*bf16"),
            "weight_ptr": "*fp32",
            "z_stride": "i32",
            "eps": "fp32",
        },
        {"HEADS": 32, "DIM": 128, "BLOCK_HEADS": 16, "BLOCK": 128},
    ),
    (
        step_kernels.step_convolve_kernel,
        {
            **dict.fromkeys(("x_ptr", "weight_ptr", "conv_ptr", "out_ptr"), "*bf16"),
            "slots_ptr": "*i64",
            **dict.fromkeys(("x_stride", "conv_stride"), "i32"),
        },
        {"CHANNELS": CHANNELS, "INPUTS": 4, "BLOCK": step_kernels._CHANNELS},
    ),
    (
        step_kernels.step_delta_kernel,
        {
            **dict.fromkeys(("qkv_ptr", "ba_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(("decay_ptr", "bias_ptr", "recurrent_ptr"), "*fp32"),
            "slots_ptr": "*i64",
            **dict.fromkeys(("ba_stride", "recurrent_stride"), "i32"),
            "scale": "fp32",
        },
        {"HEADS": 32, "GROUPS": 16, "KEY_DIM": 128, "DIM": 128, "KEYS": 128, "BLOCK": 32},
    ),
]
