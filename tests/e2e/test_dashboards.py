"""Runs every query of every panel, variable and rule on a Prometheus that scrapes a real service and its Ray.
No query may fail or return nothing."""

from __future__ import annotations

import math
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from deltafront.benchmarks import DEMO_TEXT
from deltafront.dashboards.build import DASHBOARDS
from deltafront.dashboards.prometheus import DOOR, RAY, RULES, Prometheus, QueryFailed, substituted
from deltafront.dashboards.workers import GPUS
from deltafront.service.listening import LOOPBACK
from deltafront.service.local.ports import agent_ports
from deltafront.service.local.server_process import LocalService

from ..service.test_metrics import promtool_says
from .conftest import Table
from .traffic import Traffic
from .wire import PATIENCE_S, Wire

WINDOW, RANGE_S = "10m", 600
"""The time range of queries: longer than this test takes, even on a slow machine."""


@pytest.fixture
def prometheus(service: LocalService, wire: Wire, tmp_path: Path) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: prometheus); .ci/run installs it")
    ray_port = agent_ports(int(service.address.rpartition(":")[2]))["metrics_export_port"]
    targets = {DOOR: wire.info().metrics_address, RAY: f"{LOOPBACK}:{ray_port}"}
    with Prometheus(tmp_path / "prometheus", targets) as running:
        yield running


def of_panels() -> dict[str, str]:
    """Return the panels' queries, without the zeros that they draw in place of missing series."""
    return {
        f"{dashboard.name}: {panel.title}: {query.legend or number}": substituted(
            query.expr.replace(" or vector(0)", ""), WINDOW, RANGE_S
        )
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for number, query in enumerate(panel.queries)
    }


def of_variables() -> dict[str, str]:
    """Return the queries of the variables' values, as Grafana sends them, with all values chosen in other
    variables."""
    return {
        f"{dashboard.name}: ${variable['name']}": substituted(variable["definition"], WINDOW, RANGE_S)
        for dashboard in DASHBOARDS
        for variable in dashboard.json()["templating"]["list"]
        if variable["type"] == "query"
    }


def of_rules() -> dict[str, str]:
    """Return the queries of the rules. Alerts' conditions cannot all hold at once, so query their
    operands."""
    asked = {}
    for group in yaml.safe_load(RULES.read_text())["spec"]["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            asked |= {f"{name}: {number}": expr for number, expr in enumerate(operands(rule["expr"]))}
    return asked


EMPTY_HERE = (
    "DeltafrontAbsent: 0", "DeltafrontCertificateEnds: 0", "sparsity: Measured score: {{setting}}",
    *(f"workers: {panel.title}: {panel.queries[0].legend}" for panel in GPUS.panels),
    "sparsity: Agreement with dense attention: {{method}}",
    "sparsity: Log-probability above dense attention: {{method}}",
)  # fmt: skip
"""Queries without data, because this service has a door, no certificate, no profile of `evaluate`, no
exporter of GPUs' metrics, and no `door.shadow`."""


_JOINT = re.compile(r"\s(?:(?:and|or|unless)\b(?:\s+on\s*\([^)]*\))?|[<>]=?|[=!]=)\s")


def operands(expr: str) -> list[str]:
    """Return the operands of an expression's comparisons and set operators, at its top level."""
    found, depth, start, place = [], 0, 0, 0
    while place < len(expr):
        depth += (expr[place] in "({[") - (expr[place] in ")}]")
        joint = _JOINT.match(expr, place) if not depth else None
        if joint:
            found.append(expr[start:place])
            start = place = joint.end()
        else:
            place += 1
    return [*found, expr[start:]]


def test_splits_alert_conditions_into_operands() -> None:
    assert operands('sum by (a) (x{b=~"c > d"}) / 2 > 14.4 * 0.05 and on (a) y == 0') == [
        'sum by (a) (x{b=~"c > d"}) / 2', "14.4 * 0.05", "y", "0",
    ]  # fmt: skip


def empty_ones(asked: dict[str, str], ask: Callable[[str], Sequence[object]]) -> list[str]:
    """Return the queries without data. Raises AssertionError for queries that fail."""
    empty, failing = [], []
    for name, expr in asked.items():
        try:
            empty += [] if ask(expr) else [name]
        except QueryFailed as error:
            failing.append(f"{name}: {error}")
    assert not failing, failing
    return empty


def scrapes(prometheus: Prometheus) -> float:
    """Count the scrapes of a door that knew its workers."""
    counted = prometheus.now("count_over_time(deltafront_worker_up[10m])")
    return max((series.points[-1][1] for series in counted), default=0.0)


def wait_for(true: Callable[[], bool], otherwise: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, otherwise()
        time.sleep(0.5)


@pytest.mark.long
def test_every_query_of_panels_variables_and_rules_returns_data(
    service: LocalService, http: str, wire: Wire, prometheus: Prometheus, table: Table
) -> None:
    """Sends two rounds of requests, because a rate does not see the increase with which a series begins."""
    panels, variables, rules = of_panels(), of_variables(), of_rules()
    model = wire.info().model
    traffic = Traffic(service.address, http, model, DEMO_TEXT.read_text(), (400, 1200) * 2)
    for _ in range(2):
        traffic.round()
        seen = scrapes(prometheus)
        wait_for(lambda seen=seen: scrapes(prometheus) > seen + 1, lambda: "nothing is scraped")  # type: ignore[misc]
    traffic.close()
    with urllib.request.urlopen(f"http://{wire.info().metrics_address}/metrics") as reply:
        assert promtool_says(reply.read()) == ""
    assert not any(prometheus.now((panels | rules)[name]) for name in EMPTY_HERE)
    asked = {name: expr for name, expr in (panels | rules).items() if name not in EMPTY_HERE}
    empty = [*asked, *variables]

    def all_there() -> bool:
        nonlocal empty
        left = empty_ones({name: asked[name] for name in empty if name in asked}, prometheus.now)
        chosen = {name: variables[name] for name in empty if name in variables}
        empty = left + empty_ones(chosen, prometheus.label_values)
        return not empty

    wait_for(all_there, lambda: f"empty: {empty}")
    health = {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in prometheus.rules()}
    assert set(health) == {name.split(": ")[0] for name in rules}
    assert set(health.values()) == {("ok", "")}
    names = {series.labels["model_name"] for series in prometheus.now("deltafront_worker_up")}
    assert names == {model}
    count = sum(1 for dashboard in DASHBOARDS for _ in dashboard.panels)
    table.add(
        "dashboards: panels, their queries, variables, rules, their queries, empty",
        (count, len(panels), len(variables), len(health), len(rules), len(empty)),
    )
    assert prometheus.label_values('label_values(deltafront_worker_up{worker="no"}, model_name)') == []
    parts = prometheus.now("sum(deltafront_ttft_part_seconds_total)")[0].points[-1][1]
    whole = prometheus.now("sum(deltafront_time_to_first_token_seconds_sum)")[0].points[-1][1]
    assert math.isclose(parts, whole), "the parts add up to the time to first token"
