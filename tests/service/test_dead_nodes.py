"""A door's calls to a dead node's worker fail at once, although Ray's control store does not know it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deltafront.service.app import NO_WAIT_FOR_REASONS

pytestmark = pytest.mark.long

SCRIPT = """
import json, os, signal, sys
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
node = cluster.add_node(num_cpus=1, resources={"far": 1}, include_dashboard=False)
ray.init(address=cluster.address, log_to_driver=False)

@ray.remote(num_cpus=0, max_concurrency=100)
class Worker:
    def pid(self):
        return os.getpid()

@ray.remote(num_cpus=0)
class Door:
    async def calls(self, worker, count):
        errors = []
        for _ in range(count):
            try:
                await worker.pid.remote()
            except ray.exceptions.RayActorError as error:
                errors.append(type(error).__name__)
        return errors

worker = Worker.options(resources={"far": 0.1}).remote()
ours = Door.options(runtime_env={"env_vars": json.loads(sys.argv[1])}).remote()
theirs = Door.remote()
pid = ray.get(worker.pid.remote())
ray.get([door.calls.remote(worker, 1) for door in (ours, theirs)])
for dying in (node.all_processes["raylet"][0].process.pid, pid):
    os.kill(dying, signal.SIGKILL)
calls = {ours.calls.remote(worker, 5): "ours", theirs.calls.remote(worker, 5): "theirs"}
(first, *_), _ = ray.wait([*calls])
print(json.dumps([calls[first], ray.get(first)]))
"""
"""Prints which door's calls have failed first. Ray's own take a second each."""


def test_a_doors_calls_to_a_dead_node_fail_without_a_wait() -> None:
    """The control store checks nodes once an hour here."""
    never = {"RAY_health_check_period_ms": "3600000", "RAY_health_check_initial_delay_ms": "3600000"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(NO_WAIT_FOR_REASONS)],
        env=os.environ | never,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    (answer,) = (line for line in done.stdout.splitlines() if line.startswith('["'))  # Ray prints, too
    assert json.loads(answer) == ["ours", 5 * ["ActorUnavailableError"]]
