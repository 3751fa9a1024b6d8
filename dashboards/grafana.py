"""Panels and dashboards as plain data, and their conversion to Grafana's JSON (schema 39)."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAG = "deltafront"
_WIDTH = 24
_TRACES = '{resource.service.name="deltafront" && kind=server}'
"""TraceQL: the spans of requests, which are the doors'."""
_BARS = 200
"""The most bars in a bar gauge; Grafana's default is 25."""
_VARIABLES = (
    ("namespace", "Namespace", "label_values(deltafront_requests_total, namespace)"),
    ("model", "Model", 'label_values(deltafront_requests_total{namespace=~"$namespace"}, model_name)'),
)

TRACED = (
    "time_to_first_token_seconds",
    "ttft_part_seconds_total",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "handoff_seconds",
)
"""The metrics of a request's times. Panels with them link to traces."""

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "bargauge", "heatmap", "table"]
Level = tuple[float, str]
"""A threshold, and the colour of values from it on."""


@dataclass(frozen=True)
class Query:
    """One PromQL query of a panel.

    Attributes:
        legend: Legend of each series; in a table, the column's title. unit, levels: In a table, the column's
            unit and thresholds.
        colour: Colour of the only series, or by the series' name. Empty: by the series' number.
    """

    expr: str
    legend: str = ""
    unit: str = ""
    levels: Sequence[Level] = ()
    colour: str | Mapping[str, str] = ""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        help: What the panel shows and what to do about it.
        unit: A unit id of Grafana.
        levels: Thresholds; below the first the colour is green.
        columns: Width, of 24.
        tall: Double the height.
        key: The label that names and sorts a table's rows or a bar gauge's bars.
        cumulative: A heat map's series are a histogram's cumulative buckets.
        signed: Values may be negative.
        absent: Shown in place of "No data".
    """

    title: str
    help: str
    unit: str
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    levels: Sequence[Level] = ()
    columns: int = 8
    tall: bool = False
    stacked: bool = False
    key: str = ""
    cumulative: bool = True
    signed: bool = False
    absent: str = ""

    @property
    def traced(self) -> bool:
        """Return whether the panel shows times of requests, which traces explain."""
        return any(name in query.expr for query in self.queries for name in TRACED)

    @property
    def instant(self) -> bool:
        """Return whether the panel shows one moment instead of a time range."""
        return self.kind in ("stat", "bargauge", "table")

    @property
    def height(self) -> int:
        return {"stat": 4, "table": 6}.get(self.kind, 16 if self.tall else 8)


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard, which becomes one JSON file.

    Attributes:
        name: Name of the file. The dashboard's uid is `deltafront-` and this name.
        variables: Variables besides namespace and model, as (name, title, query).
    """

    name: str
    title: str
    help: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, str, str]] = field(default_factory=tuple)

    @property
    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels

    def json(self) -> Json:
        return {
            "uid": f"{TAG}-{self.name}",
            "title": f"Deltafront / {self.title}",
            "description": self.help,
            "tags": [TAG],
            "schemaVersion": 39,
            "timezone": "browser",
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "links": [_link_to_the_others()],
            "templating": {
                "list": [*_sources(), *(_variable(*one) for one in (*_VARIABLES, *self.variables))]
            },
            "panels": list(self._placed()),
        }

    def _placed(self) -> Iterator[Json]:
        """Place the panels row by row. A panel that does not fit into its row starts a new one."""
        y = number = 0
        for row in self.rows:
            number += 1
            place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
            yield {"type": "row", "title": row.title, "id": number, "gridPos": place, "panels": []}
            y, x, height = y + 1, 0, 0
            for panel in row.panels:
                if x + panel.columns > _WIDTH:
                    y, x, height = y + height, 0, 0
                number += 1
                place = {"x": x, "y": y, "w": panel.columns, "h": panel.height}
                yield _panel(panel, number, place)
                x, height = x + panel.columns, max(height, panel.height)
            y += height


def _link_to_the_others() -> Json:
    about = {"type": "dashboards", "tags": [TAG], "title": "Deltafront", "icon": "external link"}
    return {**about, "asDropdown": False, "includeVars": True, "keepTime": True, "targetBlank": False}


def _sources() -> Iterator[Json]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    yield {"name": "traces", "type": "datasource", "query": "tempo", "label": "Tempo"}


def _link_to_traces() -> Json:
    """Make a link to the requests' traces of the dashboard's time range, in Grafana's Explore."""
    source = {"type": "tempo", "uid": "${traces}"}
    query = {"refId": "A", "datasource": source, "queryType": "traceql", "query": _TRACES}
    between = {"from": "${__from}", "to": "${__to}"}
    panes = {"traces": {"datasource": "${traces}", "queries": [query], "range": between}}
    url = "/explore?schemaVersion=1&panes=" + urllib.parse.quote(json.dumps(panes), safe="${}")
    return {"title": "Traces", "url": url, "targetBlank": True}


def _variable(name: str, title: str, query: str) -> Json:
    """Make a variable with which users select one, several or all values of a label."""
    choice = {"includeAll": True, "allValue": ".*", "multi": True, "sort": 1, "refresh": 2}
    chosen = {"current": {"text": ["All"], "value": ["$__all"]}}
    about = {"name": name, "label": title, "type": "query", "datasource": SOURCE, "definition": query}
    return {**about, "query": {"query": query, "refId": "variable"}, **choice, **chosen}


def _panel(panel: Panel, number: int, place: Json) -> Json:
    return {
        "type": panel.kind,
        "id": number,
        "title": panel.title,
        "description": panel.help,
        "gridPos": place,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": list(_overrides(panel))},
        "options": _options(panel),
        "transformations": _transformations(panel),
        "links": [_link_to_traces()] if panel.traced else [],
        "targets": list(_targets(panel)),
    }


def _targets(panel: Panel) -> Iterator[Json]:
    form = "table" if panel.key else "time_series"
    if panel.kind == "heatmap" and panel.cumulative:
        form = "heatmap"
    for i, query in enumerate(panel.queries):
        moment = {"instant": panel.instant, "range": not panel.instant, "format": form}
        legend = {"legendFormat": query.legend or "__auto"}
        yield {"refId": _letter(i), "datasource": SOURCE, "expr": query.expr, **legend, **moment}


def _letter(i: int) -> str:
    return chr(ord("A") + i)


def _thresholds(levels: Sequence[Level]) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in levels]
    return {"mode": "absolute", "steps": steps}


def _defaults(panel: Panel) -> Json:
    custom: Json = {}
    if panel.kind == "timeseries":
        style = "line" if panel.levels else "off"
        custom = {"showPoints": "never", "thresholdsStyle": {"mode": style}}
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.stacked else {}
    least = {} if panel.signed else {"min": 0}
    # Colours by a series' number: colours by a name's hash may be the same for two series.
    color = {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"}
    thresholds = _thresholds(panel.levels)
    none = {"noValue": panel.absent} if panel.absent else {}
    return {"unit": panel.unit, **least, **none, "color": color, "custom": custom, "thresholds": thresholds}


def _overrides(panel: Panel) -> Iterator[Json]:
    """Yield the series' colours, and a table's units and colours of each query's column."""
    for number, query in enumerate(panel.queries):
        if isinstance(query.colour, str) and query.colour:
            yield _coloured("byFrameRefID", _letter(number), query.colour)
        elif query.colour:
            yield from (_coloured("byName", name, colour) for name, colour in query.colour.items())
    for query in panel.queries if panel.kind == "table" else ():
        properties: list[Json] = [{"id": "unit", "value": query.unit or panel.unit}]
        if query.levels:
            properties.append({"id": "thresholds", "value": _thresholds(query.levels)})
            properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
        yield {"matcher": {"id": "byName", "options": query.legend}, "properties": properties}


def _coloured(matcher: str, options: str, colour: str) -> Json:
    fixed = {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}
    return {"matcher": {"id": matcher, "options": options}, "properties": [fixed]}


def _options(panel: Panel) -> Json:
    last: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    bars = {"values": True, "limit": _BARS} if panel.key else {}
    legend = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    made: dict[Kind, Json] = {
        "timeseries": legend,
        "stat": {"reduceOptions": last, "graphMode": "none", "colorMode": "value"},
        "bargauge": {
            "reduceOptions": last | bars,
            "orientation": "horizontal",
            "displayMode": "basic",
            "namePlacement": "left",
            "minVizHeight": 16,
        },
        "heatmap": {"calculate": False, **_units(panel), "cellGap": 1},
        "table": {"showHeader": True, "cellHeight": "sm"},
    }
    return made[panel.kind]


def _units(panel: Panel) -> Json:
    """Set a heat map's unit: that of the histogram's bounds, or else that of its cells."""
    bounds, cells = (panel.unit, "short") if panel.cumulative else ("short", panel.unit)
    return {"yAxis": {"unit": bounds}, "cellValues": {"unit": cells}}


def _transformations(panel: Panel) -> list[Json]:
    """Make a table with one row for each value of the key and one column for each query."""
    if not panel.key:
        return []
    by_key = {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": panel.key, "desc": False}]}}
    if panel.kind != "table":
        return [by_key]
    names = {f"Value #{_letter(i)}": query.legend for i, query in enumerate(panel.queries)}
    order = {name: i for i, name in enumerate([panel.key, *names])}
    hidden = {"Time": True}
    organized = {"excludeByName": hidden, "renameByName": names, "indexByName": order}
    return [{"id": "merge", "options": {}}, by_key, {"id": "organize", "options": organized}]
