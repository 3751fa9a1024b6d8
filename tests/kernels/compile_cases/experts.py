"""Compile cases of mixtures of experts: GEMMs in Qwen3-30B-A3B's widths, and routing of Qwen3 and GLM-4.5."""

from __future__ import annotations

from deltafront.kernels.experts import gemm, routing


def route_case(biased: bool, groups: int) -> tuple[object, dict[str, str], dict[str, object]]:
    return (
        routing.route_kernel,
        {
            "logits_ptr": "*fp32" if biased else "*bf16",
            "bias_ptr": "*fp32",
            **dict.fromkeys(("expert_ptr", "place_ptr", "counts_ptr"), "*i32"),
            "share_ptr": "*fp32",
            "tokens": "i32",
        },
        {
            "EXPERTS": 128,
            "PER_TOKEN": 8,
            "NORMED": True,
            "BIASED": biased,
            "GROUPS": groups,
            "CHOSEN_GROUPS": groups // 2,
            "SCALE": 2.5 if biased else 1.0,
            "TOKENS": routing._TOKENS,
            "EXPERTS_BLOCK": 128,
            "SLOTS": 8,
        },
    )


ROUTE_CASES = [
    route_case(False, 1),
    route_case(True, 1),
    route_case(True, 8),
    (
        routing.order_kernel,
        {
            **dict.fromkeys(("expert_ptr", "place_ptr", "counts_ptr", "order_ptr"), "*i32"),
            "assignments": "i32",
        },
        {"EXPERTS": 128, "EXPERTS_BLOCK": 128, "ASSIGNMENTS": routing._ASSIGNMENTS},
    ),
]


def gemm_case(
    tile: gemm.Tile, gated: bool, fp8: bool = False, clamped: bool = False
) -> tuple[object, dict[str, str], dict[str, object], dict[str, int]]:
    numbers, scale = ("*fp8e4nv", "*fp32") if fp8 else ("*bf16", "*bf16")
    types = {
        **dict.fromkeys(("x_ptr", "weight_ptr"), numbers),
        **dict.fromkeys(("x_scale_ptr", "weight_scale_ptr"), scale),
        **dict.fromkeys(("order_ptr", "counts_ptr"), "*i32"),
        "share_ptr": "*fp32",
        "out_ptr": "*bf16",
        **({"bias_ptr": "*bf16"} if clamped else {}),
    }
    width, columns = (2048, 768) if gated else (768, 2048)
    sizes = {
        **({} if clamped else {"bias_ptr": None}),
        "GATED": gated,
        "CLAMPED": gated and clamped,
        "FP8": fp8,
        "EXPERTS": 128,
        "EXPERTS_BLOCK": 128,
        "PER_TOKEN": 8,
        "WIDTH": width,
        "COLUMNS": columns,
        "EVEN": True,
        "ROWS_TILE": tile.rows,
        "COLUMNS_TILE": tile.columns,
        "STEP": tile.step_bytes // (1 if fp8 else 2),
    }
    return gemm.experts_kernel, types, sizes, {"num_warps": tile.warps, "num_stages": tile.stages}


GEMM_CASES = [
    gemm_case(tile, gated, fp8) for tile in gemm.TILES for gated in (False, True) for fp8 in (False, True)
]
GEMM_CASES += [gemm_case(tile, gated, clamped=True) for tile in gemm.TILES[:2] for gated in (False, True)]

COMPILE_CASES = [*ROUTE_CASES, *GEMM_CASES]
