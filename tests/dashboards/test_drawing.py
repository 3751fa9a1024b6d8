"""Dashboards as pictures: numbers as people read them, every kind of panel, and the pictures in docs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from deltafront.dashboards import drawing
from deltafront.dashboards.build import DASHBOARDS
from deltafront.dashboards.grafana import Dashboard, Panel, Query, Row
from deltafront.dashboards.preview import PICTURES, ROOT
from deltafront.dashboards.prometheus import Series
from deltafront.service.errors import Code
from deltafront.service.metrics import FINISHED, RPCS

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


MANY = {
    "layer": [f"{n:03}" for n in range(80)],
    "stage": [f"{n:02}" for n in range(16)],
    "prompt": ["001K", "004K", "016K", "064K", "256K", "more"],
    "worker": [f"{kind}:{n}b567dbc" for kind in ("decode", "prefill") for n in range(4)],
    "source": ["disk", "entries", "host", "session"],
    "tier": ["disk", "host"],
    "phase": ["activation_wait", "anchors", "attention", "correction", "kv_gather", "projection", "warm_up"],
    "method": ["dense", "dpxa", "dpxa+delta", "xattention"],
    "outcome": [FINISHED, *Code],
    "part": [f"prefill.other_requests_{n}" for n in range(22)],
    "method_rpc": list(RPCS),
    "reason": ["length", "stop", "stop_string"],
    "deployment": ["DecodeReplica", "FrontDoor", "PrefillGroup"],
    "le": ["0.005", "0.01", "0.02", "0.1", "1.0", "2.0", "5.0", "10.0", "30.0", "+Inf"],
}
"""As many values of every label as a large service has."""
COMPILED = ["serving", "warm_up"]
"""The phases of kernels compiled, each worker's."""


def many(panel: Panel, query: Query) -> list[Series]:
    labels = re.findall(r"\{\{(\w+)\}\}", query.legend) or [panel.key] * bool(panel.key)
    moments = [1e9 + 10 * i for i in range(2 if panel.instant else 30)]
    found = []
    have = MANY | ({"phase": COMPILED} if "kernel_compilations" in query.expr else {})
    for n, values in enumerate(itertools.product(*(have[label] for label in labels))):
        points = [(when, 0.123456 * (n + 1) * (1 + i % 3)) for i, when in enumerate(moments)]
        found.append(Series(dict(zip(labels, values, strict=True)), points))
    return found


@pytest.fixture(scope="module", params=DASHBOARDS, ids=lambda dashboard: dashboard.name)
def figure(request: pytest.FixtureRequest) -> Figure:
    """Of a dashboard of a large service."""
    made = drawing.compose(request.param, many)
    made.canvas.draw()
    return made


def test_no_two_series_of_a_panel_share_a_colour(figure: Figure) -> None:
    for axes in figure.axes:
        handles, _ = axes.get_legend_handles_labels()
        of = [one.get_color() if isinstance(one, Line2D) else one.get_facecolor()[0] for one in handles]
        assert all(distance(*two) > 0.04 for two in itertools.combinations(of, 2)), axes


def distance(one: Any, other: Any) -> float:
    return float(np.abs(np.subtract(to_rgb(one), to_rgb(other))).max())


@pytest.mark.parametrize("number", [1, 8, 9, 24, 60])
def test_as_many_colours_as_there_are_series(number: int) -> None:
    made = drawing.colors(number)
    assert len(made) == number
    assert all(distance(*two) > 0.04 for two in itertools.combinations(made, 2))


def boxes(figure: Figure, artists: Iterable[Any]) -> list[Bbox]:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    shown = [one for one in artists if one.get_visible() and one.get_text()]
    return [one.get_window_extent(renderer) for one in shown]


def ticks(axes: Axes) -> tuple[list[Text], list[Text]]:
    """Names of those that are drawn, along each axis; there are others beyond its ends."""
    both = (axes.xaxis, axes.yaxis)
    along = [[tick.label1 for tick in axis._update_ticks()] if axes.axison else [] for axis in both]
    return along[0], along[1]


def test_nothing_that_is_written_is_clipped(figure: Figure) -> None:
    drawn = [
        *figure.texts,
        *itertools.chain.from_iterable(one for axes in figure.axes for one in ticks(axes)),
    ]
    for axes in figure.axes:
        legend = axes.get_legend()
        drawn += axes.texts + (legend.get_texts() if legend else [])
        drawn += [cell.get_text() for table in axes.tables for cell in table.get_celld().values()]
    inside = figure.bbox.padded(1)
    for box in boxes(figure, drawn):
        assert inside.contains(*box.min) and inside.contains(*box.max), box


def test_cells_of_tables_have_room_for_their_text(figure: Figure) -> None:
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for table in itertools.chain.from_iterable(axes.tables for axes in figure.axes):
        for cell in table.get_celld().values():
            written = cell.get_text().get_window_extent(renderer)
            assert written.width <= cell.get_window_extent(renderer).width, cell.get_text()


def test_panels_keep_to_their_places(figure: Figure) -> None:
    """With their legends, and below their titles."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    panels = [axes.get_tightbbox(renderer) for axes in figure.axes]
    everything = [*panels, *boxes(figure, figure.texts)]
    for one, other in itertools.combinations([box.padded(-1) for box in everything], 2):
        assert not one.overlaps(other), (one, other)


def test_names_of_ticks_do_not_overlap(figure: Figure) -> None:
    for axes in figure.axes:
        for names in ticks(axes):
            found = [box.padded(-0.5) for box in boxes(figure, names)]
            assert not any(one.overlaps(other) for one, other in itertools.combinations(found, 2)), axes


def test_rows_of_a_heat_map_and_bars_are_sorted_by_number(figure: Figure) -> None:
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        if names and all(re.fullmatch(r"0\d\d", name) for name in names):
            assert names == sorted(names)


def test_every_part_of_the_time_to_first_token_has_its_name() -> None:
    (dashboard,) = [one for one in DASHBOARDS if one.name == "ttft"]
    (panel,) = [one for one in dashboard.panels if one.kind == "bargauge"]
    made = drawing.compose(Dashboard("x", "X", "X.", [Row("Row", [panel])]), many)
    assert [label.get_text() for label in made.axes[0].get_yticklabels()] == MANY["part"]


def test_bounds_of_a_heat_map_are_at_their_rows_upper_edges() -> None:
    (axes,) = drawing.compose(Dashboard("x", "X", "X.", [Row("Row", [PANELS["heatmap"]])]), answers).axes
    edges = dict(zip([one.get_text() for one in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    assert edges == {"500 ms": 1.0, "1 s": 2.0, "more": 3.0}


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
        (math.inf, "s", "more"),
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
