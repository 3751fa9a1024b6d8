"""The service under test, with two of everything and a tiny random model; and its processes, by kind."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from deltafront.service.client import DeltafrontClient, DeltafrontError, Progress
from deltafront.service.local.server_process import LocalService

from ..service.inprocess import VOCABULARY, write_tokenizer
from ..workers.tiny_model import make_tiny_model
from .schedule import Fault, Kind, prompt

MODEL = "tiny"
_AS_OTHERS = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
"""The environment of the service. Without it Ray's workers have low priority, so other load would act like a
fault."""
Audits = list[dict[str, Any]]
RANKS = 2
"""Ranks of each decode worker."""
REPLAYS = 5
"""Retries of a request, and so the number of processes that may die during it."""
_TRACEBACK_LINES = 60
PATIENCE_S = 600.0
"""The longest wait for an event, only to keep a failing test from hanging."""


def whole_of(groups: int, stages: int, workers: int, doors: int = 2, ranks: int = 1) -> dict[Kind, int]:
    """Return the number of Deltafront's processes of each kind."""
    return {
        Kind.STAGE: groups * stages,
        Kind.CONTROLLER: groups,
        Kind.DECODE: workers,
        Kind.RANK: workers * (ranks - 1),
        Kind.GROUP_OWNER: groups,
        Kind.DECODE_OWNER: workers,
        Kind.DOOR: doors,
    }


def configuration(model: Path) -> dict[str, Any]:
    """Make a configuration with two of everything."""
    worker = {"cache_tokens": 32_768, "device": "cpu"}
    ranks = {"tensor_parallel": RANKS, "cpus": 0.1}
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "prefill": {**worker, "groups": 2, "stages": 2, "chunk_tokens": 128, "cpus_per_stage": 0.1},
        "decode": {**worker, **ranks, "workers": 2, "max_batch": 16, "page_selection": "full"},
        "handoff": {"transport": "object_store"},
        "door": {
            "replicas": 2,
            "replays": REPLAYS,
            "default_method": "dense",
            "metrics_host": "127.0.0.1",
            "model_name": MODEL,
        },
    }


class Service:
    """A running service. pid: the root of its process tree. whole: the complete number of Deltafront's
    processes of each kind. model: the model's name over HTTP."""

    def __init__(
        self,
        pid: int,
        whole: dict[Kind, int],
        address: str = "127.0.0.1:9000",
        http: str = "http://127.0.0.1:8000",
        model: str = MODEL,
    ) -> None:
        self.pid, self.whole, self.address, self.http, self.model = pid, whole, address, http, model
        self.metrics = "http://127.0.0.1:9464/metrics"

    def processes(self) -> dict[Kind, list[psutil.Process]]:
        """Return the processes of a kind that live and are not stopped, the oldest first."""
        found: dict[Kind, list[psutil.Process]] = {kind: [] for kind in Kind}
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                title, status = " ".join(process.cmdline()), process.status()
            except psutil.Error:
                continue
            kind = next((kind for kind in Kind if kind.value in title), None)
            if kind and status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                found[kind].append(process)
        return {kind: sorted(those, key=lambda one: one.pid) for kind, those in found.items()}

    def strike(self, fault: Fault) -> bool:
        """Send a fault's signal, unless no process of its kind is left, or only one door."""
        those = self.processes()[fault.kind]
        if len(those) <= (fault.kind is Kind.DOOR):
            return False
        try:
            os.kill(those[fault.which % len(those)].pid, fault.signal)
        except ProcessLookupError:
            return False
        return True

    def client(self, retry_s: float = 60.0) -> DeltafrontClient:
        return DeltafrontClient(self.address, retry_s=retry_s)

    def chunk_seconds(self) -> float:
        """Measure the median seconds between two chunks of a prompt alone."""
        at, waits = time.monotonic(), list[float]()
        with self.client() as client:
            for event in client.generate(prompt(5), method="dense", max_tokens=1, ignore_eos=True):
                if isinstance(event, Progress):
                    waits.append(time.monotonic() - at)
                    at = time.monotonic()
        return statistics.median(waits[1:])

    def used(self, client: DeltafrontClient) -> int:
        """Count the pages in use."""
        info = client.info()
        total = info.decode_pages_total + info.prefill_pages_total
        return total - info.decode_pages_free - info.prefill_pages_free

    def seconds_to_an_answer(self, client: DeltafrontClient) -> float:
        """Measure the seconds until HAProxy and a door answer."""
        return waited(lambda: bool(client.info().model), lambda: "nobody answers", PATIENCE_S)

    def seconds_to_no_page(self, client: DeltafrontClient, patience_s: float = PATIENCE_S) -> float:
        """Measure the seconds until no page is in use. Raises AssertionError after the limit."""
        return waited(lambda: not self.used(client), lambda: f"{self.used(client)} pages", patience_s)

    def seconds_to_whole(self, client: DeltafrontClient, patience_s: float = PATIENCE_S) -> float:
        """Measure the seconds until every process runs and a door knows all workers."""

        def counts() -> dict[Kind, int]:
            return {kind: len(those) for kind, those in self.processes().items()}

        def complete() -> bool:
            if {kind: counts()[kind] for kind in self.whole} != self.whole:
                return False
            info = client.info()
            known = info.prefill_groups, info.decode_workers
            return known == (self.whole[Kind.CONTROLLER], self.whole[Kind.DECODE])

        return waited(complete, lambda: f"only {counts()}", patience_s)

    def seconds_to_usable(self, client: DeltafrontClient, patience_s: float = PATIENCE_S) -> float:
        """Measure the seconds until both doors, a group and a decode worker serve. Others may still be
        missing."""

        def usable() -> bool:
            info = client.info()
            doors = len(self.processes()[Kind.DOOR])
            return doors == self.whole[Kind.DOOR] and info.prefill_groups > 0 and info.decode_workers > 0

        return waited(usable, lambda: "a door or a role is missing", patience_s)

    def audits(self) -> Audits:
        """Return the audit entries of the living doors."""
        entries = (line.partition("deltafront.audit:")[2] for line in self._log())
        return [json.loads(entry) for entry in entries if entry]

    def tried_again(self, since: float) -> list[float]:
        """Return when living doors sent a request to another worker, in seconds after `since` (epoch)."""
        lines = (line.split(" WARNING:deltafront.service.request.run.attempt:try ") for line in self._log())
        times = (datetime.strptime(parts[0], "%Y-%m-%d %H:%M:%S,%f") for parts in lines if len(parts) > 1)
        return sorted(at.timestamp() - since for at in times if at.timestamp() > since)

    def unexpected(self) -> str:
        """Return the doors' unexpected exceptions, with the log after each."""
        lines = list(self._log())
        found = [n for n, line in enumerate(lines) if line.endswith("a request failed")]
        return "\n".join(line for n in found for line in lines[n : n + _TRACEBACK_LINES])

    def _log(self) -> Iterator[str]:
        """Return the standard error of the living doors."""
        for door in self.processes()[Kind.DOOR]:
            yield from Path(f"/proc/{door.pid}/fd/2").read_text(errors="replace").splitlines()

    def scrape(self) -> str:
        """Read /metrics. If the door with the port dies, another door takes the port over."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return httpx.get(self.metrics, timeout=30).raise_for_status().text
            except httpx.HTTPError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.3)


def waited(true: Callable[[], bool], otherwise: Callable[[], str], patience_s: float) -> float:
    """Measure the seconds until a condition holds. A service that does not answer is asked again."""
    started = time.monotonic()
    while True:
        try:
            if true():
                return time.monotonic() - started
        except DeltafrontError:
            pass
        if time.monotonic() - started > patience_s:
            raise AssertionError(f"after {patience_s:g} s: {otherwise()}")
        time.sleep(0.1)


def write_model(directory: Path) -> Path:
    """Write a tiny random model with a byte tokenizer."""
    make_tiny_model(directory, VOCABULARY, positions=16_384)
    write_tokenizer(directory)
    return directory


def merge(content: dict[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Change some keys of some sections of a configuration."""
    return {name: {**keys, **sections.get(name, {})} for name, keys in content.items()}


@contextmanager
def running(folder: Path, **sections: dict[str, Any]) -> Iterator[Service]:
    """Run a service during the `with` block. sections: changes of its configuration."""
    content = merge(configuration(write_model(folder / MODEL)), sections)
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(content))
    prefill, decode = content["prefill"], content["decode"]
    with LocalService(path, start_s=PATIENCE_S, environment=_AS_OTHERS) as local:
        whole = whole_of(
            prefill["groups"], prefill["stages"], decode["workers"], ranks=decode["tensor_parallel"]
        )
        service = Service(local.pid, whole)
        with service.client() as client:
            service.seconds_to_whole(client)
        yield service
