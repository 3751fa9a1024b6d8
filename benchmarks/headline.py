"""README's table: a line for each figure that says the most, out of what benchmarks/results/ has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .markdown import Result

Line = tuple[str, str, str, str]

HEADER = ("what", "ours", "against", "faster")
TOKENS = 131_072
HEADLINES = (
    ("Dense attention, one layer", "dense", "sdpa_cudnn", "SDPA, cuDNN"),
    ("Block-sparse attention, 8.5% of the tiles", "block_sparse_0.085", "dense", "our dense"),
    ("Delta-KV attention, half of the keys", "delta_kv_50", "dense", "our dense"),
    ("Choosing tiles with DPXA", "dpxa_selection", "xattention_s8_selection", "our XAttention, stride 8"),
    ("Decode step over all pages, 4 requests", "paged_decode", "flashinfer_decode", "FlashInfer"),
    (
        "Decode step over 64 selected pages, 4 requests",
        "paged_decode_64_pages",
        "flashinfer_decode_64_pages",
        "FlashInfer",
    ),
)
"""What it is, our case, the case it is compared with, and what that is; all at TOKENS tokens."""
LONGEST = "ttft_dpxa", 524_288
"""Case and tokens that several GPUs are shown with."""
EQUAL_TIME = "dpxa:density=0.095"
"""Beside it XAttention has a level that takes the same time."""


def lines(
    kernels: Result, held_out: Result, equal_time: Result, on_a_cpu: Result, engine_of_8b: Result
) -> list[Line]:
    """The service with an 8B model, a line for each kernel of HEADLINES, then what a small model answers."""
    ms = {row["case"]: row["ms"] for row in kernels["rows"] if row["tokens"] == TOKENS}
    of_kernels = [
        (what, f"{ms[ours]:.3g} ms", f"{ms[other]:.3g} ms ({name})", f"{ms[other] / ms[ours]:.2f} ×")
        for what, ours, other, name in HEADLINES
    ]
    of_8b = _of_8b(engine_of_8b)
    answers = [_at_equal_time(equal_time), *_answers(held_out), _corrected(on_a_cpu)]
    return [*of_8b[:2], _answers_in_fp8(held_out), *of_8b[2:], *of_kernels, *answers]


def _answers_in_fp8(result: Result) -> Line:
    """What FP8 costs, to stand beside what it saves."""
    (one,) = (row for row in result["rows"] if row["case"] == "dense_fp8")
    kept = f"{one['exact'] / one['exact_dense']:.3f}"
    read = f"dense attention, {one['ms']:.0f} ms, KL {one['kl']:.3f}"
    what = f"Exact answers of {one['exact_dense']} kept with FP8 alone, {read}"
    return (what, kept, "1 (16 bits)", "")


def _of_8b(result: Result) -> list[Line]:
    """Times through gRPC on one GPU, decode beside prefill; and of the longest prompt on several."""
    of = {row["case"]: row for row in result["rows"] if row["tokens"] == TOKENS and row["gpus"] == 1}
    density = f"`dpxa` at {of['ttft_dpxa']['density']} of the tiles"
    pairs = (
        (f"8B: first token, {density}", "ttft_dpxa", "ttft_fa2_stack", "the same with FlashAttention-2"),
        ("8B: the same with FP8 weights and activations", "ttft_dpxa_fp8", "ttft_dpxa", "bfloat16"),
        ("8B: a token, 256 selected pages", "token_delta", "token_full", "all pages"),
        ("8B: a token of four requests at once", "batch4_token_delta", "batch4_token_full", "all pages"),
    )
    compared = [
        (what, of[ours], of[other], name if _together(of[ours], of[other]) else f"{name}, a later commit")
        for what, ours, other, name in pairs
    ]
    longest = {row["gpus"]: row for row in result["rows"] if (row["case"], row["tokens"]) == LONGEST}
    many = longest[max(longest)]
    at = f"{LONGEST[1]} tokens, `dpxa` at {many['density']}"
    compared.append(
        (f"8B: first token, {at}, {many['gpus']} GPUs as stages", many, _alone(many, result), "one GPU")
    )
    question, again = of["ttft_question"], of["ttft_question_recompute_8"]
    asked = f"{question['value']:.3g} s", f"{again['value']:.3g} s (eight blocks computed again)"
    return [
        *(
            (
                what,
                f"{ours['value']:.3g} {ours['unit']}",
                f"{other['value']:.3g} {other['unit']} ({name})",
                f"{other['value'] / ours['value']:.2f} ×" if _together(ours, other) else "",
            )
            for what, ours, other, name in compared
        ),
        ("8B: first token of a question to a session", *asked, ""),
    ]


def _together(ours: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Times of two commits are no ratio."""
    return bool(ours.get("commit") == other.get("commit"))


def _alone(several: Mapping[str, Any], result: Result) -> dict[str, Any]:
    """One GPU's time in the run that these several GPUs' row is of, by their efficiency."""
    name, at = several["case"].replace("ttft", "efficiency"), (several["tokens"], several["gpus"])
    (efficiency,) = (
        row for row in result["rows"] if row["case"] == name and (row["tokens"], row["gpus"]) == at
    )
    return {**several, "value": efficiency["value"] * several["gpus"] * several["value"]}


def _at_equal_time(result: Result) -> Line:
    """Both methods calibrated; XAttention's level that takes the time most like ours."""
    of = {row["method"]: row for row in result["rows"]}
    ours = of[EQUAL_TIME]
    calibrated = (row for name, row in of.items() if name.startswith("xattention") and "density=" in name)
    other = min(calibrated, key=lambda row: abs(row["ms"] - ours["ms"]))
    read = f"`dpxa` at {ours['density']:.3f} of the tiles, {ours['ms']:.0f} ms in chunks of 65,536"
    rival = f"(XAttention, calibrated likewise, {other['density']:.3f}, {other['ms']:.0f} ms)"
    return f"KL to dense's predictions, {read}", f"{ours['kl']:.3f}", f"{other['kl']:.3f} {rival}", ""


def _answers(result: Result) -> list[Line]:
    """What `dpxa` and DELTA keep of dense's answers, the longest documents."""
    longest = max(row["tokens"] for row in result["rows"])
    by_case = {row["case"]: row for row in result["rows"] if row["tokens"] == longest}
    again, alone = by_case["dpxa_default"], by_case["dpxa_default_alone"]
    delta, full = by_case["delta_default"], by_case["delta_full"]
    kept, without, decoded = (f"{row['exact'] / row['exact_dense']:.3f}" for row in (again, alone, delta))
    whole = f"`dpxa` with recomputed blocks, {again['density']:.3f} of the tiles, {again['ms']:.0f} ms"
    least = f"(without them, {alone['density']:.3f}, {alone['ms']:.0f} ms)"
    pages = f"DELTA decode at {delta['density']:.2f} of the pages, {delta['ms']:.0f} ms a step of 100"
    logp = f"{again['logp_difference']:+.2f}", f"{alone['logp_difference']:+.2f} {least}"
    return [
        (f"Exact answers of dense's {again['exact_dense']} kept, {whole}", kept, f"{without} {least}", ""),
        ("Log-probability of right answers less dense's, the same", *logp, ""),
        (f"Exact answers kept, {pages}", decoded, f"1 (all, {full['ms']:.0f} ms)", ""),
    ]


def _corrected(result: Result) -> Line:
    """What the Δ correction does to the method that its paper begins with."""
    of = {row["case"]: row for row in result["rows"]}
    with_delta, without = of["streaming+delta"], of["streaming"]
    tokens = f"{with_delta['tokens']} tokens on a CPU, {with_delta['density']:.2f} of the tiles"
    return (
        f"KL with the Δ correction, `streaming+delta`, {tokens}, {with_delta['ms'] / 1000:.0f} s",
        f"{with_delta['kl']:.3f}",
        f"{without['kl']:.3f} (`streaming`, {without['density']:.2f}, {without['ms'] / 1000:.0f} s)",
        "",
    )
