"""`deltafront top`: tables from two scrapes, and from a metrics port."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deltafront.service.cli import terminal
from deltafront.service.cli.main import app
from deltafront.service.cli.top import command
from deltafront.service.cli.top.tables import overview, parse_scrape, percentile

EARLIER = """
deltafront_inter_token_latency_seconds_count 100
deltafront_time_to_first_token_seconds_count{prompt="1K"} 10
deltafront_time_to_first_token_seconds_bucket{prompt="1K",le="1.0"} 10
deltafront_time_to_first_token_seconds_bucket{prompt="1K",le="2.0"} 10
deltafront_time_to_first_token_seconds_bucket{prompt="1K",le="+Inf"} 10
deltafront_requests_total{outcome="finished",method_rpc="Generate"} 10
deltafront_requests_total{outcome="finished",method_rpc="GetServerInfo"} 3
deltafront_requests_total{outcome="unavailable",method_rpc="Generate"} 0
"""
NOW = """
deltafront_inter_token_latency_seconds_count 148
deltafront_time_to_first_token_seconds_count{prompt="1K"} 10
deltafront_time_to_first_token_seconds_count{prompt="4K"} 2
deltafront_time_to_first_token_seconds_bucket{prompt="1K",le="1.0"} 10
deltafront_time_to_first_token_seconds_bucket{prompt="1K",le="2.0"} 10
deltafront_time_to_first_token_seconds_bucket{prompt="1K",le="+Inf"} 10
deltafront_time_to_first_token_seconds_bucket{prompt="4K",le="1.0"} 0
deltafront_time_to_first_token_seconds_bucket{prompt="4K",le="2.0"} 2
deltafront_time_to_first_token_seconds_bucket{prompt="4K",le="+Inf"} 2
deltafront_requests_total{outcome="finished",method_rpc="Generate"} 12
deltafront_requests_total{outcome="finished",method_rpc="GetServerInfo"} 4
deltafront_requests_total{outcome="unavailable",method_rpc="Generate"} 1
deltafront_worker_up{worker="prefill:a1"} 1
deltafront_worker_draining{worker="prefill:a1"} 1
deltafront_num_requests_running{worker="prefill:a1"} 1
deltafront_num_requests_waiting{worker="prefill:a1"} 7
deltafront_queue_tokens{worker="prefill:a1"} 9000
deltafront_prefill_tokens_per_second{worker="prefill:a1"} 104.4
deltafront_kv_pages{worker="prefill:a1"} 200
deltafront_kv_pages_free{worker="prefill:a1"} 50
deltafront_worker_up{worker="decode:b2"} 0
deltafront_worker_up{worker="decode:c3"} 1
deltafront_sessions{worker="decode:c3"} 3
deltafront_kv_pages{worker="decode:c3"} 400
deltafront_kv_pages_free{worker="decode:c3"} 300
deltafront_kv_pages_remembered{worker="decode:c3"} 40
"""
TIER = """
deltafront_kv_tier_room_pages{worker="decode:c3",tier="host"} 800
deltafront_kv_tier_pages{worker="decode:c3",tier="host"} 600
"""


def rows(now: str, earlier: str = EARLIER) -> list[str]:
    """Show the tables of two scrapes ten seconds apart, with single spaces between cells."""
    console = Console(file=io.StringIO(), width=100)
    console.print(overview(parse_scrape(earlier, 5.0), parse_scrape(now, 15.0), "Model"))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_top_shows_rates_between_two_scrapes() -> None:
    shown = rows(NOW)
    assert shown[0] == "Model"
    assert "tokens a second 5.0" in shown
    assert "prompt tokens in the queue 9000" in shown
    assert "Generate: finished 12, 0.20 a second" in shown
    assert "Generate: unavailable 1, 0.10 a second" in shown
    assert not any("GetServerInfo" in line for line in shown)


def test_top_shows_ttft_of_the_last_seconds_and_since_the_start() -> None:
    shown = rows(NOW)
    assert "last 10 s 1.50 s 1.90 s 1.99 s 2" in shown
    assert "since the start 0.60 s 1.40 s 1.94 s 12" in shown
    assert "last 10 s – – – 0" in rows(NOW, earlier=NOW)


def test_top_shows_each_worker_with_its_state() -> None:
    shown = rows(NOW)
    assert "a1 draining 1 7 9000 104 75% of 200" in shown
    assert "b2 gone 0 0 0 0 –" in shown
    assert "c3 up 0 0 3 40 25% of 400" in shown


def test_top_shows_cache_tiers_only_if_workers_report_them() -> None:
    assert not any("tier" in line for line in rows(NOW))
    assert "c3 host 75% of 800" in rows(NOW + TIER)


def test_top_shows_no_negative_rate_after_a_restart() -> None:
    shown = rows(EARLIER, earlier=NOW)
    assert "tokens a second 0.0" in shown
    assert "last 10 s – – – 0" in shown


def test_percentile_beyond_the_last_bound_is_that_bound() -> None:
    assert percentile([(1.0, 0.0), (2.0, 1.0), (float("inf"), 9.0)], 0.5) == 2.0
    assert percentile([], 0.5) is None


@contextmanager
def serving(text: str) -> Iterator[str]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def server_info(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    info = SimpleNamespace(display_name="", model="model", version="1", metrics_address="")

    @contextmanager
    def connect(*_given: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(info=lambda: info)

    monkeypatch.setattr(terminal, "connect", connect)
    return info


def test_top_once_reads_the_port_that_the_server_names(server_info: SimpleNamespace) -> None:
    with serving(NOW) as server_info.metrics_address:
        done = CliRunner().invoke(app, ["top", "--once", "--every", "0.1"])
    assert done.exit_code == 0 and "model (Deltafront 1)" in done.output
    assert "25% of 400" in done.output


@pytest.mark.parametrize("text", ["<html>", "up 1\n"], ids=["no metrics", "other metrics"])
@pytest.mark.usefixtures("server_info")
def test_top_says_in_one_line_what_it_cannot_read(text: str) -> None:
    with serving(text) as address:
        done = CliRunner().invoke(app, ["top", "--metrics", address])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"deltafront: http://{address}/metrics cannot be read: ")
    assert "door.metrics_port" in done.stderr and done.stderr.count("\n") == 1


def test_top_keeps_the_last_tables_while_metrics_cannot_be_read(tmp_path: Path) -> None:
    page = tmp_path / "metrics"
    page.write_text(NOW)
    tables = command._follow(page.as_uri(), "Model", 0.0)
    shown = next(tables)
    page.unlink()
    console = Console(file=io.StringIO(), width=200)
    console.print(next(tables))
    assert isinstance(console.file, io.StringIO)
    assert "cannot be read" in console.file.getvalue() and "25% of 400" in console.file.getvalue()
    page.write_text(NOW)
    assert shown.renderables and "cannot be read" not in str(next(tables).renderables)
