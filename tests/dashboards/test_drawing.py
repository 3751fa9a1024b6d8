"""Dashboards as pictures: numbers as people read them, every kind of panel, and the pictures in docs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from deltafront.dashboards import drawing
from deltafront.dashboards.build import DASHBOARDS
from deltafront.dashboards.grafana import Dashboard, Panel, Query, Row
from deltafront.dashboards.preview import PICTURES, ROOT
from deltafront.dashboards.prometheus import Series

POINTS = [(1e9 + 10 * i, float(i * i)) for i in range(6)]
PANELS = {
    "timeseries": Panel("a", "A.", "s", [Query("x", "{{le}}")], levels=((30.0, "red"),)),
    "stacked": Panel("b", "B.", "short", [Query("x", "{{le}}")], stacked=True),
    "stat": Panel(
        "c", "C.", "percentunit", [Query("x")], kind="stat", levels=((0.0, "red"), (20.0, "green"))
    ),
    "bargauge": Panel("d", "D.", "s", [Query("x", "{{le}}")], kind="bargauge"),
    "heatmap": Panel("e", "E.", "s", [Query("x", "{{le}}")], kind="heatmap"),
    "table": Panel("f", "F.", "s", [Query("x", "one"), Query("y", "two", "short")], kind="table", key="le"),
}


def answers(panel: Panel, _query: Query) -> list[Series]:
    """Cumulative buckets."""
    points = POINTS[-1:] if panel.instant else POINTS
    return [
        Series({"le": bound}, [(when, value + i * value) for when, value in points])
        for i, bound in enumerate(("0.5", "1.0", "+Inf"))
    ]


def drawn(panel: Panel, path: Path, answers: drawing.Answers = answers) -> list[tuple[int, ...]]:
    """Pixels of the picture of a dashboard with this panel alone."""
    drawing.draw(Dashboard("x", "X", "One panel.", [Row("Row", [panel])]), answers, path)
    with Image.open(path) as picture:
        return list(picture.convert("RGB").get_flattened_data())


@pytest.mark.parametrize("kind", PANELS)
def test_every_kind_of_panel_shows_its_data(kind: str, tmp_path: Path) -> None:
    """In colour, tables aside; and other data look otherwise."""

    def other(panel: Panel, query: Query) -> list[Series]:
        return [
            Series(one.labels, [(when, 9 + 5 * v) for when, v in one.points]) for one in answers(panel, query)
        ]

    pixels = drawn(PANELS[kind], tmp_path / "picture.png")
    assert any(max(pixel) - min(pixel) > 60 for pixel in pixels) or kind == "table"
    assert pixels != drawn(PANELS[kind], tmp_path / "other.png", other)


def test_a_level_colours_a_number(tmp_path: Path) -> None:
    """25 is above 20, so green; with the level above it, red."""
    panel = PANELS["stat"]
    low = replace(panel, levels=((0.0, "red"), (1000.0, "green")))
    green, red = (drawn(one, tmp_path / "picture.png") for one in (panel, low))
    assert any(g > r + 40 for r, g, _ in green) and not any(r > g + 60 for r, g, _ in green)
    assert any(r > g + 60 for r, g, _ in red)


def test_a_panel_without_data_is_an_error(tmp_path: Path) -> None:
    dashboard = Dashboard("x", "X", "One panel.", [Row("Row", [PANELS["stat"]])])
    with pytest.raises(ValueError, match="c: no data"):
        drawing.draw(dashboard, lambda *_: [], tmp_path / "picture.png")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.123, "percentunit", "12.3%"),
        (0.0254, "s", "25.4 ms"),
        (2.5, "s", "2.5 s"),
        (0, "s", "0 s"),
        (131072, "short", "131K"),
        (2.5e9, "Bps", "2.5GB/s"),
        (0.5, "reqps", "0.5 req/s"),
        (-1500, "short", "-1.5K"),
    ],
)
def test_numbers_are_shown_with_their_units(value: float, unit: str, text: str) -> None:
    assert drawing.shown(value, unit) == text


def test_every_dashboard_has_a_picture_that_the_guide_shows() -> None:
    guide = (ROOT / "docs" / "deploy.md").read_text()
    assert sorted(path.stem for path in PICTURES.iterdir()) == sorted(one.name for one in DASHBOARDS)
    assert all(path.stat().st_size <= 300_000 for path in PICTURES.iterdir())
    assert set(re.findall(r"\]\(dashboards/(\w+)\.png\)", guide)) == {one.name for one in DASHBOARDS}


def test_what_the_guide_says_of_panels_is_there() -> None:
    """Their names are in italics, in the table of dashboards."""
    guide = (ROOT / "docs" / "deploy.md").read_text()
    for dashboard in DASHBOARDS:
        (line,) = [
            line
            for line in guide.splitlines()
            if line.startswith("| [") and f"({PICTURES.name}/{dashboard.name}.png)" in line
        ]
        titles = [row.title for row in dashboard.rows] + [panel.title for panel in dashboard.panels]
        for named in re.findall(r"\*([^*]+)\*", line):
            assert any(named in title for title in titles), (dashboard.name, named)
