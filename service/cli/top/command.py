"""The command `deltafront top`: reads the metrics port again and again."""

from __future__ import annotations

import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from http.client import HTTPException
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from deltafront.service.cli import terminal
from deltafront.service.cli.terminal import ADDRESS, Address, Bearer, Tls, fail
from deltafront.service.cli.top.tables import Scrape, overview, parse_scrape

_TIMEOUT_S = 10.0
_WINDOW_S = 60.0
"""How far back rates and recent percentiles look at most."""


class ScrapeError(Exception):
    """The metrics cannot be read. The message is one line."""


def top_command(
    address: Address = ADDRESS,
    token: Bearer = "",
    tls: Tls = False,
    metrics: Annotated[
        str, typer.Option(help="The metrics port's host:port; default: what the server says.")
    ] = "",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two scrapes.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the tables after two scrapes.")] = False,
) -> None:
    """Show workers, queues, pages, tokens a second and times to first token, live."""
    with terminal.connect(address, token, tls) as client:
        info = client.info()
    title = f"{info.display_name or info.model} (Deltafront {info.version})"
    tables = _follow(f"http://{metrics or info.metrics_address}/metrics", title, every)
    try:
        if once:
            Console().print(next(tables))
            return
        with Live(next(tables), screen=True, auto_refresh=False) as live:
            for shown in tables:
                live.update(shown, refresh=True)
    except ScrapeError as error:
        fail(str(error))
    except KeyboardInterrupt:
        return


def _follow(url: str, title: str, every: float) -> Iterator[Group]:
    """Scrape and yield the tables every `every` seconds. If a scrape fails, yield its error and the last
    tables. Raises ScrapeError if there are no last tables yet."""
    scrapes, shown = deque([_scrape(url)]), Group()
    while True:
        time.sleep(every)
        try:
            scrapes.append(_scrape(url))
        except ScrapeError as error:
            if not shown.renderables:
                raise
            yield Group(f"[red]{escape(str(error))}", shown)
        else:
            while scrapes[1].at <= scrapes[-1].at - _WINDOW_S:
                scrapes.popleft()
            yield (shown := overview(scrapes[0], scrapes[-1], title))


def _scrape(url: str) -> Scrape:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return parse_scrape(answer.read().decode(), time.monotonic())
    except (OSError, HTTPException, ValueError) as error:
        advice = "can door.metrics_port be reached from here? --metrics gives another address"
        raise ScrapeError(f"{url} cannot be read: {getattr(error, 'reason', error)} ({advice})") from None
