"""Draws panels of dashboards as Grafana lays them out, with matplotlib."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deltafront.dashboards.prometheus import Series

_WIDTH, _UNIT, _GAP, _DPI = 1280, 30, 8, 100
"""Pixels of the picture's width, of a unit of a panel's height, and between panels."""
_TITLE, _LINE, _CHARACTER = 28, 15, 5.5
"""Pixels of a panel's title, of a line of its legend, and of a character there."""
_BACK, _PANEL, _GRID, _TEXT, _DIM = "#111217", "#181b1f", "#2c2f35", "#ccccdc", "#8e8e9a"
_SHARES = (1, 0.7, 0.4)
"""Shades of a colour on a panel that the saved picture has; 0.4: filled areas."""
_COLOURS = {
    "green": "#73bf69", "red": "#f2495c", "dark-red": "#c4162a", "super-light-red": "#ffa6b0",
    "orange": "#ff9830", "yellow": "#fade2a", "blue": "#5794f2", "super-light-blue": "#c0d8ff",
    "purple": "#b877d9", "super-light-purple": "#deb6f2",
}  # fmt: skip
"""Grafana's colours that the dashboards name."""
_CLASSIC = (
    "#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0", "#37872d",
    "#fade2a", "#447ebc", "#c15c17", "#890f02", "#0a437c", "#6d1f62", "#584477", "#b7dbab", "#f4d598",
    "#70dbed", "#f9ba8f", "#82b5d8", "#e5a8e2", "#aea2e0", "#629e51",
)  # fmt: skip
"""Grafana's classic palette: the colours of series by their number."""
_SCALES = {
    "short": ((1, ""), (1e3, " K"), (1e6, " Mil"), (1e9, " Bil")),
    "reqps": ((1, " req/s"), (1e3, "K req/s")),
    "s": ((1e-6, " µs"), (1e-3, " ms"), (1, " s"), (60, " min"), (3600, " h")),
    "bytes": ((1, " B"), (1 << 10, " KiB"), (1 << 20, " MiB"), (1 << 30, " GiB"), (1 << 40, " TiB")),
    "mbytes": ((1, " MiB"), (1 << 10, " GiB")),
    "Bps": ((1, " B/s"), (1e3, " kB/s"), (1e6, " MB/s"), (1e9, " GB/s")),
    "percentunit": ((0.01, "%"),),
    "percent": ((1, "%"),),
    "watt": ((1, " W"), (1e3, " kW")),
}
"""Units of Grafana: the divisors of values from that size on, and what follows the number."""
_TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400)

Json = dict[str, Any]


class Span(NamedTuple):
    """A time range with the step of its queries. begin, end: seconds since the epoch."""

    begin: int
    end: int
    step_s: int

    def on_grid(self, series: Series, missing: float = math.nan) -> list[float]:
        """Return the value at each step."""
        values = [missing] * ((self.end - self.begin) // self.step_s + 1)
        for when, value in series.points:
            values[round((when - self.begin) / self.step_s)] = value
        return values

    def times(self) -> list[int]:
        return list(range(self.begin, self.end + 1, self.step_s))


class Shown(NamedTuple):
    """A panel of a dashboard's JSON, and the series that each of its targets returned."""

    panel: Json
    results: list[list[Series]]

    @property
    def empty(self) -> bool:
        return self.panel["type"] != "row" and not any(self.results)

    @property
    def defaults(self) -> Json:
        found: Json = self.panel["fieldConfig"]["defaults"]
        return found

    @property
    def named(self) -> list[tuple[str, str, Series]]:
        """Return each series with its target's letter and its name. Series over time are sorted by name."""
        found = []
        for target, result in zip(self.panel["targets"], self.results, strict=True):
            each = [(target["refId"], _name(target["legendFormat"], one), one) for one in result]
            found += each if target["instant"] else sorted(each, key=lambda one: one[1])
        return found

    def written(self, value: float) -> str:
        return written(value, self.defaults["unit"])

    def colour(self, number: int, letter: str, name: str) -> str:
        """Return a line's colour: what the panel overrides, or that of its number."""
        for one in self.panel["fieldConfig"]["overrides"]:
            for rule in one["properties"]:
                if one["matcher"]["options"] in (letter, name) and rule["id"] == "color":
                    return _COLOURS[rule["value"]["fixedColor"]]
        return _CLASSIC[number % len(_CLASSIC)]


class Box:
    """A panel's place. left, top: pixels from the picture's corner. Its contents are placed in pixels from
    its own top left corner."""

    def __init__(self, figure: Any, height: int, left: float, top: float, size: tuple[float, float]) -> None:
        self._figure, self._height, self._left, self._top = figure, height, left, top
        self.width, self.height = size

    def fill(self, colour: str, place: Sequence[float]) -> None:
        """place: left, top, width and height."""
        from matplotlib.patches import Rectangle

        left, bottom, width, height = self._part(*place)
        self._figure.add_artist(
            Rectangle((left, bottom), width, height, color=colour, linewidth=0, zorder=-1)
        )

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        x, y, _, _ = self._part(left, top, 0, 0)
        style = {"fontsize": 8, "color": _TEXT, "va": "center", "parse_math": False} | style
        self._figure.text(x, y, text, **style)

    def axes(self, left: float, top: float, right: float, bottom: float) -> Any:
        """Make axes with these margins."""
        place = self._part(left, top, self.width - left - right, self.height - top - bottom)
        axes = self._figure.add_axes(place, facecolor=_PANEL)
        axes.tick_params(colors=_DIM, labelsize=7.5, length=0)
        axes.spines[:].set_visible(False)
        axes.set_axisbelow(True)
        return axes

    def _part(
        self, left: float, top: float, width: float, height: float
    ) -> tuple[float, float, float, float]:
        bottom = self._height - self._top - top - height
        return (self._left + left) / _WIDTH, bottom / self._height, width / _WIDTH, height / self._height


def picture(path: Path, dashboards: Mapping[str, Sequence[Shown]], span: Span) -> None:
    """Draw dashboards below each other. dashboards: the panels of each, by its title."""
    from matplotlib.figure import Figure

    heights = [_UNIT * (2 + max(_bottom(one) for one in panels)) for panels in dashboards.values()]
    height = sum(heights)
    figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor=_BACK)
    between = f"{_clock(span.begin)} to {_clock(span.end)} UTC"
    for number, (title, panels) in enumerate(dashboards.items()):
        top = sum(heights[:number])
        head = Box(figure, height, 0, top, (_WIDTH, _UNIT))
        head.write(12, 22, title, fontsize=13, weight="bold")
        head.write(_WIDTH - 12, 22, between, ha="right", color=_DIM, fontsize=9)
        for shown in panels:
            place = shown.panel["gridPos"]
            size = place["w"] * _WIDTH / 24 - _GAP, place["h"] * _UNIT - _GAP
            corner = place["x"] * _WIDTH / 24 + _GAP / 2, top + 1.5 * _UNIT + place["y"] * _UNIT
            _draw(Box(figure, height, *corner, size), shown, span)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Save with few colours and without loss, which is smaller than with loss and has sharp letters."""
    from matplotlib.colors import to_rgb
    from PIL import Image

    drawn, few = io.BytesIO(), Image.new("P", (1, 1))
    figure.savefig(drawn, format="png")
    inks = dict.fromkeys((*_COLOURS.values(), *_CLASSIC, _TEXT, _DIM, *_heat()))
    mixed = [
        share * part + (1 - share) * below
        for ink in inks
        for share in _SHARES
        for part, below in zip(to_rgb(ink), to_rgb(_PANEL), strict=True)
    ]
    few.putpalette([round(255 * part) for part in (*to_rgb(_BACK), *to_rgb(_PANEL), *to_rgb(_GRID), *mixed)])
    picture = Image.open(drawn).convert("RGB").quantize(palette=few, dither=Image.Dither.NONE)
    picture.save(path, lossless=True, quality=100, method=6)


def _heat() -> list[str]:
    """Return a heat map's colours, from few to many."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ramp = LinearSegmentedColormap.from_list("heat", ["#4a2410", "#ff780a", "#fff3c4"], 10)
    return [to_hex(ramp(at)) for at in range(10)]


def _bottom(shown: Shown) -> int:
    place = shown.panel["gridPos"]
    return int(place["y"] + place["h"])


def _draw(box: Box, shown: Shown, span: Span) -> None:
    """Draw a panel. One of an unknown type is a box that names the type."""
    kind = shown.panel["type"]
    if kind == "row":
        box.write(4, box.height / 2, f"⌄  {shown.panel['title']}", fontsize=10, weight="bold")
        return
    box.fill(_PANEL, (0, 0, box.width, box.height))
    box.write(10, _TITLE / 2 + 1, shown.panel["title"], fontsize=9, weight="bold")
    if shown.empty:
        text = shown.defaults.get("noValue", "no data")
        lines = re.findall(rf".{{1,{int(box.width / 7)}}}(?:\s|$)", text)
        box.write(box.width / 2, box.height / 2, "\n".join(lines), ha="center", color=_DIM, fontsize=9)
    elif kind in _KINDS:
        _KINDS[kind](box, shown, span)
    else:
        box.write(box.width / 2, box.height / 2, f"a panel of type {kind}", ha="center", color=_DIM)


def _timeseries(box: Box, shown: Shown, span: Span) -> None:
    lines = [(name, shown.colour(i, ref, name), one) for i, (ref, name, one) in enumerate(shown.named)]
    legend = _legend(box, [(name or shown.panel["title"], colour) for name, colour, _ in lines])
    axes = box.axes(64, _TITLE + 6, 30, 24 + legend)
    custom, times = shown.defaults["custom"], span.times()
    below = [0.0] * len(times)
    for _, colour, series in lines:
        if "stacking" in custom:
            values = span.on_grid(series, 0.0)
            above = [less + value for less, value in zip(below, values, strict=True)]
            axes.fill_between(times, below, above, color=colour, alpha=0.4, linewidth=0)
            tops = [top if value else math.nan for top, value in zip(above, values, strict=True)]
            axes.plot(times, tops, color=colour, linewidth=1)
            below = above
        else:
            axes.plot(times, span.on_grid(series), color=colour, linewidth=1.3)
    _time_axis(axes, span)
    low, high = axes.dataLim.intervaly
    low = min(low, shown.defaults.get("min", low))
    axes.set_ylim(low, low + 1 if high <= low else high + 0.05 * (high - low))
    _value_axis(axes, shown)
    if custom["thresholdsStyle"]["mode"] == "line":
        low, high = axes.get_ylim()
        for step in shown.defaults["thresholds"]["steps"]:
            if step["value"] is not None and low <= step["value"] <= high:
                axes.axhline(step["value"], color=_COLOURS[step["color"]], linewidth=1, dashes=(6, 4))


def _stat(box: Box, shown: Shown, span: Span) -> None:
    named = shown.named
    for number, (_, name, series) in enumerate(named):
        value = series.points[-1][1]
        middle = (number + 0.5) * box.width / len(named)
        style = {"fontsize": 22, "weight": "bold", "color": _level(shown.defaults["thresholds"], value)}
        box.write(middle, (box.height + _TITLE) / 2, shown.written(value), ha="center", **style)
        if len(named) > 1:
            box.write(middle, _TITLE + 8, name, ha="center", color=_DIM)


def _bargauge(box: Box, shown: Shown, span: Span) -> None:
    bars = [(name, series.points[-1][1]) for _, name, series in shown.named]
    if any(one["id"] == "sortBy" for one in shown.panel["transformations"]):
        bars.sort()
    axes = box.axes(24 + _CHARACTER * max(len(name) for name, _ in bars), _TITLE + 4, 64, 8)
    size = min(7.5, 0.7 * (box.height - _TITLE - 12) / len(bars))
    places, most = range(len(bars)), max(value for _, value in bars) or 1
    axes.barh(places, [most] * len(bars), 0.75, color=_GRID)
    colours = [_level(shown.defaults["thresholds"], value) for _, value in bars]
    axes.barh(places, [value for _, value in bars], 0.75, color=colours)
    axes.set(xlim=(0, most), ylim=(max(len(bars), 4) - 0.5, -0.5), xticks=())
    axes.set_yticks(places, [name for name, _ in bars], color=_TEXT, fontsize=size)
    for place, (_, value), colour in zip(places, bars, colours, strict=True):
        text = shown.written(value)
        axes.text(most * 1.02, place, text, color=colour, fontsize=size, va="center", parse_math=False)


def _heatmap(box: Box, shown: Shown, span: Span) -> None:
    """Draw a row for each series. A histogram's cumulative buckets become the counts of each bucket."""
    from matplotlib.colors import ListedColormap

    rows = [(name, span.on_grid(series, 0.0)) for _, name, series in shown.named]
    if shown.panel["targets"][0]["format"] == "heatmap":
        rows.sort(key=lambda row: float(row[0]))
        below = [[0.0] * len(rows[0][1]), *(values for _, values in rows)]
        rows = [
            (_bound(name, shown), [max(0.0, a - b) for a, b in zip(values, less, strict=True)])
            for (name, values), less in zip(rows, below, strict=False)
        ]
    cells = [[value if value > 0 else math.nan for value in values] for _, values in rows]
    edges = [when - span.step_s / 2 for when in (*span.times(), span.times()[-1] + span.step_s)]
    axes = box.axes(64, _TITLE + 6, 30, 24)
    colours = ListedColormap(_heat())
    gap = 0.2 if len(edges) < 100 else 0  # narrow cells would vanish in gaps
    axes.pcolormesh(edges, range(len(rows) + 1), cells, cmap=colours, edgecolor=_PANEL, linewidth=gap)
    _time_axis(axes, span)
    every = -(-len(rows) * 12 // int(box.height - _TITLE - 30))
    axes.set_yticks([at + 0.5 for at in range(0, len(rows), every)], [name for name, _ in rows[::every]])


def _bound(name: str, shown: Shown) -> str:
    return "+Inf" if math.isinf(float(name)) else shown.written(float(name))


def _table(box: Box, shown: Shown, span: Span) -> None:
    """Draw a row for each value of the label by which the table is sorted, and a column for each target."""
    (sort,) = (one["options"]["sort"] for one in shown.panel["transformations"] if one["id"] == "sortBy")
    key, titles = sort[0]["field"], [target["legendFormat"] for target in shown.panel["targets"]]
    rows: dict[str, dict[str, float]] = {}
    for title, result in zip(titles, shown.results, strict=True):
        for series in result:
            rows.setdefault(series.labels[key], {})[title] = series.points[-1][1]
    width = (box.width - 20) / (len(titles) + 1)
    for column, title in enumerate([key, *titles]):
        box.write(10 + column * width, _TITLE + 12, title, color="#6e9fff", weight="bold")
    for row, (name, values) in enumerate(sorted(rows.items())[: int((box.height - _TITLE - 24) / 18)]):
        top = _TITLE + 32 + 18 * row
        box.fill(_GRID, (8, top - 10, box.width - 16, 1))
        box.write(10, top, name)
        for column, title in enumerate(titles, 1):
            if title in values:
                rules = _column(shown.panel, title)
                limits = rules.get("thresholds", {"steps": [{"color": "", "value": None}]})
                text = written(values[title], rules["unit"])
                box.write(10 + column * width, top, text, color=_level(limits, values[title]))


_KINDS: dict[str, Callable[[Box, Shown, Span], None]] = {
    "timeseries": _timeseries,
    "stat": _stat,
    "bargauge": _bargauge,
    "heatmap": _heatmap,
    "table": _table,
}


def written(value: float, unit: str) -> str:
    """Write a value with its unit, at three digits. unit: a unit id of Grafana."""
    scales = _SCALES[unit]
    divisor, after = max((one for one in scales if one[0] <= abs(value)), default=scales[0])
    if not value:
        divisor, after = min(scales, key=lambda one: abs(math.log(one[0])))
    digits = 4 if unit == "percentunit" else 3
    return f"{float(f'{value / divisor:.{digits}g}'):g}{after}"


def _name(legend: str, series: Series) -> str:
    """Fill a legend's {{label}}. A query without a legend has no name."""
    return re.sub(
        r"\{\{(\w+)\}\}", lambda found: series.labels.get(found[1], ""), legend.replace("__auto", "")
    )


def _level(thresholds: Json, value: float) -> str:
    """Return the colour of the last threshold that the value reaches."""
    reached = [one for one in thresholds["steps"] if one["value"] is None or one["value"] <= value]
    return _COLOURS.get(reached[-1]["color"], _TEXT)


def _column(panel: Json, title: str) -> Json:
    """Return the properties of a table's column by their ids."""
    rules = [one for one in panel["fieldConfig"]["overrides"] if one["matcher"]["options"] == title]
    return {rule["id"]: rule["value"] for one in rules for rule in one["properties"]}


def _legend(box: Box, names: Sequence[tuple[str, str]]) -> int:
    """Write the names in lines at the box's bottom, in at most a third of it. Return the lines' height."""
    places, left, line = [], 10.0, 0
    for name, colour in names:
        width = 24 + _CHARACTER * len(name)
        if left + width > box.width and left > 10:
            left, line = 10.0, line + 1
        places.append((left, line, name, colour))
        left += width
    lines = min(line + 1, int(box.height / 3 / _LINE))
    for left, line, name, colour in places:
        if line < lines:
            top = box.height - 8 - _LINE * (lines - 1 - line)
            box.fill(colour, (left, top - 1, 12, 2))
            box.write(left + 16, top, name, fontsize=7.5)
    return lines * _LINE


def _time_axis(axes: Any, span: Span) -> None:
    length = span.end - span.begin
    every = next((one for one in _TICKS_S if one >= length / 5), _TICKS_S[-1])
    first = math.ceil(span.begin / every)
    ticks = [every * at for at in range(first, int(span.end / every) + 1)]
    axes.set_xticks(ticks, [_clock(one) for one in ticks])
    axes.set_xlim(span.begin, span.end)


def _value_axis(axes: Any, shown: Shown) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.grid(color=_GRID, linewidth=0.6)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(lambda value, _at: shown.written(value))


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))
