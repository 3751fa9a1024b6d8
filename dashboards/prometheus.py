"""Runs a Prometheus on this machine with the rules of the Kubernetes manifests, and queries it as Grafana
does."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

RULES = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes" / "monitoring" / "rules.yaml"
DOOR, RAY = "deltafront-door", "deltafront-ray"
"""The PodMonitors of doors and of Ray nodes."""
NAMESPACE = "local"
"""The namespace of targets on this machine."""
_START_S = 60.0
_STEP_S = 1


def job_of(monitor: str) -> str:
    """Return the label `job` of a PodMonitor's targets."""
    return f"{NAMESPACE}/{monitor}"


class QueryFailed(RuntimeError):
    """A query failed. The message is Prometheus' error."""


class Series(NamedTuple):
    """A series of a result. points: (seconds since the epoch, value), without NaN."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


def substituted(expr: str, window: str, range_s: int) -> str:
    """Return a panel's query as Grafana sends it with all namespaces, models and methods chosen."""
    values = {"__rate_interval": window, "__range": f"{range_s}s"}
    return re.sub(r"\$([a-z_]+)", lambda found: values.get(found[1], ".*"), expr)


class Prometheus:
    """Run Prometheus with the rules of the Kubernetes manifests: `with Prometheus(folder, {DOOR:
    "127.0.0.1:9464"}) as prometheus:`.

    folder: for its files; those that an earlier Prometheus left in `data` are read. targets: the addresses to
    scrape, by PodMonitor. interval_s: seconds between scrapes and evaluations. options: further ones of
    Prometheus' command line. Raises FileNotFoundError if Prometheus is not installed (Debian: prometheus),
    and RuntimeError if it does not start.
    """

    def __init__(
        self, folder: Path, targets: Mapping[str, str], interval_s: int = _STEP_S, options: Sequence[str] = ()
    ) -> None:
        tool = shutil.which("prometheus")
        if tool is None:
            raise FileNotFoundError("prometheus is not installed (Debian: prometheus)")
        self._folder = folder
        self._configure(targets, interval_s)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{address}"
        self._command = [tool, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", *options]
        self._command += [f"--web.listen-address={address}", "--log.level=warn"]
        self._process: subprocess.Popen[bytes] | None = None

    def _configure(self, targets: Mapping[str, str], interval_s: int) -> None:
        """Write a configuration that sets the labels of the PodMonitors: job, namespace and pod."""
        import yaml  # here, since recording a run on another machine takes the standard library alone

        labels = {"namespace": NAMESPACE, "pod": "door"}
        scraped = [
            {
                "job_name": job_of(monitor),
                "static_configs": [{"targets": [target], "labels": labels}],
            }
            for monitor, target in targets.items()
        ]
        every = {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"}
        config = {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": scraped}
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        rules = yaml.safe_load(RULES.read_text())["spec"]
        (self._folder / "rules.yaml").write_text(yaml.safe_dump(rules))

    def __enter__(self) -> Prometheus:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=log, stderr=log)
        until = time.monotonic() + _START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError((self._folder / "prometheus.log").read_text()[-2000:])
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait(_START_S)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def now(self, expr: str, when: float | None = None) -> list[Series]:
        """Evaluate a query at one moment. when: seconds since the epoch; None: now. Raises QueryFailed."""
        return _read(self._ask("query", query=expr, **({} if when is None else {"time": when})))

    def over(self, expr: str, begin: float, end: float, step_s: float) -> list[Series]:
        """Raises QueryFailed."""
        return _read(self._ask("query_range", query=expr, start=begin, end=end, step=step_s))

    def label_values(self, query: str) -> list[str]:
        """Return the values of a variable's query `label_values(series, label)`, as Grafana does. Raises
        QueryFailed, and ValueError for a query of another form."""
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        if found is None:
            raise ValueError(f"{query} is not label_values(series, label)")
        what = f"label/{found[2]}/values?" + urllib.parse.urlencode({"match[]": found[1]})
        values: list[str] = self._ask(what)
        return values

    def rules(self) -> list[dict[str, Any]]:
        """Return every rule with its health."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, what: str, **arguments: object) -> Any:
        url = f"{self.url}/api/v1/{what}"
        data = urllib.parse.urlencode(arguments).encode() if arguments else None
        try:
            with urllib.request.urlopen(url, data, timeout=60) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise QueryFailed(json.load(error)["error"]) from None


def _read(data: Mapping[str, Any]) -> list[Series]:
    """Parse the series that have numbers."""
    result = data["result"]
    if data["resultType"] == "scalar":
        result = [{"metric": {}, "value": result}]
    found = [Series(one["metric"], _numbers(one.get("values") or [one["value"]])) for one in result]
    return [series for series in found if series.points]


def _numbers(points: list[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(when, float(value)) for when, value in points if math.isfinite(float(value))]
