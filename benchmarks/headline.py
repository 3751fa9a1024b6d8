"""Makes README's table of times, its chart and its table of accuracy from benchmarks/results/.

Times are measured with an 8B shape and random weights, accuracy with real models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltafront.benchmarks.markdown import Result, markdown, source

Line = tuple[str, str, str, str]
Row = Mapping[str, Any]

HEADER = ("131,072 tokens, one H200", "Deltafront", "compared with", "faster")
TOKENS = 131_072
LONGEST = 524_288
"""Prompt length of the table's row with several GPUs, in tokens."""
_SPARSE = "mapped ttft_dpxa+delta:share=0.06,gamma=64,spread=0.25_recompute_32"
_SHOWN = (
    _SPARSE, "mapped ttft_dense", "vllm_ttft_dense", "long ttft_dpxa", "long ttft_dense", "token_delta",
    "token_full",
)  # fmt: skip


def times(engine_of_8b: Result) -> dict[str, Row]:
    """Return the rows of measured times that the table shows, by case: TOKENS tokens on one GPU, the 8B
    shape, a 16-bit KV cache.

    In `mapped …`, prefill and decode share one copy of weights and KV cache. `long …` is the prompt of
    LONGEST tokens, on the largest number of GPUs that was measured.
    """
    ours = [row for row in engine_of_8b["rows"] if "kv_dtype" not in row and "shape" not in row]
    alone = [row for row in ours if (row["tokens"], row["gpus"]) == (TOKENS, 1)]
    longest = [row for row in ours if row["tokens"] == LONGEST]
    most = max((row["gpus"], row.get("ranks", 1)) for row in longest)
    together = [row for row in longest if (row["gpus"], row.get("ranks", 1)) == most]
    found = {row["case"]: row for row in alone if row.get("decode_gpu") != "mapped"}
    found |= {f"mapped {row['case']}": row for row in alone if row.get("decode_gpu") == "mapped"}
    found |= {f"long {row['case']}": row for row in together}
    return {case: found[case] for case in _SHOWN}


def lines(engine_of_8b: Result) -> list[Line]:
    """Make the lines of README's table of times."""
    of = times(engine_of_8b)
    sparse, whole = of[_SPARSE], of["long ttft_dpxa"]
    dense = "our dense attention"
    vllm = of["vllm_ttft_dense"], f"vLLM {of['vllm_ttft_dense']['version']}, dense"
    return [
        _timed("First token, dense (the default)", of["mapped ttft_dense"], vllm),
        _timed(
            f"First token, density {sparse['density']:.2f}, 32 recomputed blocks",
            sparse,
            vllm,
            (of["mapped ttft_dense"], dense),
        ),
        _timed(
            f"First token, {LONGEST:,} tokens, {whole['gpus']} H200s, density {whole['density']}",
            whole,
            (of["long ttft_dense"], dense),
        ),
        _timed("Each further token, 256 selected pages", of["token_delta"], (of["token_full"], "all pages")),
    ]


def bars(engine_of_8b: Result) -> list[tuple[str, float]]:
    """Return the chart's bars: a label, and seconds to the first token of 131,072 tokens."""
    of = times(engine_of_8b)
    vllm, sparse = of["vllm_ttft_dense"], of[_SPARSE]
    return [
        (f"vLLM {vllm['version']}, dense", vllm["value"]),
        ("Deltafront, dense", of["mapped ttft_dense"]["value"]),
        (f"Deltafront, sparse (density {sparse['density']:.2f})", sparse["value"]),
    ]


def chart(engine_of_8b: Result) -> str:
    """Draw the bars as an SVG."""
    shown = bars(engine_of_8b)
    longest = max(seconds for _, seconds in shown)
    colours = ("#8b949e", "#6f9ceb", "#1f6feb")
    drawn = [
        f'<text x="8" y="{22 + 48 * at}">{label}</text>'
        f'<rect x="8" y="{28 + 48 * at}" width="{480 * seconds / longest:.0f}" height="18" fill="{colour}"/>'
        f'<text x="{16 + 480 * seconds / longest:.0f}" y="{42 + 48 * at}">{seconds:.1f} s</text>'
        for at, ((label, seconds), colour) in enumerate(zip(shown, colours, strict=True))
    ]
    title = f"Seconds to the first token of {TOKENS:,} tokens"
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 156" width="560" height="156" role="img"'
        f' aria-label="{title}" font-family="sans-serif" font-size="13" fill="#57606a">'
    )
    return "\n".join([head, *drawn, "</svg>", ""])


def answers(result: Result, readme: bool = True) -> str:
    """Make the table of real models' RULER scores, dense and sparse.

    Args:
        readme: Show only rows with a `readme` label, named by that label. Else all rows that are not
            `unlisted`.
    """
    numbers = ("density", "dense", "sparse", "lost, won")
    names = ("model, tokens", "prefill") if readme else ("model", "tokens", "prefill", "recomputed")
    shown = [row for row in result["rows"] if ("readme" in row if readme else "unlisted" not in row)]
    rows = [_answer(row, readme) for row in shown]
    measured = "" if readme else f"\n\n{source(result)}. Texts: {result['text']}."
    return markdown((*names, *numbers), rows) + measured


def _answer(row: Row, readme: bool) -> Sequence[object]:
    numbers = (
        f"{row['density']:.2f}",
        row["dense"],
        f"{row['score']:.3f}",
        f"{row['lost']}, {row['won']} of {row['samples']}",
    )
    tokens = f"{row['tokens']:,}"
    if readme:
        return [f"{row['size']}, {tokens}", row["readme"], *numbers]
    return [row["model"], tokens, f"`{row['method']}`", row["blocks"] or None, *numbers]


def _timed(what: str, ours: Row, *others: tuple[Row, str]) -> Line:
    """Make a table line: our time, the other times, and their ratios to ours. A ratio appears only if both
    times were measured at the same commit."""
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
