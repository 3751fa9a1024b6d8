"""Compile cases of paged decode."""

from __future__ import annotations

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.paged_decode import kernel, kernel_int8, page_selection

ATTEND = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "p_RBHT_ptr"), "*bf16"),
    **dict.fromkeys(("table_ptr", "lengths_ptr", "selected_ptr", "counts_ptr"), "*i32"),
    **dict.fromkeys(("acc_RHCD_ptr", "m_RHC_ptr", "l_RHC_ptr", "m_REHW_ptr"), "*fp32"),
    "scale_log2": "fp32",
    **dict.fromkeys(("stride_qr", "stride_qh"), "i32"),
    **dict.fromkeys(("stride_kp", "stride_ks", "stride_kg"), "i32"),
    **dict.fromkeys(("stride_vp", "stride_vs", "stride_vg"), "i32"),
    **dict.fromkeys(("stride_tr", "stride_sr", "bundles", "requests"), "i32"),
    "splits_R_ptr": "*i32",
}

SIZES = {"GROUP": 4, "ROWS": 16, "D": 128, "BLOCK": 64, "WINDOW": 0}

PLAIN = {"SPARSE": False, "SCORED": False}

PARTS = {**dict.fromkeys(("acc_RHCD_ptr", "m_RHC_ptr", "l_RHC_ptr"), "*fp32"), "splits_R_ptr": "*i32"}

MERGED = {"out_ptr": "*bf16", "lse_ptr": "*fp32", "max_splits": "i32", "heads": "i32"}

SCORE = {
    "p_RBHT_ptr": "*bf16",
    **dict.fromkeys(("m_REHW_ptr", "lse_ptr", "score_ptr"), "*fp32"),
    "lengths_ptr": "*i32",
    **dict.fromkeys(("heads", "columns", "bundles"), "i32"),
}

ATTEND_CASES = [
    (kernel._attend, ATTEND, {**SIZES, "SPARSE": False, "SCORED": False}),
    (kernel._attend, ATTEND, {**SIZES, "SPARSE": False, "SCORED": True}),
    (kernel._attend, ATTEND, {**SIZES, "SPARSE": True, "SCORED": False}),
    (kernel._attend, ATTEND, {**SIZES, "GROUP": 3, "D": 64, "BLOCK": 128, "SPARSE": False, "SCORED": True}),
    *(
        (kernel._attend, ATTEND, {**SIZES, "GROUP": 2, "D": dim, "WINDOW": 1024, **PLAIN})
        for dim in (128, 256)
    ),
    (kernel._attend, ATTEND, {**SIZES, "GROUP": 2, "D": 256, "SPARSE": False, "SCORED": True}),
    (kernel._attend, ATTEND, {**SIZES, "GROUP": 2, "D": 256, "SPARSE": True, "SCORED": False}),
    (kernel._merge, {**PARTS, **MERGED}, {"C": 8, "M": 32, "D": 128}),
    *((kernel._score, SCORE, {"H": 32, "BLOCK": 64, "BLOCKS": 1, "SPAN": span}) for span in (PAGE_TOKENS, 1)),
]


ATTEND_INT8 = {
    "q_ptr": "*bf16",
    **dict.fromkeys(("k_ptr", "v_ptr"), "*i16"),
    **dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*u8"),
    **dict.fromkeys(("table_ptr", "lengths_ptr", "selected_ptr", "counts_ptr", "splits_R_ptr"), "*i32"),
    **dict.fromkeys(("acc_RHCD_ptr", "m_RHC_ptr", "l_RHC_ptr", "p_RBHT_ptr", "m_REHW_ptr"), "*fp32"),
    "scale_log2": "fp32",
    **dict.fromkeys(("stride_qr", "stride_qh", "stride_p", "stride_s", "stride_g"), "i32"),
    **dict.fromkeys(("stride_scale_p", "stride_scale_s", "stride_tr", "stride_sr"), "i32"),
    **dict.fromkeys(("bundles", "requests"), "i32"),
}

INT8_SIZES = {**SIZES, "BLOCK": 128}

ATTEND_INT8_CASES = [
    (kernel_int8._attend_int8, ATTEND_INT8, {**INT8_SIZES, "SPARSE": sparse, "SCORED": scored})
    for sparse, scored in ((False, False), (False, True), (True, False))
] + [
    (kernel_int8._attend_int8, ATTEND_INT8, {**INT8_SIZES, "WINDOW": 1024, **PLAIN}),
    (kernel_int8._attend_int8, ATTEND_INT8, {**INT8_SIZES, "D": 256, "BLOCK": 64, **PLAIN}),
    (
        kernel_int8._attend_int8,
        {**ATTEND_INT8, "q_ptr": "*fp16"},
        {**INT8_SIZES, "GROUP": 3, "D": 64, "SPARSE": False, "SCORED": True},
    ),
    (
        kernel._score,
        {**SCORE, "p_RBHT_ptr": "*fp32"},
        {"H": 32, "BLOCK": 128, "BLOCKS": 1, "SPAN": PAGE_TOKENS},
        {"num_warps": 4},
    ),
]


SELECT_CASES = [
    (
        page_selection._select,
        {
            "score_ptr": "*fp32",
            "lengths_ptr": "*i32",
            "selected_ptr": "*i32",
            "counts_ptr": "*i32",
            "stride_sr": "i32",
            "columns": "i32",
            "budget": "i32",
            "recency": "i32",
        },
        {"N": 8192, "K": 64},
    ),
]

COMPILE_CASES = [*ATTEND_CASES, *ATTEND_INT8_CASES, *SELECT_CASES]
