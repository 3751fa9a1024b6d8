"""Rules for every panel: errors are red, no two series look alike, zero is drawn as zero, GPUs say what is
missing, and times of requests link to traces."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deltafront.dashboards.build import DASHBOARDS
from deltafront.dashboards.grafana import TRACED, Dashboard, Panel, Query
from deltafront.dashboards.overview import OUTCOMES
from deltafront.dashboards.prometheus import substituted
from deltafront.service.errors import Code
from deltafront.service.metrics import FINISHED, Metrics

every = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)

FAILURES = ("replays_total", "handoff_failures_total", "tokens_read_again_total", "internal|unavailable")
"""Names in a query that make it one of the service's failures: counters, or outcomes."""
ERRORS = (Code.INTERNAL, Code.UNAVAILABLE, Code.UNKNOWN)


@every
def test_series_of_errors_and_no_others_are_fixed_to_red(dashboard: Dashboard) -> None:
    for panel in dashboard.panels:
        for query in panel.queries if panel.kind == "timeseries" else ():
            named = any(name in query.expr for name in FAILURES) and 'outcome!~"' not in query.expr
            assert named == (isinstance(query.colour, str) and "red" in query.colour), panel.title
            outcomes = query.legend == "{{outcome}}" and "deltafront_requests_total" in query.expr
            assert outcomes == (query.colour is OUTCOMES), panel.title


def test_each_outcome_has_a_colour_and_errors_are_red() -> None:
    assert OUTCOMES.keys() == {FINISHED, *Code}
    assert {outcome for outcome, colour in OUTCOMES.items() if "red" in colour} == set(ERRORS)


@every
def test_no_two_series_of_a_panel_have_one_name_or_colour(dashboard: Dashboard) -> None:
    """Colours are fixed for all series of a panel or for none, since Grafana numbers the others' colours
    without regard to the fixed ones."""
    for panel in dashboard.panels:
        legends = [query.legend for query in panel.queries]
        assert len(set(legends)) == len(legends), panel.title
        fixed = list(itertools.chain.from_iterable(colours(query) for query in panel.queries))
        assert len(set(fixed)) == len(fixed), panel.title
        assert not fixed or all(query.colour for query in panel.queries), panel.title
        for query in panel.queries:
            told = {*re.findall(r"\{\{(\w+)\}\}", query.legend), panel.key} - {""}
            assert grouped(query.expr) <= told, (panel.title, query.legend)


def colours(query: Query) -> list[str]:
    return (
        [query.colour]
        if isinstance(query.colour, str) and query.colour
        else [*dict(query.colour or {}).values()]
    )


_BEGINNING = re.compile(
    r"^[(\s]*(?:(?:label_replace|sort_desc|histogram_quantile)\((?:[\d.]+, )?|1 - )*[(\s]*"
)


def grouped(expr: str) -> set[str]:
    """Return the labels of a query's series: those by which its first aggregation groups, without `le`."""
    found = re.match(r"(?:sum|max|count) by \(([^)]*)\)", _BEGINNING.sub("", expr))
    return set(found[1].split(", ")) - {"le"} if found else set()


def test_finds_the_labels_of_nested_queries() -> None:
    assert grouped("label_replace(label_replace(histogram_quantile(0.5, sum by (le, a) (x))))") == {"a"}
    assert grouped("1 - (max by (b, c) (x)) / sum by (d) (y)") == {"b", "c"}
    assert grouped("(sum(max by (worker) (x)) or vector(0))") == set()


@every
def test_panels_of_request_times_link_to_their_traces(dashboard: Dashboard) -> None:
    made = dashboard.json()
    assert "traces" in {one["name"] for one in made["templating"]["list"] if one["type"] == "datasource"}
    panels = {panel["title"]: panel for panel in made["panels"]}
    for panel in dashboard.panels:
        links = panels[panel.title]["links"]
        asks = any(name in query.expr for query in panel.queries for name in TRACED)
        assert len(links) == asks, panel.title
        for link in links:
            query = urllib.parse.urlparse(link["url"]).query
            ((panes,),) = (urllib.parse.parse_qs(query)["panes"],)
            pane = json.loads(panes)["traces"]
            assert pane["range"] == {"from": "${__from}", "to": "${__to}"}
            assert pane["queries"][0]["query"] == '{resource.service.name="deltafront" && kind=server}'


@every
def test_panels_of_gpus_say_that_their_metrics_are_missing(dashboard: Dashboard) -> None:
    made = {panel["title"]: panel for panel in dashboard.json()["panels"]}
    for panel in dashboard.panels:
        asks = any("DCGM_" in query.expr for query in panel.queries)
        said = made[panel.title]["fieldConfig"]["defaults"].get("noValue", "")
        assert ("dcgm-exporter" in said) == asks, panel.title


def gpu_panels() -> list[Panel]:
    return [panel for one in DASHBOARDS for panel in one.panels if "DCGM_" in panel.queries[0].expr]


NO_NUMBER = {
    "First tokens within 30 s", "Share within", "Pages attended", "Speed of a pull", "Unevenness",
}  # fmt: skip
"""Panels of shares and speeds that no number can tell while nothing happens."""


def counted() -> Iterator[tuple[Panel, Query]]:
    """Yield the queries with one series that must be 0 while nothing happens: all but means and quantiles."""
    for panel in itertools.chain.from_iterable(one.panels for one in DASHBOARDS):
        for query in panel.queries:
            mean = re.search(r"_sum\{.*_count\{", query.expr)
            quantile = "histogram_quantile" in query.expr
            if not (
                grouped(query.expr)
                or mean
                or quantile
                or panel.title in NO_NUMBER
                or panel.key
                or panel.kind == "heatmap"
            ):
                yield panel, query


def test_panels_draw_an_idle_service_as_zero(tmp_path: Path) -> None:
    """Evaluates the queries on what a service exports that has no worker and no request yet."""
    made = Metrics(tmp_path / "metrics", "m")
    idle = [
        (sample.name, sample.labels, sample.value)
        for metric in made.registry().collect()
        for sample in metric.samples
    ]
    asked = {query.expr: panel.title for panel, query in counted()}
    assert len(asked) > 30
    whole = {"Requests without an error of the service": 1}
    results = [
        {
            "expr": substituted(expr, "5m", 1200),
            "eval_time": "30m",
            "exp_samples": [{"labels": "{}", "value": whole.get(title, 0)}],
        }
        for expr, title in asked.items()
    ]
    series = [
        {"series": written(name, {**labels, "namespace": "n"}), "values": f"{value}x40"}
        for name, labels, value in idle
    ]
    promtool(tmp_path, series, results)


@pytest.mark.parametrize(
    "labels",
    [
        {"namespace": "n", "pod": "p"},
        {"exported_namespace": "n", "exported_pod": "p", "namespace": "gpu-operator", "pod": "exporter"},
    ],
    ids=["honoured", "renamed"],
)
def test_gpus_are_found_however_their_labels_are_scraped(labels: dict[str, str], tmp_path: Path) -> None:
    queries = [panel.queries[0].expr for panel in gpu_panels()]
    assert len(queries) == 4
    found = {"Hostname": "h", "gpu": "0"}
    names = [re.findall(r"DCGM_\w+", expr)[0] for expr in queries]
    series = [{"series": written(name, labels | found), "values": "7x40"} for name in names]
    others = dict.fromkeys(labels, "other")
    series += [{"series": written(name, others | {**found, "gpu": "1"}), "values": "7x40"} for name in names]
    results = [
        {
            "expr": expr.replace("$namespace", "n"),
            "eval_time": "30m",
            "exp_samples": [{"labels": written("", found), "value": 7}],
        }
        for expr in queries
    ]
    promtool(tmp_path, series, results)


def written(name: str, labels: dict[str, str]) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items())}}}"


def promtool(folder: Path, series: list[dict[str, str]], results: list[dict[str, object]]) -> None:
    """Let promtool evaluate queries. Raises AssertionError for each result that is not the expected one."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    content = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": results}]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"], check=False, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
