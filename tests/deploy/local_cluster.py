"""A Ray cluster of several nodes on this machine, with groups named like KubeRay's.

Every node is a raylet with its own address and HAProxy. HAProxies and doors listen on all addresses, as in a
pod, so here they also need their own ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deltafront.service import listening
from deltafront.service.config import ServiceConfig
from deltafront.service.local.local_ray import ray_environment
from deltafront.service.local.ports import agent_ports, serve_ports
from deltafront.service.local.ray_patches import slow_start

LABEL = "ray.io/node-group"
_DASHBOARD = 8265
_CONTROL_STORE = 6399
_START_S = 600.0
_BUSY = {
    "RAY_worker_niceness": "0",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
"""Settings for a busy machine: without them Ray's workers have low priority, and slow starts fail."""


@contextlib.contextmanager
def two_parts_of_the_dashboard() -> Iterator[None]:
    """Start only two modules of Ray's dashboard, which the tests use, because Ray starts a process for each
    module."""
    from ray._private import ray_constants, services

    start = services.start_ray_process

    def with_parts(command: list[str], kind: str, **named: Any) -> Any:
        parts = (
            ["--modules-to-load=ServeHead,StateHead"] if kind == ray_constants.PROCESS_TYPE_DASHBOARD else []
        )
        return start([*command, *parts], kind, **named)

    services.start_ray_process = with_parts
    try:
        yield
    finally:
        services.start_ray_process = start


def _address(number: int) -> str:
    """Return a node's loopback address. It is not 127.0.0.1, which Ray would replace by the machine's
    address."""
    return f"127.0.0.{number + 2}"


class LocalCluster:
    """A cluster. groups: each node's label, the head's first; the head also belongs to its group. redis: the
    address of Redis for the control store. Without Redis its data is lost with the head."""

    def __init__(self, groups: Sequence[str], settings: ServiceConfig, redis: str = "") -> None:
        from ray.cluster_utils import Cluster

        self._settings = settings
        self._folder = Path(
            tempfile.mkdtemp(prefix="deltafront-")
        )  # pytest's folders are too long for sockets
        self._environment = pytest.MonkeyPatch()
        for name, value in (ray_environment(settings, self._folder) | _BUSY).items():
            self._environment.setenv(name, value)
        listening.read_token()
        self._cluster = Cluster(shutdown_at_exit=True)
        self._groups = tuple(groups)
        self._redis = redis
        self._nodes: dict[int, Any] = {}
        self._serving = False
        self.doors: list[str] = []
        self.http_doors: list[str] = []
        try:
            for number in range(len(groups)):
                self.add(number)
        except BaseException:
            self.stop()
            raise

    def add(self, number: int) -> None:
        """Add the missing node of `groups[number]`. Doors' nodes can be added only at the start."""
        door, group = self._settings.door, self._groups[number]
        ports = {
            "RAY_SERVE_WORKER_PROXY_GRPC_PORT": door.grpc_port + number,  # the head has the original port
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": door.http_port + number,
        }
        variables = serve_ports(door.grpc_port + number) | {key: str(port) for key, port in ports.items()}
        dashboard = {"dashboard_host": _address(0), "dashboard_port": _DASHBOARD, "include_dashboard": True}
        store = (
            {"external_addresses": [self._redis], "gcs_server_port": _CONTROL_STORE} if self._redis else {}
        )
        head = dashboard | store if number == 0 else {}
        with slow_start(door.grpc_port + number), two_parts_of_the_dashboard():
            self._nodes[number] = self._cluster.add_node(
                num_cpus=2,
                labels={LABEL: group},
                env_vars=variables,
                node_ip_address=_address(number),
                include_log_monitor=False,
                **agent_ports(door.grpc_port + number),
                **head,
            )
        if group == "door":
            self.doors.append(f"{_address(number)}:{door.grpc_port + number}")
            self.http_doors.append(f"{_address(number)}:{door.http_port + number}")

    def join(self, group: str) -> None:
        """Add another node to a group."""
        self._groups += (group,)
        self.add(len(self._groups) - 1)

    def drain(self, number: int, deadline_s: int = 600) -> subprocess.Popen[str]:
        """Run the preStop command of the node's pod, which waits until nothing runs there."""
        command = [sys.executable, "-m", "deltafront.service.cli.main", "drain"]
        command += ["--deadline-s", str(deadline_s), "--node-id", self._nodes[number].node_id]
        environment = os.environ | {"RAY_ADDRESS": self._cluster.address}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def remove(self, number: int) -> None:
        """Kill all processes of a node at once, like a machine that fails. Agents are killed, too, because
        they would keep their ports for half a minute."""
        node, children = self._nodes.pop(number), list[psutil.Process]()
        with contextlib.suppress(psutil.NoSuchProcess):  # a drained node may have ended
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            children = raylet.children(recursive=True)
        self._cluster.remove_node(node, allow_graceful=False)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    @property
    def dashboard(self) -> str:
        return f"http://{_address(0)}:{_DASHBOARD}"

    def _request(self, data: bytes | None = None, **how: str) -> urllib.request.Request:
        """Send a request to the dashboard, with Ray's token."""
        headers = {
            "authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}",
            "content-type": "application/json",
        }
        return urllib.request.Request(f"{self.dashboard}/api/serve/applications/", data, headers, **how)

    def _start_serve(self, content: Any) -> None:
        """Start Serve without an application, with the doors' gRPC ports of all nodes.

        Serve gives every node the same ports. For HTTP, a door whose port is taken gets the next one. For
        gRPC, Serve uses SO_REUSEPORT, so two doors on one machine would share a port and get each other's
        requests.
        """
        import ray
        from ray.serve._private.common import RequestProtocol
        from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

        nothing = json.dumps(content | {"applications": []}).encode()
        request = self._request(nothing, method="PUT")
        until = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(request, timeout=_START_S).close()
                break
            except urllib.error.HTTPError:  # Serve waits 60 s for proxies, whose start continues
                if time.monotonic() > until:
                    raise
        self._cluster.connect()
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        doors = [self._nodes[number].node_id for number, group in enumerate(self._groups) if group == "door"]
        other, grpc = "a door of another node", RequestProtocol.GRPC
        for before, node in enumerate(doors):
            for _ in range(before):
                port = ray.get(controller.allocate_replica_port.remote(node, other, grpc))
                ray.get(controller.release_replica_port.remote(node, other, port, grpc, block_port=True))
        ray.shutdown()

    def deploy(self, content: Any) -> None:
        """Run `serve deploy`, and wait until every deployment is healthy."""
        if not self._serving:
            self._start_serve(content)
            self._serving = True
        path = self._folder / "serve.yaml"
        path.write_text(yaml.safe_dump(content))
        tool = Path(sys.executable).parent / "serve"
        subprocess.run([tool, "deploy", path, "-a", self.dashboard], check=True, timeout=_START_S)
        until = time.monotonic() + _START_S
        while (status := self.status())["status"] != "RUNNING":
            assert status["status"] != "DEPLOY_FAILED" and time.monotonic() < until, json.dumps(
                status, indent=1
            )
            time.sleep(1)

    def status(self) -> Any:
        """Return Serve's status of the application."""
        with urllib.request.urlopen(self._request(), timeout=_START_S) as reply:
            applications = json.load(reply)["applications"]
        return next(iter(applications.values()), {"status": "NOT_STARTED"})

    def replicas(self, deployment: str) -> list[str]:
        """Return the states of a deployment's replicas."""
        return sorted(one["state"] for one in self.status()["deployments"][deployment]["replicas"])

    def wait_for(self, deployment: str, states: list[str]) -> None:
        until = time.monotonic() + _START_S
        while (found := self.replicas(deployment)) != states:
            assert time.monotonic() < until, f"{deployment} is {found}, not {states}"
            time.sleep(0.5)

    def groups_of(self, kind: str) -> list[str]:
        """For each living actor of a class, return the group of its node."""
        from ray.util.state import list_actors, list_nodes

        nodes = {node.node_id: node.labels for node in list_nodes(self.dashboard, detail=True)}
        actors = list_actors(self.dashboard, filters=[("state", "=", "ALIVE")], limit=1000)
        return sorted(nodes[actor.node_id][LABEL] for actor in actors if kind in actor.class_name)

    def nodes_of(self, kind: str) -> set[str]:
        from ray.util.state import list_actors

        actors = list_actors(self.dashboard, filters=[("state", "=", "ALIVE")], limit=1000)
        return {actor.node_id for actor in actors if kind in actor.class_name}

    def stop(self) -> None:
        self._cluster.shutdown()
        self._environment.undo()
        shutil.rmtree(self._folder, ignore_errors=True)
