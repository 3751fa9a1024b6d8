"""Tests that the dashboards are drawn from the values that a run's endpoints exposed."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deltafront.benchmarks import dashboard_pictures as pictures
from deltafront.benchmarks.dashboard_pictures import Scrape
from deltafront.benchmarks.panel_drawing import Shown, Span, picture, written
from deltafront.dashboards import overview
from deltafront.dashboards.build import DASHBOARDS
from deltafront.dashboards.grafana import Dashboard, Panel
from deltafront.dashboards.prometheus import Series

BEGIN = 1_800_000_000


def exposition(number: int) -> str:
    """Return a door's metrics after `number` requests without an error, and as many with one."""
    return (
        "# HELP deltafront_requests Requests by how they ended\n"
        f'deltafront_requests_total{{outcome="finished",model_name="m"}} {number}.0\n'
        f'deltafront_requests_total{{outcome="internal",model_name="m"}} {number}.0\n'
        f'deltafront_kv_cache_usage_ratio{{worker="decode:0",model_name="m"}} {number / 100}\n'
    )


@pytest.fixture
def door() -> Iterator[str]:
    """The address of a server with a door's metrics, in which each scrape finds one more request."""
    numbers = itertools.count()

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(exposition(next(numbers)).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def scrapes() -> list[Scrape]:
    """A run of a minute with a request every two seconds."""
    return [
        Scrape(BEGIN + 2 * number, "d:1", "local/deltafront-door", exposition(number)) for number in range(31)
    ]


def need_prometheus() -> None:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")


def test_records_what_answers_and_names_what_does_not_once(
    door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scrapes.jsonl.gz"
    pictures.record(["127.0.0.1:1", door], 0.2, out, every_s=0.1)
    saved = pictures.read(out)
    assert [one.text for one in saved] == [exposition(number) for number in range(3)]
    assert {one[1:3] for one in saved} == {(door, "local/deltafront-door")}
    assert saved[0].at < saved[1].at < saved[2].at
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["127.0.0.1:1"]


def test_samples_get_the_labels_of_a_scrape_and_times() -> None:
    text = '# TYPE a counter\na 1.0\nb_total{job="x, y",kind="}"} 2e+06\nc{my_job="z"} NaN\n'
    target = 'instance="r:1",job="local/deltafront-ray",namespace="local"'
    assert list(pictures.openmetrics([Scrape(1.5, "r:1", "local/deltafront-ray", text)])) == [
        f"up{{{target}}} 1 1.500\n",
        f"a{{{target}}} 1.0 1.500\n",
        f'b_total{{{target},exported_job="x, y",kind="}}"}} 2e+06 1.500\n',
        f'c{{{target},my_job="z"}} NaN 1.500\n',
        "# EOF\n",
    ]


def test_panels_return_what_was_exposed(scrapes: list[Scrape], tmp_path: Path) -> None:
    """One panel shows a gauge, one a rate, and one a series that rules record."""
    need_prometheus()
    span = Span(BEGIN, BEGIN + 60, 2)
    with pictures.prometheus_of(scrapes, tmp_path) as prometheus:
        shown = pictures.asked(prometheus, overview.DASHBOARD, span, window_s=8)
    answered = {one.panel["title"]: one.named for one in shown if any(one.results)}
    of = {title: {name: series for _, name, series in named} for title, named in answered.items()}
    usage = of["KV cache pages in use"]["decode:0"].points
    assert usage == [(BEGIN + 2 * number, number / 100) for number in range(31)]
    assert of["Requests by outcome"]["finished"].points[-1][1] == pytest.approx(0.5)
    assert of["Budget burnt by errors"]["5m"].points[-1][1] == pytest.approx(0.5 / overview.ERROR_BUDGET)


def test_draws_a_dashboard_and_lists_panels_without_data(scrapes: list[Scrape], tmp_path: Path) -> None:
    need_prometheus()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out = tmp_path / "dashboard.webp"
    empty = pictures.draw(scrapes, [overview.DASHBOARD], 20, out)
    assert {"overview: Time to first token", "overview: Prompt lengths"} <= set(empty)
    assert not {"overview: Requests by outcome", "overview: KV cache pages in use"} & set(empty)
    assert out.stat().st_size < 150_000


def filled(panel: dict[str, object], targets: list[dict[str, str]], key: str) -> Shown:
    """Return a panel with two series for each of its targets."""
    results = []
    for target in targets:
        names = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]), key}
        labels = [dict.fromkeys(names, value) for value in ("1.0", "+Inf")]
        results.append([Series(each, [(BEGIN, 1.0), (BEGIN + 4, 3.0)]) for each in labels])
    return Shown(panel, results)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_draws_every_panel_of_every_dashboard(dashboard: Dashboard, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    panels: dict[str, Panel] = {panel.title: panel for panel in dashboard.panels}
    shown = [
        filled(one, one.get("targets", []), panels[one["title"]].key if one["title"] in panels else "")
        for one in dashboard.json()["panels"]
    ]
    shown.append(Shown({**shown[-1].panel, "type": "geomap"}, shown[-1].results))
    picture(tmp_path / "dashboard.png", {"all": shown}, Span(BEGIN, BEGIN + 4, 2))
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")


def test_writes_values_as_grafana_does() -> None:
    asked = (
        (0.0, "s"),
        (0.0125, "s"),
        (90.0, "s"),
        (0.98764, "percentunit"),
        (1234.0, "short"),
        (3 << 20, "bytes"),
    )
    assert [written(*each) for each in asked] == ["0 s", "12.5 ms", "1.5 min", "98.76%", "1.23 K", "3 MiB"]


def test_knows_every_unit_of_the_dashboards() -> None:
    panels = [panel for dashboard in DASHBOARDS for panel in dashboard.panels]
    units = {panel.unit for panel in panels} | {query.unit for panel in panels for query in panel.queries}
    assert all(written(5.0, unit) for unit in units - {""})
