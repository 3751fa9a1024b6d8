"""README's table: what each saving makes of a time, and of answers, out of benchmarks/results/.

Times are an 8B model's with random weights, answers a small model's. A row has both of one configuration;
where they were measured at different densities, the row says at which. Answers of texts that nothing was
tuned on (docs/experiments) stand before those of sets A and B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .accuracy.tables import kept
from .markdown import Result

Line = tuple[str, str, str, str, str]
Row = Mapping[str, Any]

HEADER = ("what", "Deltafront", "compared with", "faster", "exact answers kept")
TOKENS = 131_072
LONGEST = 524_288
"""Tokens that several GPUs are shown with."""
_SHOWN = (
    "ttft_dpxa", "ttft_fa2_stack", "ttft_dense", "mapped ttft_dpxa_recompute_8", "mapped ttft_dpxa",
    "vllm_ttft_dense", "ttft_dpxa_fp8", "long ttft_dpxa", "long ttft_dense", "ttft_question_recompute_8",
    "ttft_question", "token_delta", "token_full",
)  # fmt: skip
SHIPPED, RANKED, SELECTED = "dpxa:density=0.075", "dpxa:share=0.05", "decode 8,14,18,21:256"


def times(engine_of_8b: Result) -> dict[str, Row]:
    """Return the rows of time that the table shows, by case. K/V has 16 bits. `mapped …` has one copy of
    weights and K/V, others two; `long …` is the longest prompt, on as many GPUs as were measured."""
    ours = [row for row in engine_of_8b["rows"] if "kv_dtype" not in row and "shape" not in row]
    alone = [row for row in ours if (row["tokens"], row["gpus"]) == (TOKENS, 1)]
    longest = [row for row in ours if row["tokens"] == LONGEST]
    most = max((row["gpus"], row.get("ranks", 1)) for row in longest)
    together = [row for row in longest if (row["gpus"], row.get("ranks", 1)) == most]
    found = {row["case"]: row for row in alone if row.get("decode_gpu") != "mapped"}
    found |= {f"mapped {row['case']}": row for row in alone if row.get("decode_gpu") == "mapped"}
    found |= {f"long {row['case']}": row for row in together}
    return {case: found[case] for case in _SHOWN}


def lines(
    engine_of_8b: Result,
    held_out: Result,
    untuned: Result,
    in_fp8: Result,
    far: Result,
    served: Result,
    decoded: Result,
) -> list[Line]:
    """held_out: of sets A and B. The others are of texts that nothing was tuned on: untuned, answers after
    prefill; in_fp8, the same with FP8; far, KL beyond 131,072 tokens; served, answers through gRPC; decoded,
    after dense prefill."""
    of = times(engine_of_8b)
    longest = max(row["tokens"] for row in held_out["rows"])
    answers = {row["case"]: row for row in held_out["rows"] if row["tokens"] == longest}
    sparse, asked, whole = of["ttft_dpxa"], of["mapped ttft_dpxa_recompute_8"], of["long ttft_dpxa"]
    dense = "our dense attention"
    peer = of["vllm_ttft_dense"], f"vLLM {of['vllm_ttft_dense']['version']}, dense"
    through_grpc = _untuned(served, "dpxa", " before the blocks")
    alone = f"{_value(of['mapped ttft_dpxa'])} without a question"
    return [
        (
            *_timed(
                f"First token, sparse attention (`dpxa`, density {sparse['density']})",
                sparse,
                (of["ttft_fa2_stack"], "FlashAttention-2, dense"),
                (of["ttft_dense"], dense),
            ),
            f"{_untuned(untuned, SHIPPED)}; {_kept(answers, 'dpxa_default_alone', 'dpxa_alone')}",
        ),
        (
            *_timed(
                "First token of a prompt with its question, eight blocks recomputed for it"
                f" (`dpxa`, density {asked['density']}, one copy of weights and K/V; {alone})",
                asked,
                peer,
            ),
            f"{through_grpc}; with DELTA, as shipped, {kept(_needles(served, 'shipped'))}",
        ),
        (
            *_timed(
                "The first row in 8 bits (FP8 weights and activations)",
                of["ttft_dpxa_fp8"],
                (sparse, "16 bits, the same density"),
            ),
            f"{_untuned(in_fp8, f'{SHIPPED} fp8')}, as a share of dense attention's in 16 bits; `dpxa` in 16"
            f" bits keeps {kept(_needles(in_fp8, SHIPPED))}",
        ),
        (
            *_timed(
                f"First token, {LONGEST:,} tokens, {whole['gpus']} GPUs as stages"
                f" (`dpxa`, density {whole['density']})",
                whole,
                (of["long ttft_dense"], dense),
            ),
            _far(far),
        ),
        (
            "First token of a question to a session, eight blocks recomputed for it",
            _value(of["ttft_question_recompute_8"]),
            _value(of["ttft_question"], "none recomputed"),
            "",
            f"{through_grpc}; {_kept(answers, 'dpxa_default')}, the blocks counted; none recomputed: see the"
            " first row",
        ),
        (
            *_timed(
                "Each further token, 256 selected pages", of["token_delta"], (of["token_full"], "all pages")
            ),
            f"after dense prefill {_untuned(decoded, SELECTED, None)};"
            f" {kept(answers['delta_256_pages'])}, {_documents(answers['delta_256_pages'])}",
        ),
    ]


def _timed(what: str, ours: Row, *others: tuple[Row, str]) -> tuple[str, str, str, str]:
    """Times of two commits are no ratio."""
    compared = [
        _value(other, name if _same_commit(ours, other) else f"{name}, another commit")
        for other, name in others
    ]
    ratios = [f"{other['value'] / ours['value']:.2f} ×" for other, _ in others if _same_commit(ours, other)]
    return what, _value(ours), ", ".join(compared), ", ".join(ratios)


def _same_commit(one: Row, other: Row) -> bool:
    return bool(one.get("commit") == other.get("commit"))


def _value(row: Row, name: str = "") -> str:
    return f"{row['value']:.3g} {row['unit']}" + (f" ({name})" if name else "")


def _kept(answers: Mapping[str, Row], *cases: str) -> str:
    rows = [answers[case] for case in cases]
    return "; ".join(f"{kept(row)} at density {row['density']:.3f}, {_documents(row)}" for row in rows)


def _needles(result: Result, case: str) -> Row:
    rows: list[Row] = [row for row in result["rows"] if (row["case"], row["task"]) == (case, "needles")]
    (row,) = rows
    return row


def _untuned(result: Result, case: str, counted: str | None = "") -> str:
    """counted: what stands behind the density; None: no density."""
    row = _needles(result, case)
    density = "" if counted is None else f" at density {row['density']:.3f}{counted}"
    return f"{kept(row)}{density}, {row['documents']} documents that nothing was tuned on"


def _far(result: Result) -> str:
    """KL of the longest prompts beside that of the shortest, at an equal share of tiles."""
    shortest, *_, longest = sorted(
        (row for row in result["rows"] if row["case"] == RANKED), key=lambda row: row["tokens"]
    )
    return (
        f"not asked at this length; KL {longest['kl']:.3f} at density {longest['density']:.3f},"
        f" {longest['documents']} documents that nothing was tuned on, {shortest['kl']:.3f} at"
        f" {shortest['tokens']:,} tokens"
    )


def _documents(row: Row) -> str:
    return f"{row['documents']} documents of set {row['set']}"
