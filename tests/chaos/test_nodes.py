"""Whole nodes fail, on a Ray cluster of five on this machine: one of doors, two of prefill, two of decode."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafront.service.app import serve_config
from deltafront.service.config import parse

from ..deploy.local_cluster import LABEL, LocalCluster
from .conftest import Amount, Record, Switch
from .play import play
from .references import references
from .running import MODEL, RANKS, Service, configuration, merge, whole_of, write_model
from .schedule import Episode, Fault, Kind, episode

NODES = ("door", "prefill", "prefill", "decode", "decode")
REMOVABLE = ((1, 2), (3, 4))
"""The nodes that fail, in turn. The doors' node stays, because choosing another one is a load balancer's
task."""
ALONE = {"prefill": {"cpus_per_stage": 0.6}, "decode": {"cpus": 0.6}, "door": {"host": "0.0.0.0"}}
"""Settings that put one group or worker on each node, which has two CPUs and its own address."""


class OnNodes(Service):
    """A service on several nodes. A fault removes a whole node."""

    def __init__(self, cluster: LocalCluster) -> None:
        http = f"http://{cluster.http_doors[0]}"
        super().__init__(os.getpid(), whole_of(2, 2, 2, ranks=RANKS), cluster.doors[0], http)
        self._cluster = cluster

    def strike(self, fault: Fault) -> bool:
        self._cluster.remove(fault.which)
        return True


@pytest.fixture
def cluster(amount: Amount, switch: Switch, tmp_path: Path, tiers: dict[str, Any]) -> Iterator[LocalCluster]:
    switch.off()
    labels = {section: {"node_labels": {LABEL: section}} for section in ("door", "prefill", "decode")}
    content = merge(merge(configuration(write_model(tmp_path / MODEL)), labels), ALONE)
    content = merge(content, {"decode": tiers})
    made = LocalCluster(NODES, parse(content))
    try:
        made.deploy(serve_config(content))
        yield made
    finally:
        made.stop()


@pytest.mark.timeout(24 * 3600)
def test_removed_nodes_lose_no_request(cluster: LocalCluster, amount: Amount, record: Record) -> None:
    """The other node of its kind serves; then the lost node comes back."""
    service, draw = OnNodes(cluster), random.Random(amount.seed)
    tries, done, problems, longest = amount.tries or 8, 0, list[str](), 0.0
    until = time.monotonic() + amount.budget_s
    with service.client() as client:
        service.seconds_to_whole(client)
        known = references(service)
        while done < tries and time.monotonic() < until:
            node = draw.choice(REMOVABLE[done % 2])
            kind = Kind.STAGE if NODES[node] == "prefill" else Kind.DECODE
            asks = episode(amount.seed + done, 6).asks
            fault = Fault(kind, node, signal.SIGKILL, draw.uniform(0.02, 0.9))
            outcome = play(service, Episode(done, asks, (fault,)), known)
            print(
                f"{NODES[node]}, longest pause {outcome.pause_s:.1f} s",
                *outcome.problems,
                sep="\n  ",
                flush=True,
            )
            problems, longest = problems + outcome.problems, max(longest, outcome.pause_s)
            cluster.add(node)
            service.seconds_to_whole(client)
            done += 1
    record("nodes_removed", done, len(problems), f"of prefill and decode; longest pause {longest:.1f} s")
    assert not problems
