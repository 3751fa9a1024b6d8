"""Ray, Serve and Deltafront on this machine, for as long as a block runs."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..workers.messages import NAMESPACE, ModelSpec
from ..workers.model_store import resolve, resolve_adapter
from .config import ServiceConfig
from .wiring import check_start

LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 2 << 30
_OWNER_CPUS = 0.1


def local_model(settings: ServiceConfig) -> ServiceConfig:
    """The same configuration with model and adapter as directories, everything checked.

    Downloads or converts the model if need be. Raises ModelError or ConfigError.
    """
    spec = settings.model
    adapter = None if spec.adapter is None else str(resolve_adapter(spec.adapter))
    found = settings.with_model(path=str(resolve(spec.path)), adapter=adapter)
    if not settings.door.model_name:
        door = settings.door.model_copy(update={"model_name": shown_name(spec)})
        found = found.model_copy(update={"door": door})
    check_start(found)
    return found


def shown_name(spec: ModelSpec) -> str:
    """What GetServerInfo calls a model, so that no server's directories are shown."""
    name = spec.path if not Path(spec.path).exists() else Path(spec.path).name
    return name if spec.adapter is None else f"{name} + {Path(spec.adapter).name}"


@contextlib.contextmanager
def running(
    settings: ServiceConfig, application: Callable[[ServiceConfig], Any] | None = None
) -> Iterator[None]:
    """Start everything, wait until it is healthy, and stop it when the block ends.

    `settings` from `local_model`. application: what to serve, by default `app.build`. Ray reads its
    environment when it is imported, so this module imports it only here. Raises RuntimeError if the
    application does not come up.
    """
    folder = Path(tempfile.mkdtemp(prefix="deltafront-"))
    os.environ.update(environment(settings, folder))
    import ray
    from ray import serve

    from .app import APP_NAME, build

    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=cpus(settings),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
        )
        try:
            serve.start(http_options={"host": LOOPBACK, "port": settings.door.http_port}, **grpc(settings))
            serve.run((application or build)(settings), name=APP_NAME, route_prefix="/")
            yield
        finally:
            with contextlib.suppress(Exception):  # Ray may be gone already; stopping goes on
                serve.shutdown()
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(settings: ServiceConfig, folder: Path) -> dict[str, str]:
    """What has to be set before Ray starts: HAProxy in front of the replicas, with its files in `folder`."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": ".",
        "SERVER_STATE_FILE": "server-state",
        "METRICS_SOCKET_PATH": "metrics.sock",
    }
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(settings.door.max_message_bytes),
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),
        "RAY_USAGE_STATS_ENABLED": "0",
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
    }


def grpc(settings: ServiceConfig) -> dict[str, Any]:
    from ray.serve.config import gRPCOptions

    from .app import SERVICERS

    options = gRPCOptions(
        port=settings.door.grpc_port, grpc_servicer_functions=list(SERVICERS), enable_reflection=True
    )
    return {"grpc_options": options}


def cpus(settings: ServiceConfig) -> int:
    """Ray's count of CPUs: at least what the configuration asks for. It is bookkeeping, not a limit."""
    prefill, decode, door = settings.prefill, settings.decode, settings.door
    needed = (
        door.replicas * door.cpus
        + prefill.groups * (_OWNER_CPUS + prefill.stages * prefill.cpus_per_stage)
        + decode.workers * (_OWNER_CPUS + decode.cpus)
    )
    return max(os.cpu_count() or 1, math.ceil(needed) + 1)
