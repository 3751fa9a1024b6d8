"""Dashboards as pictures: each panel as Grafana would place it, drawn from the answers to its queries."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from colorsys import hsv_to_rgb
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox
from PIL import Image

from .grafana import Dashboard, Panel, Query
from .prometheus import Series

Answers = Callable[[Panel, Query], list[Series]]
"""To a panel's query: many points of each series, or one for a panel that shows a moment."""

_COLUMN, _LINE = 0.62, 0.36
"""Inches of a column and of a unit of height."""
_DPI = 96
_COLOURS = 256
_LEAST_POINTS = 6.0
"""Height of a row with a name."""
_FEW = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_GREEN, _GREY = "#73bf69", "#d9d9d9"
_NAMED = {"green": _GREEN, "orange": "#ff9830", "red": "#f2495c"}
_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "K"))
_STYLE: Any = {"font.size": 7.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
          "grid.color": "#ececec", "axes.axisbelow": True, "legend.frameon": False}  # fmt: skip


def shown(value: float, unit: str) -> str:
    """A number as Grafana shows it, about. unit: one of its ids."""
    if math.isinf(value):
        return "more"  # a histogram's last bound
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    if unit == "s":
        return f"{value:.3g} s"
    for size, suffix in _SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}{_units(unit)}"
    return f"{value:.3g}{_units(unit)}"


def _units(unit: str) -> str:
    return {"reqps": " req/s", "Bps": "B/s"}.get(unit, "")


class Line(NamedTuple):
    """A series. name: its legend, or its row in a table."""

    name: str
    points: list[tuple[float, float]]


def draw(dashboard: Dashboard, answers: Answers, path: Path) -> None:
    """Write a PNG of few colours, which is half as large. Raises ValueError for a panel that has no data at
    all."""
    content = io.BytesIO()
    with mpl.rc_context(_STYLE):
        compose(dashboard, answers).savefig(content, format="png")
    whole = Image.open(content).convert("RGB")
    few = whole.quantize(_COLOURS, kmeans=3, dither=Image.Dither.NONE)  # without kmeans alike series merge
    few.save(path, optimize=True)


def compose(dashboard: Dashboard, answers: Answers) -> Figure:
    """Raises ValueError for a panel that has no data at all."""
    made = dashboard.json()["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in made) + 1.2
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(24 * _COLUMN, height * _LINE), dpi=_DPI)
        FigureCanvasAgg(figure)
        figure.text(0.008, 1 - 0.7 / height, dashboard.json()["title"], fontsize=12, weight="bold")
        panels = {panel.title: panel for panel in dashboard.panels}
        for panel in made:
            place = panel["gridPos"]
            top = 1 - (place["y"] + 1.2) / height
            if panel["type"] == "row":
                figure.text(0.008, top - 0.7 / height, panel["title"], fontsize=9.5, color="#555555")
                continue
            figure.text(
                place["x"] / 24 + 0.008, top - 0.85 / height, panel["title"], fontsize=8, weight="bold"
            )
            size = ((place["w"] - 0.4) / 24, (place["h"] - 1.6) / height)
            cell = Bbox.from_bounds((place["x"] + 0.2) / 24, top - (place["h"] - 0.3) / height, *size)
            _place(figure, panels[panel["title"]], cell, answers)
    return figure


def _place(figure: Figure, panel: Panel, cell: Bbox, answers: Answers) -> None:
    axes = figure.add_axes(cell.bounds)
    lines = [[Line(_name(panel, q, s), s.points) for s in answers(panel, q)] for q in panel.queries]
    if not any(lines):
        raise ValueError(f"{panel.title}: no data")
    _DRAW[panel.kind](axes, panel, lines)
    _settle(axes, cell)


def _settle(axes: Axes, cell: Bbox) -> None:
    """Makes the axes so small that they are in the cell with all that is written around them: the legend at
    its foot, the names of ticks at the left, and half a name at the right."""
    figure = _figure(axes)
    renderer, back = _renderer(figure), figure.transFigure.inverted()
    room = cell
    if legend := _legend(axes, cell):
        above = legend.get_window_extent(renderer).transformed(back).y1
        room = Bbox.from_extents(cell.x0, above, cell.x1, cell.y1)
    for _ in range(2):  # fewer ticks may have shorter names
        inner = axes.get_position()
        written = axes.get_tightbbox(renderer, bbox_extra_artists=[])
        assert written is not None, "axes are visible"
        outer = written.transformed(back)
        axes.set_position(
            Bbox.from_extents(
                room.x0 + max(0.0, inner.x0 - outer.x0),
                room.y0 + max(0.0, inner.y0 - outer.y0),
                room.x1 - max(0.0, outer.x1 - inner.x1),
                room.y1 - max(0.0, outer.y1 - inner.y1),
            )
        )


def _figure(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def _renderer(figure: Figure) -> RendererAgg:
    canvas: Any = figure.canvas  # which compose() made; its method has no types
    renderer: RendererAgg = canvas.get_renderer()
    return renderer


def _legend(axes: Axes, cell: Bbox) -> Legend | None:
    """At the cell's foot, in as many columns as it has room for."""
    figure = _figure(axes)
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return None
    legend = None
    for columns in range(min(len(names), 8), 0, -1):
        if legend is not None:
            legend.remove()
        legend = axes.legend(
            handles,
            names,
            loc="lower center",
            bbox_to_anchor=((cell.x0 + cell.x1) / 2, cell.y0),
            bbox_transform=figure.transFigure,
            ncols=columns,
            fontsize=6.5,
            handlelength=1,
            borderaxespad=0,
            columnspacing=1.2,
        )
        legend.set_in_layout(False)
        width = legend.get_window_extent(_renderer(figure)).transformed(figure.transFigure.inverted()).width
        if width <= cell.width:
            break
    return legend


def colors(number: int) -> list[tuple[float, float, float]]:
    """So many, no two alike: around the wheel, and neighbours light and dark in turn."""
    if number <= len(_FEW):
        return [to_rgb(color) for color in _FEW[:number]]
    shades = ((0.55, 0.95), (0.85, 0.62), (0.95, 0.85))
    hues = [i / number for i in range(number)]
    return [hsv_to_rgb(hue, *shades[i % len(shades)]) for i, hue in enumerate(hues)]


def _name(panel: Panel, query: Query, series: Series) -> str:
    if panel.key:
        return series.labels[panel.key]
    return re.sub(r"\{\{(\w+)\}\}", lambda found: series.labels.get(found[1], ""), query.legend)


def _graph(axes: Axes, panel: Panel, lines: Sequence[Sequence[Line]]) -> None:
    drawn = [line for found in lines for line in sorted(found, key=lambda line: line.name)]
    moments = sorted({when for line in drawn for when, _ in line.points})
    if panel.stacked:
        heights = [[dict(line.points).get(when, 0.0) for when in moments] for line in drawn]
        names = [line.name for line in drawn]
        axes.stackplot(moments, heights, labels=names, colors=colors(len(drawn)), linewidth=0)
    else:
        for line, own in zip(drawn, colors(len(drawn)), strict=True):
            points = zip(*_with_gaps(line.points), strict=True)
            axes.plot(*points, label=line.name, linewidth=1.1, color=own)
    low = min(0.0, *(value for line in drawn for _, value in line.points))
    top = axes.get_ylim()[1] if axes.dataLim.ymax > 0 else 1.0
    for value, color in panel.levels:
        if low < value <= 1.5 * top:
            axes.axhline(value, color=_NAMED[color], linewidth=0.8, linestyle="--")
            top = max(top, 1.05 * value)
    axes.set_ylim(1.05 * low, top)
    _axes_of_time(axes, moments)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))


def _with_gaps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """No line across moments that have no number: these are further apart than others."""
    apart = [after[0] - before[0] for before, after in itertools.pairwise(points)]
    gaps = [before[0] + 1 for before, wide in zip(points, apart, strict=False) if wide > 1.5 * min(apart)]
    return sorted([*points, *((when, math.nan) for when in gaps)])


def _axes_of_time(axes: Axes, moments: Sequence[float]) -> None:
    axes.set_xlim(moments[0], max(moments[-1], moments[0] + 1))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda when, _: datetime.fromtimestamp(when, UTC).strftime("%H:%M:%S"))
    )
    axes.locator_params(axis="x", nbins=5)


def _number(axes: Axes, panel: Panel, lines: Sequence[Sequence[Line]]) -> None:
    axes.axis("off")
    found = [line for several in lines for line in several]
    for i, line in enumerate(found):
        value, place = line.points[-1][1], (i + 0.5) / len(found)
        color = next((color for level, color in reversed(panel.levels) if value >= level), "green")
        text = shown(value, panel.unit)
        axes.text(place, 0.5, text, fontsize=20, ha="center", va="center", color=_NAMED[color])
        axes.text(place, 0.02, line.name, fontsize=7, ha="center")


def _bars(axes: Axes, panel: Panel, lines: Sequence[Sequence[Line]]) -> None:
    found = [line for several in lines for line in several]
    found = sorted(found, key=lambda line: line.name) if panel.key else found
    values = [line.points[-1][1] for line in found]
    axes.barh(range(len(found)), values, color=_GREEN, height=0.75)
    _name_rows(axes, range(len(found)), [line.name for line in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))


def _name_rows(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """As large as rows have room for; of rows too low for that, some."""
    inches = axes.get_position().height * _figure(axes).get_figheight() - 0.25  # the other axis' names
    every = max(1, math.ceil(len(names) * _LEAST_POINTS / 72 / inches))
    points = min(7.0, 72 * inches * every / len(names)) * 0.9
    axes.set_yticks(places[::every], names[::every], fontsize=points)


def _heat(axes: Axes, panel: Panel, lines: Sequence[Sequence[Line]]) -> None:
    """Rows by their number: bounds of a histogram, each less what is below it."""
    rows = sorted(lines[0], key=lambda line: float(line.name))
    moments = sorted({when for line in rows for when, _ in line.points})
    values = [[dict(line.points).get(when, 0.0) for when in moments] for line in rows]
    if panel.cumulative:
        above = [[b - a for a, b in zip(*two, strict=True)] for two in itertools.pairwise(values)]
        values = [values[0], *above]
        filled = [i for i, row in enumerate(values) if any(value > 0 for value in row)]
        first, last = (filled[0], filled[-1]) if filled else (0, len(rows) - 1)
        rows, values = rows[first : last + 1], values[first : last + 1]
    shades = [[value if value > 0 else math.nan for value in row] for row in values]
    edges = [*moments, moments[-1] + (moments[-1] - moments[0]) / max(len(moments) - 1, 1)]
    axes.pcolormesh(edges, range(len(rows) + 1), shades, cmap="YlOrRd")
    names = [shown(float(line.name), panel.unit if panel.cumulative else "short") for line in rows]
    edge = 1.0 if panel.cumulative else 0.5  # a bound is the upper edge of its row; a layer is its row
    _name_rows(axes, [i + edge for i in range(len(rows))], names)
    axes.grid(visible=False)
    _axes_of_time(axes, moments)


def _table(axes: Axes, panel: Panel, lines: Sequence[Sequence[Line]]) -> None:
    axes.axis("off")
    keys = sorted({line.name for column in lines for line in column})
    columns = list(zip(lines, panel.queries, strict=True))
    cells = [[key, *(_cell(column, key, panel, query) for column, query in columns)] for key in keys]
    titles = [panel.key, *(query.legend for query in panel.queries)]
    height = min(1.0, 0.14 * (len(cells) + 1))
    table = axes.table(
        cells, colLabels=titles, cellLoc="right", bbox=Bbox.from_bounds(0, 1 - height, 1, height)
    )
    table.auto_set_font_size(False)
    table.set_fontsize(7.5)
    for cell in table.get_celld().values():
        cell.set_edgecolor(_GREY)


def _cell(column: Sequence[Line], key: str, panel: Panel, query: Query) -> str:
    found = next((line.points[-1][1] for line in column if line.name == key), None)
    return "" if found is None else shown(found, query.unit or panel.unit)


_DRAW: dict[str, Callable[[Axes, Panel, Sequence[Sequence[Line]]], None]] = {
    "timeseries": _graph,
    "stat": _number,
    "bargauge": _bars,
    "heatmap": _heat,
    "table": _table,
}
