"""Replaces private functions of Ray 2.60 while a service starts (docs/decisions/0002)."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from deltafront.service.local.ports import agent_ports

START_S = 300.0
"""The longest time in which the service, and each of its processes, may start."""
_RETRY_S = 0.2


@contextmanager
def slow_start(grpc_port: int) -> Iterator[None]:
    """Let a Ray node that starts in the `with` block take START_S seconds. Ray has no setting for this.

    Ray fails if agents have not written their ports to files within 15 s, or if a node has not registered
    within 30 s. So agents get fixed ports, this function writes their files, and registration is retried.
    """
    from ray._private import node, services
    from ray._raylet import persist_port  # type: ignore[attr-defined]

    get_node, start = services.get_node, node.Node.start_raylet
    nodes: list[node.Node] = []

    def get_node_patiently(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + START_S
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:  # the node has not registered yet
                for started in nodes:
                    _check_raylet(started)
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)

    def start_with_port_files(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, port in agent_ports(grpc_port).items():
            persist_port(self.get_session_dir_path(), self.node_id, name, port)
        start(self, *args, **kwargs)
        nodes.append(self)

    with (
        patch.object(services, "get_node", get_node_patiently),
        _node_parameters(**agent_ports(grpc_port)),
        patch.object(node.Node, "start_raylet", start_with_port_files),
    ):
        yield


def _check_raylet(node: Any) -> None:
    for raylet in node.all_processes.get("raylet", ()):
        if (code := raylet.process.poll()) is not None:
            logs = node.get_logs_dir_path()
            raise RuntimeError(f"Ray's node ended while it started, with code {code}: {logs}/raylet.err")


def _node_parameters(**changes: Any) -> Any:
    from ray._private import parameter

    init = parameter.RayParams.__init__

    def init_changed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.update(**changes)

    return patch.object(parameter.RayParams, "__init__", init_changed)


@contextmanager
def minimal_node() -> Iterator[None]:
    """Start Ray nodes without an API server, for which `ray.init` would wait, and without an autoscaler."""
    from ray._private import node

    api_server = patch.object(node.Node, "start_api_server", lambda *_args, **_kwargs: None)
    with api_server, _node_parameters(no_monitor=True):
        yield


def start_serve(http: Mapping[str, Any], grpc: Any) -> None:
    """Start Serve without waiting for proxies, now or when an application is run.

    `serve.start` waits for the proxies, and fails if Serve replaces one of them.
    """
    from ray.serve._private import api, client
    from ray.serve.config import ControllerOptions

    controller, _proxies = api._create_controller_and_proxy_refs(
        dict(http), grpc, None, None, ControllerOptions(), None
    )
    serve_client = client.ServeControllerClient(controller)
    serve_client.wait_for_proxies_serving = lambda **_kwargs: None
    api._set_global_client(serve_client)
