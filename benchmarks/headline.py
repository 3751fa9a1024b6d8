"""README's table: eight figures that a reader understands without the papers, out of benchmarks/results/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .markdown import Result

Line = tuple[str, str, str, str]
Row = Mapping[str, Any]

HEADER = ("what", "Deltafront", "compared with", "faster")
TOKENS = 131_072
LONGEST = "ttft_dpxa", 524_288
"""Case and tokens that several GPUs are shown with."""


def lines(engine_of_8b: Result, held_out: Result) -> list[Line]:
    """Times of an 8B model, then the answers that a small model keeps by the same means."""
    return [*_times(engine_of_8b), *_answers(held_out)]


def _times(result: Result) -> list[Line]:
    of = {row["case"]: row for row in result["rows"] if row["tokens"] == TOKENS and row["gpus"] == 1}
    sparse, question = of["ttft_dpxa"], of["ttft_question"]
    first = f"First token, sparse attention (`dpxa`, density {sparse['density']})"
    again = "eight blocks recomputed for the question"
    return [
        _timed(first, sparse, of["ttft_fa2_stack"], "the same with FlashAttention-2, dense"),
        _timed("The same in 8 bits (FP8 weights and activations)", of["ttft_dpxa_fp8"], sparse, "16 bits"),
        _on_several(result),
        (
            "First token of a question to a session",
            _value(question),
            _value(of["ttft_question_recompute_8"], again),
            "",
        ),
        _timed("Each further token, 256 selected pages", of["token_delta"], of["token_full"], "all pages"),
    ]


def _timed(what: str, ours: Row, other: Row, name: str) -> Line:
    """Times of two commits are no ratio."""
    if ours.get("commit") != other.get("commit"):
        return what, _value(ours), _value(other, f"{name}, another commit"), ""
    return what, _value(ours), _value(other, name), f"{other['value'] / ours['value']:.2f} ×"


def _value(row: Row, name: str = "") -> str:
    return f"{row['value']:.3g} {row['unit']}" + (f" ({name})" if name else "")


def _on_several(result: Result) -> Line:
    """The longest prompt on as many GPUs as were measured."""
    longest = {row["gpus"]: row for row in result["rows"] if (row["case"], row["tokens"]) == LONGEST}
    many = longest[max(longest)]
    sparse = f"`dpxa`, density {many['density']}"
    what = f"First token, {LONGEST[1]:,} tokens, {many['gpus']} GPUs as stages ({sparse})"
    return _timed(what, many, _alone(many, result), "one GPU")


def _alone(several: Row, result: Result) -> Row:
    """One GPU's time in the run that these several GPUs' row is of, by their efficiency."""
    name, at = several["case"].replace("ttft", "efficiency"), (several["tokens"], several["gpus"])
    (efficiency,) = (
        row for row in result["rows"] if row["case"] == name and (row["tokens"], row["gpus"]) == at
    )
    return {**several, "value": efficiency["value"] * several["gpus"] * several["value"]}


def _answers(result: Result) -> list[Line]:
    """The longest documents: exact answers as a share of those that the way without savings gives."""
    longest = max(row["tokens"] for row in result["rows"])
    of = {row["case"]: row for row in result["rows"] if row["tokens"] == longest}
    sparse, fp8, pages = of["dpxa_default"], of["dense_fp8"], of["delta_default"]
    recomputed = f"Exact answers: `dpxa`, density {sparse['density']:.3f}, eight blocks recomputed"
    selected = f"Exact answers: {pages['density']:.2f} of the pages read in decode"
    return [
        (recomputed, *_kept(sparse, "dense attention")),
        ("Exact answers: 8 bits (FP8), dense attention", *_kept(fp8, "16 bits")),
        (selected, *_kept(pages, "all pages")),
    ]


def _kept(row: Row, full: str) -> tuple[str, str, str]:
    return f"{row['exact'] / row['exact_dense']:.3f}", f"1 ({full}: {row['exact_dense']} answers)", ""
