"""Draws density against kept score, as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from deltafront.workers.evaluation.comparison import ComparedRow
from deltafront.workers.evaluation.planner import GOAL

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 300, 30, 50


def svg(rows: Sequence[ComparedRow], title: str) -> str:
    """Draw a point for each row, with its interval, and a line at the goal."""
    rows = [row for row in rows if not math.isnan(row.kept)]
    ends = [end for row in rows for end in (row.kept, *(row.kept_95 or ()))]
    low: float = min([0.9, *ends]) - 0.02
    high: float = max([1.02, *ends]) + 0.02

    def x(density: float) -> float:
        return LEFT + min(density, 1.0) * (WIDTH - LEFT - RIGHT)

    def y(kept: float) -> float:
        return TOP + (high - kept) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 18, title, weight="bold"),
        line(LEFT, y(low), x(1), y(low)),
        line(LEFT, y(low), LEFT, TOP),
        line(LEFT, y(GOAL), x(1), y(GOAL), colour="#888", dash="4"),
        text(x(1) + 6, y(GOAL) + 4, f"{GOAL:g} of dense"),
        text(LEFT + 90, HEIGHT - 12, "density: computed share of attention tiles"),
    ]
    for step in range(5):
        density, kept = step / 4, low + (high - low) * step / 4
        parts += [text(x(density) - 8, HEIGHT - 34, f"{density:g}"), text(20, y(kept) + 4, f"{kept:.2f}")]
    for number, row in enumerate(rows):
        colour = f"hsl({number * 137 % 360} 65% 42%)"
        at, first, last = x(row.density), *(row.kept_95 or (row.kept, row.kept))
        parts += [
            line(at, y(first), at, y(last), colour=colour),
            f'<circle cx="{at:.1f}" cy="{y(row.kept):.1f}" r="4" fill="{colour}"/>',
            text(WIDTH - RIGHT + 70, TOP + 40 + 18 * number, row.setting, colour=colour),
        ]
    return "\n".join([*parts, "</svg>\n"])


def line(x: float, y: float, to_x: float, to_y: float, colour: str = "black", dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"{dashed}/>'


def text(x: float, y: float, words: str, colour: str = "black", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-weight="{weight}">{escape(words)}</text>'
