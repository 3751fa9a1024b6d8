"""Draws docs/frontier.svg: which share of dense attention's RULER score each setting keeps, by density. Each
real model and prompt length has a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deltafront.benchmarks.markdown import Result

Row = Mapping[str, Any]

_WIDTH, _HEIGHT, _LEFT, _TOP = 250, 220, 44, 34
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
        f'<text x="{_LEFT + 17 + 190 * at}" y="{height - 8}">{kind}</text>'
        for at, (kind, colour) in enumerate(zip(_KINDS, _COLOURS.values(), strict=True))
    )
    title = "Share of dense attention's score by density of prefill"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-label="{title}" font-family="sans-serif" font-size="11"'
        ' fill="#57606a">'
    )
    return "\n".join([head, *drawn, legend, "</svg>", ""])


def _is(row: Row, size: str, tokens: int) -> bool:
    return (row["size"], row["tokens"]) == (size, tokens)


def _panel(left: int, title: str, rows: Sequence[Row]) -> str:
    right, bottom = left + _WIDTH - 20, _TOP + _HEIGHT
    levels = [
        f'<path d="M{left} {_y(level):.0f}H{right}" stroke="#d0d7de" stroke-dasharray="{dash}"/>'
        f'<text x="{left - 30}" y="{_y(level) + 4:.0f}">{level:.2f}</text>'
        for level, dash in ((0.7, "1 4"), (0.8, "1 4"), (0.9, "1 4"), (0.97, "6 3"), (1.0, "0"))
    ]
    densities = [
        f'<text x="{left + _x(density) - 8:.0f}" y="{bottom + 14}">{density}</text>'
        for density in (0.1, 0.2, 0.4)
    ]
    return "\n".join(
        [
            f'<text x="{left}" y="18" font-size="13">{title}</text>',
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
    return (math.log(density) - low) / (high - low) * (_WIDTH - 20)


def _y(ratio: float) -> float:
    low, high = _RATIOS
    return _TOP + (high - ratio) / (high - low) * _HEIGHT
