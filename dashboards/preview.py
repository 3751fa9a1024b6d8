"""`make dashboards-preview`: every dashboard as a picture in docs/dashboards, without Grafana.

Starts a service on this machine and a Prometheus that scrapes it, sends it requests of every kind for a
while, and draws each panel from the answers to its queries.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from ..service.config import load
from ..service.local.server_process import LocalService
from .build import DASHBOARDS
from .drawing import draw
from .grafana import Panel, Query
from .prometheus import RAY_EXPORTS, Prometheus, Series, ray_address, substituted
from .traffic import Traffic

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "dashboards"
_TEXT = ROOT / "deploy" / "demo" / "moby-dick.txt"
_LENGTHS = (1000, 5000, 5000, 9000)
"""Characters of prompts: of about 250 to 2,200 tokens."""
_WINDOW, _STEPS = "60s", 120
_CLIENTS = 2


class Recorded:
    """What a Prometheus knows of the last `seconds`; plays `drawing.Answers`."""

    def __init__(self, prometheus: Prometheus, seconds: int) -> None:
        self._prometheus = prometheus
        self._seconds = seconds
        self._end = time.time()

    def __call__(self, panel: Panel, query: Query) -> list[Series]:
        expr = substituted(query.expr, _WINDOW, self._seconds)
        if panel.instant:
            return self._prometheus.now(expr, self._end)
        begin, step = self._end - self._seconds, max(self._seconds / _STEPS, 1.0)
        return self._prometheus.over(expr, begin, self._end, step)


def busy(traffic: Traffic, until: float, first: int) -> None:
    """Requests of one kind after the other; first: the kind to begin with."""
    number = first
    while time.monotonic() < until:
        traffic.kinds[number % len(traffic.kinds)]()
        number += 1


def with_tiers(config: Path, folder: Path) -> Path:
    """Write a configuration that also remembers in host memory and files, which have panels of their own."""
    content = yaml.safe_load(config.read_text())
    content["decode"] |= {"host_cache_gib": 0.5, "store": str(folder / "store")}
    written = folder / "preview.yaml"
    written.write_text(yaml.safe_dump(content))
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "deploy" / "config" / "demo.yaml")
    parser.add_argument("--seconds", type=int, default=180, help="how long requests are sent")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="deltafront-"))
    config = with_tiers(chosen.config, folder)
    door = load(config).door
    http, metrics = f"http://127.0.0.1:{door.http_port}", f"127.0.0.1:{door.metrics_port}"
    service = LocalService(config, environment=RAY_EXPORTS)
    with (
        service,
        Prometheus(folder, metrics, ray_address(door.grpc_port), interval_s=2) as prometheus,
        ThreadPoolExecutor(_CLIENTS) as pool,
    ):
        until, text = time.monotonic() + chosen.seconds, _TEXT.read_text()
        clients = [Traffic(service.address, http, door.model_name, text, _LENGTHS) for _ in range(_CLIENTS)]
        running = [pool.submit(busy, client, until, 3 * i) for i, client in enumerate(clients)]
        for one in running:
            one.result()
        PICTURES.mkdir(exist_ok=True)
        recorded = Recorded(prometheus, chosen.seconds)
        for dashboard in DASHBOARDS:
            draw(dashboard, recorded, PICTURES / f"{dashboard.name}.png")


if __name__ == "__main__":
    main()
