"""Writes every dashboard's JSON file: `make dashboards`.

Tests check that every query names a metric that the service declares, and run every panel's queries on a
Prometheus that scrapes a real service (tests/e2e/test_dashboards.py). So no panel is empty because a metric
is missing.
"""

from __future__ import annotations

import json
from pathlib import Path

from deltafront.dashboards import decode, overview, prefill, sparsity, ttft, workers
from deltafront.dashboards.grafana import Dashboard

FOLDER = Path(__file__).resolve().parent
DASHBOARDS = (
    overview.DASHBOARD,
    ttft.DASHBOARD,
    sparsity.DASHBOARD,
    prefill.DASHBOARD,
    decode.DASHBOARD,
    workers.DASHBOARD,
)


def path_of(dashboard: Dashboard) -> Path:
    return FOLDER / f"deltafront-{dashboard.name}.json"


def render(dashboard: Dashboard) -> str:
    return json.dumps(dashboard.json(), indent=1) + "\n"


if __name__ == "__main__":
    for one in DASHBOARDS:
        path_of(one).write_text(render(one))
