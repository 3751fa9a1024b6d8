"""Makes the table of docs/methods.md: the papers' methods at 130,500 tokens, on the same 21 documents.

The rows come from three results files, each with its own measurement of dense attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltafront.benchmarks.accuracy.tables import kept
from deltafront.benchmarks.markdown import Result, markdown

SOURCES = (
    "accuracy_long_h100",
    "accuracy_long_thresholds_h200",
    "accuracy_forms_long_h100",
)
RUNS = ("0001 `long`", "0001 `long-thresholds`", "0003 `forms-long`")
LONG, THRESHOLDS, FORMS = range(3)
_SEARCHED = "stride {}, the paper's search on one document of 12,288 tokens"
_PAPER_CASE = "xattention_paper:stride={},density={}"
ROWS: Sequence[tuple[str, str, int, str]] = (
    ("DPXA", "ours, as shipped", LONG, "dpxa:density=0.075"),
    ("DPXA", "the thesis's, a share of tiles", LONG, "dpxa_thesis:share=0.07"),
    ("DPXA", "the thesis's, coverage 0.75", THRESHOLDS, "dpxa_thesis:density=0.1197"),
    ("DPXA", "the thesis's, coverage 0.90", THRESHOLDS, "dpxa_thesis:density=0.4043"),
    ("Delta-KV", "anchors' own rows, as in the thesis; our exact region", LONG, "delta_kv:means=0"),
    ("Delta-KV", "ours: means of runs", LONG, "delta_kv"),
    (
        "DeltaXAttention",
        "the thesis's packing, a share of tiles",
        FORMS,
        "delta_xattention:share=0.07,means=0",
    ),
    ("DeltaXAttention", "means of runs, a share of tiles", FORMS, "delta_xattention:share=0.07"),
    ("XAttention", "the paper's, stride 8, one threshold", THRESHOLDS, "xattention"),
    ("XAttention", "the paper's, stride 16, one threshold", THRESHOLDS, "xattention:stride=16"),
    ("XAttention", _SEARCHED.format(8), THRESHOLDS, _PAPER_CASE.format(8, 0.2045)),
    ("XAttention", _SEARCHED.format(16), THRESHOLDS, _PAPER_CASE.format(16, 0.2077)),
    ("XAttention", "stride 8, a share of tiles", LONG, "xattention:share=0.07"),
    ("XAttention", "stride 16, a share of tiles", LONG, "xattention:share=0.07,stride=16"),
    ("StreamingLLM", "sink 128, window 2,048", LONG, "streaming"),
    ("Δ Attention", "the paper's γ 64, over this streaming", LONG, "streaming+delta"),
    ("Δ Attention", "γ 8", LONG, "streaming+delta:gamma=8"),
    ("Δ Attention", "γ 16", LONG, "streaming+delta:gamma=16"),
    ("Δ Attention", "γ 32", FORMS, "streaming+delta:gamma=32"),
    ("Δ Attention", "γ 128", FORMS, "streaming+delta:gamma=128"),
    ("Δ Attention", "γ 256", FORMS, "streaming+delta:gamma=256"),
    ("Δ Attention", "equation 5, γ 8", LONG, "streaming+delta:gamma=8,spread=0"),
    ("Δ Attention", "equation 5, γ 64", LONG, "streaming+delta:gamma=64,spread=0"),
    ("Δ Attention", "appendix J, interpolated, γ 64", FORMS, "streaming_smoothed:linear=1"),
    ("Δ Attention", "γ 64, over vertical-slash of blocks", FORMS, "vertical_slash+delta"),
    ("MInference", "vertical-slash, lines of blocks", FORMS, "vertical_slash"),
    ("MInference", "A-shape for every head", FORMS, "streaming:sink=1024,window=4096"),
    ("FlexPrefill", "lines of blocks", FORMS, "flex"),
)
"""Paper, method, index of the results file in SOURCES, and the row's case there."""
CASES_TODAY = {"delta_xattention:share=0.07": "delta_xattention:share=0.07,means=1"}
"""Old cases whose default has changed since, with the case that computes the same today."""
NO_KERNELS = ("xattention_paper", "streaming_smoothed")
"""Methods without kernels. The table omits their times."""


def forms(*sources: Result) -> str:
    """Make the table from the results of SOURCES, in their order."""
    of = [{row["case"]: row for row in source["rows"] if row["task"] == "needles"} for source in sources]
    answers = "needles over dense's, 95% over documents"
    header = ("paper", "form", "density", "KL", answers, "time over dense's", "run")
    cells = [
        [
            paper,
            f"{form} (`{CASES_TODAY.get(case, case)}`)",
            f"{of[source][case]['density']:.3f}",
            f"{of[source][case]['kl']:.3f} ± {of[source][case]['kl_error']:.3f}",
            kept(of[source][case]),
            _time(of[source][case], of[source]["dense"]),
            RUNS[source],
        ]
        for paper, form, source, case in ROWS
    ]
    return markdown(header, cells)


def _time(row: Result, dense: Result) -> str:
    """Divide the time of selection and attention in all layers by the time of dense attention."""
    name = row["case"].partition(":")[0]
    return "left out" if name in NO_KERNELS else f"{row['ms'] / dense['ms']:.2f}"
