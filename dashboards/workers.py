"""The workers dashboard: each prefill group and decode worker, in a table and over time."""

from __future__ import annotations

from collections.abc import Sequence

from deltafront.dashboards.grafana import Dashboard, Level, Panel, Query, Row
from deltafront.dashboards.promql import DECODERS, GROUPS, by_worker, of_dcgm, of_serve, or_zero, total

_FULL = ((0.8, "orange"), (0.95, "red"))
_UP = ((0.0, "red"), (1.0, "green"))
_GOING = ((1.0, "orange"),)


def _columns(where: str, *more: Query) -> list[Query]:
    return [
        Query(by_worker("worker_up", where), "up", levels=_UP),
        Query(by_worker("worker_draining", where), "draining", levels=_GOING),
        Query(by_worker("num_requests_running", where), "running"),
        Query(by_worker("num_requests_waiting", where), "waiting"),
        *more,
        Query(by_worker("kv_cache_usage_ratio", where), "pages in use", "percentunit", _FULL),
        Query(by_worker("kv_pages_free", where), "pages free"),
        Query(by_worker("kv_pages", where), "pages"),
    ]


NOW = Row(
    "Now",
    (
        Panel(
            "Prefill groups",
            "As the doors know them. A group that is not up stays in the table with zeros until the doors "
            "restart; one that drains ends what it has and goes.",
            "short",
            _columns(
                GROUPS,
                Query(by_worker("queue_tokens", GROUPS), "queue, tokens"),
                Query(by_worker("prefill_tokens_per_second", GROUPS), "tokens a second"),
            ),
            kind="table",
            key="worker",
            columns=24,
        ),
        Panel(
            "Decode workers",
            "The workers as doors know them. When a worker dies, its sessions are lost.",
            "short",
            _columns(DECODERS, Query(by_worker("sessions", DECODERS), "sessions")),
            kind="table",
            key="worker",
            columns=24,
        ),
    ),
)
LATELY = Row(
    "Lately",
    (
        Panel(
            "Workers that answer",
            "Steps down are deaths or scaling; a short dip is a worker that was replaced.",
            "short",
            [
                Query(total("worker_up", GROUPS), "prefill groups"),
                Query(total("worker_up", DECODERS), "decode workers"),
            ],
            levels=_UP,
        ),
        Panel(
            "Draining",
            "Workers that finish their requests and end: scaled down, or replaced by a new version.",
            "short",
            [Query(total("worker_draining"), "draining")],
            levels=_GOING,
        ),
        Panel(
            "Doors",
            "Nodes with a door that are scraped. A node whose door is not up shows as 0.",
            "short",
            [Query(or_zero('sum(up{job=~".*deltafront-door",namespace=~"$namespace"})'), "up")],
            levels=_UP,
        ),
        Panel(
            "Kernels compiled",
            "Or loaded from disk, since the worker started, by phase. Rising while requests may wait: the "
            "warm-up misses a shape. 0 without a GPU.",
            "short",
            [Query(by_worker("kernel_compilations", also="phase"), "{{worker}} {{phase}}")],
        ),
        Panel(
            "KV cache pages in use",
            "Share of pages in use, by group and decode worker.",
            "percentunit",
            [Query(by_worker("kv_cache_usage_ratio"), "{{worker}}")],
            levels=_FULL,
        ),
        Panel(
            "Running",
            "Requests that a worker computes.",
            "short",
            [Query(by_worker("num_requests_running"), "{{worker}}")],
            stacked=True,
        ),
        Panel(
            "Waiting",
            "Requests that wait in a worker: for pages, KV cache, or their turn.",
            "short",
            [Query(by_worker("num_requests_waiting"), "{{worker}}")],
            stacked=True,
        ),
    ),
)
SERVE = Row(
    "Ray Serve",
    (
        Panel(
            "Replicas healthy",
            "By what Ray Serve runs: doors, and the owners of prefill groups and decode workers. As Serve's "
            "own health checks see them, all models together. Fewer than configured: Serve starts others, or "
            "has no room for them.",
            "short",
            [Query(f"sum by (deployment) ({of_serve('deployment_replica_healthy')})", "{{deployment}}")],
            levels=_UP,
            columns=12,
        ),
        Panel(
            "Replicas that ran within an hour",
            "By what Ray Serve runs. As many as are healthy: none was replaced. More: they died, or were "
            "scaled or upgraded meanwhile.",
            "short",
            [
                Query(
                    "count by (deployment) "
                    f"(last_over_time({of_serve('deployment_replica_starts_total')}[1h]))",
                    "{{deployment}}",
                )
            ],
            columns=12,
        ),
    ),
)
_NO_DCGM = "Prometheus has no metrics of dcgm-exporter, which NVIDIA's GPU operator installs"


def _gpus(title: str, help: str, unit: str, expr: str, levels: Sequence[Level] = ()) -> Panel:
    return Panel(title, help, unit, [Query(expr, "{{Hostname}} {{gpu}}")], levels=levels, absent=_NO_DCGM)


GPUS = Row(
    "GPUs, by node and number (DCGM)",
    (
        _gpus(
            "GPU utilisation",
            "Share of time in which a kernel runs. Low while requests wait: GPUs wait for their hosts.",
            "percent",
            of_dcgm("GPU_UTIL"),
        ),
        _gpus(
            "GPU memory in use",
            "Weights, pages and what compiled kernels need. It does not change with load.",
            "mbytes",
            of_dcgm("FB_USED"),
        ),
        _gpus("GPU power", "At its limit a GPU lowers its clock.", "watt", of_dcgm("POWER_USAGE")),
        _gpus(
            "Last XID error of a GPU",
            "0: none. NVIDIA's table says what a number means; the kernel's log has its text.",
            "short",
            of_dcgm("XID_ERRORS"),
            levels=((1.0, "red"),),
        ),
    ),
)
DASHBOARD = Dashboard(
    "workers",
    "Workers",
    "Every prefill group and decode worker by itself.",
    (NOW, LATELY, GPUS, SERVE),
)
