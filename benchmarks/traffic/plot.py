"""Draws the results of several servers beside each other, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deltafront.benchmarks.traffic.report import Row

_PANELS = ("ttft_p50_s", "ttft_p99_s", "gap_p99_ms", "answer_p90_s", "answer_tokens_per_s", "goodput_per_s")


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw one panel of bars per metric: loads side by side, a colour for each server."""
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys(row["load"] for row in rows))
    servers = list(dict.fromkeys(row["server"] for row in rows))
    figure = Figure(figsize=(6 + len(loads), 3 * len(_PANELS)), layout="constrained")
    for panel, metric in zip(figure.subplots(len(_PANELS)), _PANELS, strict=True):
        for at, server in enumerate(servers):
            found = {row["load"]: row.get(metric) for row in rows if row["server"] == server}
            places = [load + (at - (len(servers) - 1) / 2) * 0.8 / len(servers) for load in range(len(loads))]
            panel.bar(places, [found.get(load) or 0 for load in loads], 0.8 / len(servers), label=server)
        panel.set_xticks(range(len(loads)), loads, rotation=20)
        panel.set_ylabel(metric)
        panel.legend()
    figure.savefig(path)
