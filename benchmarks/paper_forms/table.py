"""Every method at 130,500 tokens, in its paper's form and in ours, on the same 21 documents: docs/papers.md.

The rows come from four files of results, of which each has dense attention of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..accuracy.tables import kept
from ..markdown import Result, markdown

SOURCES = (
    "accuracy_long_h100",
    "accuracy_long_thresholds_h200",
    "accuracy_forms_long_h100",
    "accuracy_ideas_long_h200",
)
LONG, THRESHOLDS, FORMS, IDEAS = range(4)
PAPERS, OURS = "the paper's", "ours"
_NOT_TIMED = "not timed"
_XATTENTION_PAPER = "xattention_paper:stride={},density={}"
_STREAMING = "min_tokens=0,window=768,gamma=16"
ROWS: Sequence[tuple[str, str, int, str]] = (
    ("DPXA", f"{OURS}, as shipped", LONG, "dpxa:density=0.075"),
    ("DPXA", f"{PAPERS}, a share of tiles", LONG, "dpxa_thesis:share=0.07"),
    ("DPXA", f"{PAPERS}, coverage 0.75", THRESHOLDS, "dpxa_thesis:density=0.1197"),
    ("DPXA", f"{PAPERS}, coverage 0.90", THRESHOLDS, "dpxa_thesis:density=0.4043"),
    ("Delta-KV", f"{PAPERS} K̂ and V̂, in a kernel's exact region", LONG, "delta_kv:means=0"),
    ("Delta-KV", f"{OURS}: means", LONG, "delta_kv"),
    ("DeltaXAttention", PAPERS, FORMS, "delta_xattention:share=0.07,means=0"),
    ("DeltaXAttention", f"{OURS} until 0003: means", FORMS, "delta_xattention:share=0.07"),
    ("XAttention", f"{PAPERS}, stride 8, one threshold", THRESHOLDS, "xattention"),
    ("XAttention", f"{PAPERS}, stride 16, one threshold", THRESHOLDS, "xattention:stride=16"),
    ("XAttention", f"{PAPERS}, stride 8, searched", THRESHOLDS, _XATTENTION_PAPER.format(8, 0.2045)),
    ("XAttention", f"{PAPERS}, stride 16, searched", THRESHOLDS, _XATTENTION_PAPER.format(16, 0.2077)),
    ("XAttention", "stride 8, a share of tiles", LONG, "xattention:share=0.07"),
    ("XAttention", "stride 16, a share of tiles", LONG, "xattention:share=0.07,stride=16"),
    ("StreamingLLM", "window 2,048", LONG, "streaming"),
    ("Δ Attention", f"{PAPERS}, γ 64, over streaming", LONG, "streaming+delta"),
    ("Δ Attention", "γ 8", LONG, "streaming+delta:gamma=8"),
    ("Δ Attention", "γ 16", LONG, "streaming+delta:gamma=16"),
    ("Δ Attention", "γ 32", FORMS, "streaming+delta:gamma=32"),
    ("Δ Attention", "γ 128", FORMS, "streaming+delta:gamma=128"),
    ("Δ Attention", "γ 256", FORMS, "streaming+delta:gamma=256"),
    ("Δ Attention", f"{PAPERS} equation 5, γ 8", LONG, "streaming+delta:gamma=8,spread=0"),
    ("Δ Attention", f"{PAPERS} equation 5, γ 64", LONG, "streaming+delta:gamma=64,spread=0"),
    ("Δ Attention", f"{PAPERS}, γ 64, interpolated", FORMS, "streaming_smoothed:linear=1"),
    ("Δ Attention", f"{PAPERS}, γ 64, over vertical-slash", FORMS, "vertical_slash+delta"),
    ("MInference", "vertical-slash, lines of blocks", FORMS, "vertical_slash"),
    ("MInference", "A-shape for every head", FORMS, "streaming:sink=1024,window=4096"),
    ("FlexPrefill", "lines of blocks", FORMS, "flex"),
    ("idea", "a mean for each dropped tile", IDEAS, "mean_tiles:min_tokens=0,share=0.06"),
    ("idea", "masks of every 2nd layer", IDEAS, "shared_masks:min_tokens=0,share=0.06"),
    ("idea", "masks of every 4th layer", IDEAS, "shared_masks:min_tokens=0,share=0.06,every=4"),
    ("idea", "masks by heads' sums", IDEAS, "shared_masks:min_tokens=0,share=0.06,together=1"),
    ("idea", "dense rows where queries change, window 768", IDEAS, f"changed_rows:{_STREAMING}"),
)
"""Paper, form, which of SOURCES, and the row's case there."""
WITHOUT_KERNELS = ("xattention_paper", "streaming_smoothed", "mean_tiles", "shared_masks", "changed_rows")


def forms(*sources: Result) -> str:
    """SOURCES in their order."""
    of = [{row["case"]: row for row in source["rows"] if row["task"] == "needles"} for source in sources]
    answers = "needles over dense's, 95% over documents"
    header = ("paper", "form", "density", "KL", answers, "time over dense's")
    cells = [
        [
            paper,
            f"{form} (`{case}`)",
            f"{of[source][case]['density']:.3f}",
            f"{of[source][case]['kl']:.3f} ± {of[source][case]['kl_error']:.3f}",
            kept(of[source][case]),
            _time(of[source][case], of[source]["dense"]),
        ]
        for paper, form, source, case in ROWS
    ]
    return markdown(header, cells)


def _time(row: Result, dense: Result) -> str:
    """Of selection and attention in all layers."""
    name = row["case"].partition(":")[0]
    return _NOT_TIMED if name in WITHOUT_KERNELS else f"{row['ms'] / dense['ms']:.2f}"
