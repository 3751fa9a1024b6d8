"""A scrape of a node: the metrics of all its doors, and dead ones' counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from prometheus_client.registry import Collector


class NodeCollector(Collector):
    """model_name: a label of every sample, unless empty."""

    def __init__(self, directory: Path, model_name: str) -> None:
        self._directory = directory
        self._label = {"model_name": model_name} if model_name else {}
        self._all = multiprocess.MultiProcessCollector(None, str(directory))  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Any]:
        for pid in _dead(self._directory):
            multiprocess.mark_process_dead(pid, str(self._directory))  # type: ignore[no-untyped-call]
        for metric in self._all.collect():  # type: ignore[no-untyped-call]
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._label}) for sample in metric.samples
            ]
            yield metric


def registry(directory: Path, model_name: str) -> CollectorRegistry:
    collectors = CollectorRegistry()
    collectors.register(NodeCollector(directory, model_name))
    return collectors


def expose(directory: Path, model_name: str) -> bytes:
    return generate_latest(registry(directory, model_name))


def _dead(directory: Path) -> set[int]:
    """Dead processes with gauges in the directory."""
    pids = {
        int(match[1])
        for file in directory.glob("gauge_live*.db")
        if (match := re.search(r"_(\d+)\.db", file.name))
    }
    return {pid for pid in pids if not Path(f"/proc/{pid}").exists()}
