"""Writes every dashboard's JSON file: `make dashboards`.

Every query names a metric that the service declares (a test checks it), and every query of every panel is
asked of a real Prometheus that scrapes the real service (tests/e2e/test_dashboards.py), so that no panel
stays empty because a metric is missing.
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
