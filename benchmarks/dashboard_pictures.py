"""Draws the dashboards from a run's metrics, without Grafana.

`record` saves what the endpoints expose; it takes the standard library alone. `draw` gives that to a
Prometheus, queries it as Grafana does, and draws each panel with matplotlib.

python -m deltafront.benchmarks.dashboard_pictures record --address 127.0.0.1:9464 --seconds 120 \\
    --out scrapes.jsonl.gz
python -m deltafront.benchmarks.dashboard_pictures draw scrapes.jsonl.gz --dashboard overview \\
    --out docs/dashboards.webp
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.panel_drawing import Shown, Span, picture
from deltafront.dashboards.build import DASHBOARDS
from deltafront.dashboards.grafana import Dashboard
from deltafront.dashboards.prometheus import DOOR, NAMESPACE, RAY, Prometheus, Series, job_of, substituted

EVERY_S = 2
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_TAKEN = re.compile(r"(^|,)(?=(?:instance|job|namespace)=)")
"""Where a sample's own labels have the names of the target's: Prometheus puts `exported_` before them."""
_OPTIONS = (f"--query.lookback-delta={5 * EVERY_S}s", "--storage.tsdb.retention.time=100y")
"""Series end soon after their last scrape, since scrapes on file have no staleness markers. Old runs stay."""


class Scrape(NamedTuple):
    """A target's exposition at one time. at: seconds since the epoch."""

    at: float
    instance: str
    job: str
    text: str


def record(addresses: Sequence[str], seconds: float, out: Path, every_s: float = EVERY_S) -> None:
    """Save the scrapes of all addresses as lines of JSON, gzipped.

    Args:
        addresses: HOST:PORT of /metrics. One that does not answer is left out of that scrape, and named once
            on stderr.
        every_s: Seconds between scrapes; `draw` expects EVERY_S.
    """
    begin, silent = time.monotonic(), set()
    with gzip.open(out, "wt") as file:
        for number in range(int(seconds / every_s) + 1):
            time.sleep(max(0.0, begin + number * every_s - time.monotonic()))
            for address in addresses:
                try:
                    file.write(json.dumps(_scraped(address)._asdict()) + "\n")
                except OSError as error:
                    if address not in silent:
                        print(f"{address} does not answer: {error}", file=sys.stderr)
                    silent.add(address)
            file.flush()


def _scraped(address: str) -> Scrape:
    """Read a target's metrics. A door's are known by their names. Raises OSError."""
    at = time.time()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=EVERY_S) as reply:
        text = reply.read().decode()
    return Scrape(at, address, job_of(DOOR if "\ndeltafront_" in text else RAY), text)


def read(path: Path) -> list[Scrape]:
    """Read what `record` saved, in the order of time. Raises ValueError if no address answered."""
    with gzip.open(path, "rt") as file:
        scrapes = sorted(Scrape(**json.loads(line)) for line in file)
    if not scrapes:
        raise ValueError(f"{path} has no scrape")
    return scrapes


def openmetrics(scrapes: Iterable[Scrape]) -> Iterator[str]:
    """Yield the samples as lines of OpenMetrics with times, labelled as a PodMonitor's scrape labels them,
    and `up`, which Prometheus adds."""
    for scrape in scrapes:
        target = f'instance="{scrape.instance}",job="{scrape.job}",namespace="{NAMESPACE}"'
        yield f"up{{{target}}} 1 {scrape.at:.3f}\n"
        for found in filter(None, map(_SAMPLE.match, scrape.text.splitlines())):
            name, labels, value = found.groups("")
            own = "," + _TAKEN.sub(r"\1exported_", labels.rstrip(",")) if labels else ""
            yield f"{name}{{{target}{own}}} {value} {scrape.at:.3f}\n"
    yield "# EOF\n"


@contextmanager
def prometheus_of(scrapes: Sequence[Scrape], folder: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that has the scrapes and the series that the rules record from them.

    Raises:
        FileNotFoundError: Prometheus or its promtool is not installed.
        RuntimeError: promtool refuses the scrapes.
    """
    prometheus = Prometheus(folder, {}, options=_OPTIONS)
    (folder / "scrapes.txt").write_text("".join(openmetrics(scrapes)))
    _backfill(folder, "openmetrics", "scrapes.txt", "data")
    with prometheus:
        span = _span_of(scrapes)
        between = [f"--start={span.begin}", f"--end={span.end}", f"--eval-interval={EVERY_S}s"]
        _backfill(folder, "rules", "--output-dir=data", f"--url={prometheus.url}", *between, "rules.yaml")
    with prometheus:  # it reads new blocks at its start
        yield prometheus


def _span_of(scrapes: Sequence[Scrape]) -> Span:
    """Return the run's time range in whole seconds, with at most 400 steps."""
    begin, end = math.floor(scrapes[0].at), math.ceil(scrapes[-1].at)
    return Span(begin, end, max(EVERY_S, math.ceil((end - begin) / 400)))


def _backfill(folder: Path, what: str, *arguments: str) -> None:
    command = ["promtool", "tsdb", "create-blocks-from", what, *arguments]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"promtool makes no blocks from {what}: {done.stderr[-2000:]}")


def asked(prometheus: Prometheus, dashboard: Dashboard, span: Span, window_s: int) -> list[Shown]:
    """Query every panel as Grafana does with all variables chosen: at the range's end, or over it.

    Args:
        window_s: Seconds of `$__rate_interval`.
    """

    def answer(target: dict[str, Any]) -> list[Series]:
        expr = substituted(target["expr"], f"{window_s}s", span.end - span.begin)
        if target["instant"]:
            return prometheus.now(expr, span.end)
        return prometheus.over(expr, span.begin, span.end, span.step_s)

    panels = dashboard.json()["panels"]
    return [Shown(panel, [answer(target) for target in panel.get("targets", ())]) for panel in panels]


def draw(scrapes: Sequence[Scrape], dashboards: Sequence[Dashboard], window_s: int, out: Path) -> list[str]:
    """Draw the dashboards below each other. Needs matplotlib and Pillow.

    Returns:
        The panels without data, as "dashboard: title".
    """
    span = _span_of(scrapes)
    with tempfile.TemporaryDirectory() as folder, prometheus_of(scrapes, Path(folder)) as prometheus:
        shown = [asked(prometheus, one, span, window_s) for one in dashboards]
    titles = (one.json()["title"] for one in dashboards)
    picture(out, dict(zip(titles, shown, strict=True)), span)
    return [
        f"{dashboard.name}: {one.panel['title']}"
        for dashboard, panels in zip(dashboards, shown, strict=True)
        for one in panels
        if one.empty
    ]


def _parsed() -> argparse.Namespace:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--address", action="append", required=True, metavar="HOST:PORT")
    recording.add_argument("--seconds", type=float, required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("scrapes", type=Path)
    names = [one.name for one in DASHBOARDS]
    drawing.add_argument("--dashboard", action="append", required=True, choices=names)
    drawing.add_argument("--window", type=int, default=20, help="seconds of $__rate_interval")
    for each in (recording, drawing):
        each.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    given = _parsed()
    if given.command == "record":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the file ends as gzip does
        record(given.address, given.seconds, given.out)
        return
    of = {one.name: one for one in DASHBOARDS}
    for panel in draw(read(given.scrapes), [of[name] for name in given.dashboard], given.window, given.out):
        print(f"no data: {panel}")


if __name__ == "__main__":
    main()
