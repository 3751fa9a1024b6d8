"""Draws docs/frontier.svg: which share of dense attention's RULER score each setting keeps, by density. Each
real model and prompt length has a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deltafront.benchmarks.headline import Row
from deltafront.benchmarks.markdown import Result
from deltafront.service.cli.evaluation.plot import line, text
from deltafront.workers.evaluation.planner import GOAL

_WIDTH, _ACROSS, _HEIGHT, _LEFT, _TOP = 250, 204, 220, 44, 34
"""Pixels: of a plot with its labels, across and down a plot, beside and above the first."""
_DENSITIES, _RATIOS = (0.07, 0.6), (0.65, 1.1)
_COLOURS = {
    (True, True): "#1f6feb",
    (False, True): "#2da44e",
    (True, False): "#bf8700",
    (False, False): "#8b949e",
}
"""By whether a setting has the Δ correction, and recomputed blocks."""
_KINDS = ("Δ correction, recomputed blocks", "recomputed blocks", "Δ correction", "neither")


def svg(result: Result) -> str:
    """result: The content of answers_real_models.json. Its rows of DELTA's decode are left out."""
    rows = [row for row in result["rows"] if "/" not in row["method"]]
    panels = sorted({(row["size"], row["tokens"]) for row in rows})
    width, height = _WIDTH * len(panels) + _LEFT, _HEIGHT + _TOP + 62
    drawn = [
        _panel(
            at * _WIDTH + _LEFT, f"{size}, {tokens:,} tokens", [row for row in rows if _is(row, size, tokens)]
        )
        for at, (size, tokens) in enumerate(panels)
    ]
    legend = "".join(
        f'<circle cx="{_LEFT + 8 + 190 * at}" cy="{height - 12}" r="4" fill="{colour}"/>'
        f"{text(_LEFT + 17 + 190 * at, height - 8, kind)}"
        for at, (kind, colour) in enumerate(zip(_KINDS, _COLOURS.values(), strict=True))
    )
    title = "Share of dense attention's score by density of prefill"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-label="{title}" font-family="sans-serif" font-size="11">'
    )
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, background, *drawn, legend, "</svg>", ""])


def _is(row: Row, size: str, tokens: int) -> bool:
    return (row["size"], row["tokens"]) == (size, tokens)


def _panel(left: int, title: str, rows: Sequence[Row]) -> str:
    right, bottom = left + _ACROSS, _TOP + _HEIGHT
    levels = [
        line(left, _y(level), right, _y(level), colour="#d0d7de", dash="6 3" if level == GOAL else "")
        + text(left - 30, _y(level) + 4, f"{level:.2f}")
        for level in (0.7, 0.8, 0.9, GOAL, 1.0)
    ]
    densities = [text(left + _x(density) - 8, bottom + 14, f"{density}") for density in (0.1, 0.2, 0.4)]
    return "\n".join(
        [
            text(left, 18, title, weight="bold"),
            *levels,
            *densities,
            *(_point(left, row) for row in rows),
        ]
    )


def _point(left: int, row: Row) -> str:
    """Draw a setting. The larger the circle, the more samples."""
    ratio, x = row["score"] / _dense(row), left + _x(row["density"])
    colour = _COLOURS["+delta" in row["method"], row["blocks"] > 0]
    label = f"{row['method']}, {row['blocks']} blocks: {ratio:.3f} of {row['samples']} samples"
    return (
        f'<circle cx="{x:.1f}" cy="{_y(ratio):.1f}" r="{2 + row["samples"] / 60:.1f}" fill="{colour}"'
        f' fill-opacity="0.7"><title>{label}</title></circle>'
    )


def _dense(row: Row) -> float:
    """Dense attention's score; the mean of a range such as 0.81–0.82."""
    ends = [float(end) for end in str(row["dense"]).split("–")]
    return sum(ends) / len(ends)


def _x(density: float) -> float:
    low, high = map(math.log, _DENSITIES)
    return (math.log(density) - low) / (high - low) * _ACROSS


def _y(ratio: float) -> float:
    low, high = _RATIOS
    return _TOP + (high - ratio) / (high - low) * _HEIGHT
