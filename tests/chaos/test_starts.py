"""A service starts and stops repeatedly while other processes use every core."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltafront.service.local.server_process import LocalService, NotServing

from .conftest import Amount, Record, Switch
from .running import MODEL, PATIENCE_S, configuration, merge, write_model

BUSY, TRIES = 4, 10
AS_THE_DEMO: dict[str, dict[str, Any]] = {"prefill": {"groups": 1}, "decode": {"workers": 1}}


def _compute() -> None:
    while True:
        pass


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run this number of busy processes at normal priority."""
    started = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(processes)]
    for one in started:
        one.start()
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.join()


@pytest.mark.timeout(24 * 3600)
def test_service_starts_beside_four_busy_processes(
    amount: Amount, switch: Switch, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts with a user's settings, without the tests' longer timeouts of Ray."""
    switch.off()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "start.yaml"
    content = merge(configuration(write_model(tmp_path / MODEL)), AS_THE_DEMO)
    path.write_text(yaml.safe_dump(content))
    seconds, bad, tries = list[float](), list[str](), amount.tries or TRIES
    with busy(BUSY):
        for number in range(tries):
            began = time.monotonic()
            try:
                with LocalService(path, start_s=PATIENCE_S):
                    seconds.append(time.monotonic() - began)
                print(
                    f"start {number}: {seconds[-1]:.0f} s at a load of {os.getloadavg()[0]:.0f}", flush=True
                )
            except NotServing as error:
                bad.append(str(error))
                print(f"start {number}: {error}", flush=True)
    took = f"median {statistics.median(seconds):.0f} s, longest {max(seconds):.0f} s" if seconds else "never"
    record("starts_beside_busy", tries, len(bad), f"{BUSY} busy processes, {os.cpu_count()} cores; {took}")
    assert not bad
