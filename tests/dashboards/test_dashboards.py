"""The dashboards' files are up to date and complete, and query only existing metrics.
tests/e2e/test_dashboards.py checks that every query returns data."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltafront.dashboards.build import DASHBOARDS, FOLDER, path_of, render
from deltafront.dashboards.grafana import Dashboard
from deltafront.dashboards.overview import ERROR_BUDGET, SLOW_BUDGET
from deltafront.dashboards.prometheus import RULES
from deltafront.service.errors import Code
from deltafront.service.metrics import FINISHED, Metrics

from ..test_generated import declared, declared_series

every = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)


def expressions(dashboard: Dashboard) -> list[str]:
    return [query.expr for panel in dashboard.panels for query in panel.queries]


def test_every_dashboard_file_is_generated() -> None:
    assert sorted(FOLDER.glob("*.json")) == sorted(map(path_of, DASHBOARDS))
    for dashboard in DASHBOARDS:
        assert path_of(dashboard).read_text() == render(dashboard), "run make dashboards"


@every
def test_queries_use_only_metrics_and_labels_that_exist(dashboard: Dashboard) -> None:
    for expr in expressions(dashboard):
        assert set(re.findall(r"deltafront_\w+", expr)) <= declared_series(), expr
    recorded = {rule.get("record") for group in rules() for rule in group["rules"]}
    assert {
        name for expr in expressions(dashboard) for name in re.findall(r"deltafront:[\w:]+", expr)
    } <= recorded
    outcomes = re.findall(r'outcome[=!]~?"([^"]+)"', " ".join(expressions(dashboard)))
    assert {name for found in outcomes for name in found.split("|")} <= {*Code, FINISHED}


def rules() -> list[Any]:
    groups: list[Any] = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    return groups


@every
def test_every_query_filters_by_namespace_and_model(dashboard: Dashboard) -> None:
    for expr in expressions(dashboard):
        for selector in re.findall(r"\b(?:deltafront[_:][\w:]+|ray_\w+|up)(\{[^}]*\})?", expr):
            assert 'namespace=~"$namespace"' in selector, expr
        for selector in re.findall(r"\bdeltafront[_:][\w:]+(\{[^}]*\})?", expr):
            assert 'model_name=~"$model"' in selector, expr


@every
def test_worker_gauges_are_not_summed_over_doors(dashboard: Dashboard) -> None:
    for gauge in (f"deltafront_{name}" for kind, name in declared() if kind == "gauge"):
        for expr in expressions(dashboard):
            uses = len(re.findall(rf"\b{gauge}\b", expr))
            assert uses == len(
                re.findall(rf"max by \((?:worker(?:, (?:phase|tier))?|setting)\) \({gauge}\{{", expr)
            ), expr


@every
def test_every_panel_says_what_it_shows(dashboard: Dashboard) -> None:
    titles = [panel.title for panel in dashboard.panels]
    assert len(set(titles)) == len(titles)
    for panel in dashboard.panels:
        assert panel.help.endswith(".") and panel.unit and panel.queries, panel.title
        assert [value for value, _ in panel.levels] == sorted(value for value, _ in panel.levels)
        several = len(panel.queries) > 1 or panel.kind in ("timeseries", "bargauge", "heatmap")
        assert all(query.legend for query in panel.queries) or not several, panel.title
        by = {label for q in panel.queries for label in re.findall(r"\{\{(\w+)\}\}", q.legend)}
        assert all(re.search(rf"by \([^)]*\b{label}\b", panel.queries[0].expr) for label in by), panel.title
        assert panel.kind != "table" or panel.key


@every
def test_no_two_series_of_a_panel_share_a_colour(dashboard: Dashboard) -> None:
    """Colours must follow a series' number, because Grafana's palette by name uses hashes, which may
    collide."""
    for panel in (panel for panel in json.loads(render(dashboard))["panels"] if panel["type"] != "row"):
        mode = "palette-classic" if panel["type"] == "timeseries" else "thresholds"
        assert panel["fieldConfig"]["defaults"]["color"] == {"mode": mode}, panel["title"]


NUMBERED = {"layer": 3, "prompt": 3, "stage": 2}
"""Labels whose values begin with a number, and the most digits of the number."""


def replaced(expr: str, label: str, value: str) -> str:
    """Apply the calls of label_replace at the beginning of `expr` to a label's value, the innermost first."""
    form = rf'"{label}", "(0+)\$1", "{label}", "([^"]+)"\)'
    for zeros, pattern in re.findall(form, expr):
        if found := re.fullmatch(pattern, value):
            value = zeros + found[1]
    return value


@every
def test_labels_that_begin_with_a_number_sort_by_number(dashboard: Dashboard) -> None:
    """Grafana sorts series by their labels, so numbers are padded with zeros. Tables and bars are sorted by
    the key."""
    for panel in dashboard.panels:
        for query in panel.queries:
            for label in {*re.findall(r"\{\{(\w+)\}\}", query.legend), panel.key} & NUMBERED.keys():
                numbers = [0, 1, 2, 9, 10, 11, 16, 64, 99, 100, 125, 256]
                values = [f"{n}K" for n in numbers if n < 10 ** NUMBERED[label]]
                made = [replaced(query.expr, label, value) for value in values]
                assert made == sorted(made) and len(set(map(len, made))) == 1, (panel.title, label)
    for panel in json.loads(render(dashboard))["panels"]:
        (made_of,) = [one for one in dashboard.panels if one.title == panel["title"]] or [None]
        if made_of is not None and made_of.key:
            assert {"sort": [{"field": made_of.key, "desc": False}], "fields": {}} in [
                one["options"] for one in panel["transformations"] if one["id"] == "sortBy"
            ]
            assert all(target["format"] == "table" for target in panel["targets"])


@every
def test_heat_map_bucket_bounds_fit_their_metric_and_panel(dashboard: Dashboard, tmp_path: Path) -> None:
    """The bounds begin with the least possible value, each is at most 2.5 times the previous one, and the
    panel has room for all. The axis has the unit of the bounds, the cells that of the counts."""
    bounds = bounds_of(Metrics(tmp_path))
    for panel in (panel for panel in dashboard.panels if panel.kind == "heatmap"):
        (made,) = [one for one in json.loads(render(dashboard))["panels"] if one["title"] == panel.title]
        (query,) = panel.queries
        units = made["options"]["yAxis"]["unit"], made["options"]["cellValues"]["unit"]
        if not panel.cumulative:
            assert units == ("short", panel.unit) and query.expr.startswith("label_replace(")
            continue
        assert units == (panel.unit, "short") and made["targets"][0]["format"] == "heatmap"
        (name,) = re.findall(r"deltafront_(\w+)_bucket", query.expr)
        least, *_ = found = bounds[name]
        assert least == LEAST[name] and len(found) <= 30
        assert all(1 < above / below <= 2.5 for below, above in itertools.pairwise(found)), name


LEAST = {
    "time_to_first_token_seconds": 0.005,
    "inter_token_latency_seconds": 0.001,
    "request_prompt_tokens": 16,
    "request_generation_tokens": 1,
}
"""The first bound of each histogram in a heat map. Smaller values need not be told apart."""


def bounds_of(metrics: Metrics) -> dict[str, list[float]]:
    """Return the bucket bounds of each histogram by name, without the last one."""
    made = [value for value in vars(metrics).values() if hasattr(value, "_upper_bounds")]
    return {one._name.removeprefix("deltafront_"): one._upper_bounds[:-1] for one in made}


LIMITED = {
    "overview": {
        "First tokens within 30 s", "Requests without an error of the service", "Prefill groups that serve",
        "Decode workers that serve", "Budget burnt by slow first tokens", "Budget burnt by errors",
        "Time to first token", "Share that fails or is refused", "Attempts repeated, hand-offs failed",
        "KV cache pages in use", "Time that the queue takes",
    },
    "ttft": {
        "Quantiles and mean", "Share within", "Time to first token, 95%", "Waiting for a prefill group",
    },
    "sparsity": {
        "Scoring over attention", "Time saved", "Scoring over attention, by stage",
        "Choosing over attention, by layer",
    },
    "prefill": {
        "Queue in tokens", "Waiting for a group", "Tokens read again", "Bubbles", "Unevenness",
        "Launch-bound", "Not hidden by prefill", "Hand-offs that failed",
    },
    "decode": {
        "Waiting for a place in the batch", "KV cache pages in use", "Pages free", "State slots in use",
    },
    "workers": {
        "Workers that answer", "Draining", "Doors", "KV cache pages in use", "Replicas healthy",
        "Last XID error of a GPU",
    },
}  # fmt: skip
"""Panels whose values are good or bad on any model and machine."""


@every
def test_panels_with_a_limit_show_its_threshold(dashboard: Dashboard) -> None:
    assert {panel.title for panel in dashboard.panels if panel.levels} == LIMITED[dashboard.name]
    made = {panel["title"]: panel for panel in json.loads(render(dashboard))["panels"]}
    for title in LIMITED[dashboard.name]:
        defaults = made[title]["fieldConfig"]["defaults"]
        assert len(defaults["thresholds"]["steps"]) > 1
        assert made[title]["type"] != "timeseries" or defaults["custom"]["thresholdsStyle"]["mode"] == "line"


def test_worker_table_columns_have_thresholds() -> None:
    (dashboard,) = (one for one in DASHBOARDS if one.name == "workers")
    for panel in (panel for panel in dashboard.panels if panel.kind == "table"):
        limited = {query.legend for query in panel.queries if query.levels}
        assert limited == {"up", "draining", "pages in use"}
        (made,) = (one for one in json.loads(render(dashboard))["panels"] if one["title"] == panel.title)
        coloured = {
            override["matcher"]["options"]
            for override in made["fieldConfig"]["overrides"]
            if any(one["id"] == "thresholds" for one in override["properties"])
        }
        assert coloured == limited


def test_only_panels_of_signed_values_show_negative_values() -> None:
    signed = [panel.title for dashboard in DASHBOARDS for panel in dashboard.panels if panel.signed]
    assert signed == ["Log-probability above dense attention", "Time saved"]
    made = [
        panel for one in DASHBOARDS for panel in json.loads(render(one))["panels"] if panel["type"] != "row"
    ]
    assert [one["title"] for one in made if "min" not in one["fieldConfig"]["defaults"]] == signed


@every
def test_dashboards_define_all_that_grafana_needs(dashboard: Dashboard) -> None:
    made = json.loads(render(dashboard))
    assert made["uid"] == path_of(dashboard).stem and made["links"][0]["tags"] == made["tags"]
    assert made["links"][0]["includeVars"] and made["links"][0]["keepTime"]
    variables = {one["name"] for one in made["templating"]["list"]}
    assert {"datasource", "namespace", "model"} <= variables
    own = {"__rate_interval", "__range"}
    asked = set(re.findall(r"\$([a-z_]+)", " ".join(expressions(dashboard))))
    assert asked <= variables | own, "of a variable that is not there"
    numbers = [panel["id"] for panel in made["panels"]]
    assert numbers == list(range(1, len(numbers) + 1))
    places = [panel["gridPos"] for panel in made["panels"]]
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_every_metric_is_on_a_dashboard_or_in_an_alert() -> None:
    text = " ".join(itertools.chain.from_iterable(map(expressions, DASHBOARDS))) + RULES.read_text()
    missing = [name for _kind, name in declared() if f"deltafront_{name}" not in text]
    assert not missing


def test_dashboards_show_the_objectives_of_the_alerts() -> None:
    alerts = {rule.get("alert"): rule["expr"] for group in rules() for rule in group["rules"]}
    assert f"> 14.4 * {SLOW_BUDGET}" in alerts["DeltafrontSlowFirstTokensFast"]
    assert f"> 14.4 * {ERROR_BUDGET}" in alerts["DeltafrontErrorsFast"]


def test_docs_name_every_dashboard_and_only_existing_panels() -> None:
    """One table has a row for each dashboard, with panels' names in italics."""
    documents = "\n".join(path.read_text() for path in (FOLDER.parent / "docs").glob("*.md"))
    lines = re.findall(
        r"^\| \[[^]]*\]\(\.\./dashboards/deltafront-(\w+)\.json\) (.*)$", documents, re.MULTILINE
    )
    assert sorted(name for name, _line in lines) == sorted(dashboard.name for dashboard in DASHBOARDS)
    for dashboard in DASHBOARDS:
        titles = [row.title for row in dashboard.rows] + [panel.title for panel in dashboard.panels]
        for named in re.findall(r"\*([^*]+)\*", dict(lines)[dashboard.name]):
            assert any(named in title for title in titles), (dashboard.name, named)
