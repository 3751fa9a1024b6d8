"""The Grafana dashboard as code: `make dashboards` writes deltafront.json, to be provisioned or imported.

Every query names a metric that `service/metrics.py` declares (a test checks it), so that no panel stays empty
for want of a metric.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent / "deltafront.json"
_PREFIX = "deltafront_"


@dataclass(frozen=True)
class Panel:
    """One time series panel. queries: (PromQL, legend). unit: one of Grafana's unit ids."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    help: str = ""
    stacked: bool = False


def rate(metric: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({_PREFIX}{metric}[$__rate_interval]))"


def by_worker(gauge: str) -> str:
    """One value for each worker, however many doors tell of it."""
    return f"max by (worker) ({_PREFIX}{gauge})"


def quantiles(metric: str, by: str = "") -> list[tuple[str, str]]:
    """Median and 95th percentile of a histogram, one line for each value of `by`."""
    labels = ", ".join(filter(None, ("le", by)))
    suffix = f" {{{{{by}}}}}" if by else ""
    return [
        (f"histogram_quantile({q}, {rate(metric + '_bucket', labels)})", f"{name}{suffix}")
        for q, name in ((0.5, "median"), (0.95, "95%"))
    ]


def ratio(above: str, below: str, by: str = "") -> str:
    return f"{rate(above, by)} / {rate(below, by)}"


ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Time to first token",
        (
            Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
            Panel(
                "Its parts, mean per request",
                "s",
                [
                    (
                        f"{rate('ttft_part_seconds_total', 'part')}"
                        f" / ignoring(part) group_left {rate('time_to_first_token_seconds_count')}",
                        "{{part}}",
                    )
                ],
                "The parts add up to the mean time to first token.",
                stacked=True,
            ),
            Panel("Reading the prompt", "s", quantiles("request_prefill_time_seconds")),
            Panel("Waiting for a prefill group", "s", quantiles("request_queue_time_seconds")),
        ),
    ),
    (
        "Sparsity",
        (
            Panel(
                "Density by method: tiles computed over causal tiles",
                "percentunit",
                [
                    (
                        ratio("attention_density_ratio_sum", "attention_density_ratio_count", "method"),
                        "{{method}}",
                    )
                ],
            ),
            Panel(
                "Density by layer",
                "percentunit",
                [(ratio("layer_density_ratio_sum", "layer_density_ratio_count", "layer"), "layer {{layer}}")],
            ),
            Panel(
                "Scoring time over attention time",
                "percentunit",
                quantiles("scoring_overhead_ratio", "method"),
            ),
            Panel(
                "Pages attended over pages held, sparse decode layers",
                "percentunit",
                [(ratio("pages_attended_total", "pages_held_total"), "share")],
            ),
        ),
    ),
    (
        "Decode and hand-off",
        (
            Panel("Between two tokens", "s", quantiles("inter_token_latency_seconds")),
            Panel(
                "Tokens",
                "short",
                [
                    (rate("generation_tokens_total"), "generated per second"),
                    (rate("cached_tokens_total"), "of prompts, held by sessions, per second"),
                ],
            ),
            Panel("K/V handed over", "Bps", [(rate("handoff_bytes_total"), "bytes per second")]),
            Panel("Pulling one prompt's K/V", "s", quantiles("handoff_seconds")),
        ),
    ),
    (
        "Requests and capacity",
        (
            Panel("Requests by outcome", "reqps", [(rate("requests_total", "outcome"), "{{outcome}}")]),
            Panel(
                "Running and waiting",
                "short",
                [
                    (f"sum({by_worker('num_requests_running')})", "running"),
                    (f"sum({by_worker('num_requests_waiting')})", "waiting"),
                ],
            ),
            Panel("K/V pages in use", "percentunit", [(by_worker("kv_cache_usage_ratio"), "{{worker}}")]),
            Panel(
                "Sessions held, replays",
                "short",
                [
                    (f"sum({by_worker('sessions')})", "sessions"),
                    (f"sum(increase({_PREFIX}replays_total[1h]))", "replays in an hour"),
                ],
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "type": "row",
                "title": title,
                "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        for i, panel in enumerate(row):
            place = {"x": 6 * i, "y": y + 1, "w": 6, "h": 8}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += 9
    return {
        "uid": "deltafront",
        "title": "Deltafront",
        "tags": ["deltafront"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.stacked else {}
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.help,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def render() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
