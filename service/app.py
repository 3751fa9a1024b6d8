"""The Ray Serve application: doors, prefill groups and decode workers.

Importing it loads no torch. Workers load it in their own processes.
"""

import asyncio
import logging
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from deltafront.service.config import ConfigError, ServiceConfig, parse
from deltafront.service.door.grpc_door import FrontDoor
from deltafront.service.door.http_door import HttpDoor
from deltafront.service.door.registration import MESSAGE_SIZE_VARIABLE, open_door
from deltafront.service.door.responses.store import StoredResponse, is_response_id
from deltafront.service.door.tls import Gate, TlsPort
from deltafront.service.exporter import Exporter
from deltafront.service.fleet.fleet import Fleet
from deltafront.service.fleet.ray_directory import RayDirectory
from deltafront.service.fleet.scaling import GroupsByBacklog, WorkersByLoad
from deltafront.service.listening import joined
from deltafront.service.metrics import DIRECTORY_VARIABLE, Metrics
from deltafront.service.wiring import (
    batch_options,
    certificates,
    make_tracing,
    observer,
    request_handler,
    shared_model,
    span_sink,
    tls_files,
)
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.replica import last_line_alone
from deltafront.workers.settings import pairing
from deltafront.workers.waits import said_when_slow

APP_NAME = "deltafront"
SERVICERS = (
    "deltafront.service.door.registration.add_deltafront_to_server",
    "deltafront.service.door.registration.add_health_to_server",
    "deltafront.service.door.registration.add_reflection_to_server",
)

log = logging.getLogger(__name__)

NO_WAIT_FOR_REASONS = {"RAY_timeout_ms_task_wait_for_death_info": "0"}
"""A door's call to a worker fails as soon as the connection does. Ray would first wait one to two seconds for
the reason, at each call, until its control store knows that the worker is dead."""
_HEALTH_PERIOD_S = 1.0
"""Seconds between Serve's health checks of a replica. A worker's replica then checks its actors
(docs/operations.md)."""
_OWNER_TIMEOUT_S = 12.0
"""Timeout of a health check of a worker's replica, which waits for its actors. Serve replaces a replica after
three timeouts."""
_DOOR_TIMEOUT_S = 5.0
"""Timeout of a health check of a door. Serve replaces a door after three timeouts."""

_CONSTRUCTOR_TRIES = 3
_LOG_FORMAT = "%(asctime)s %(levelname)s:%(name)s:%(message)s"
_DOORS_TIMEOUT_S = 5.0
_SHUTDOWN_S = 20.0
"""Seconds after which Serve kills a worker's replica, in addition to the time to drain."""
_DOOR_SHUTDOWN_S = 5.0
"""Seconds after which Serve kills a door, in addition to the time to drain."""
_OTHER_CALLS = 1000
"""Concurrent calls of a door besides its requests: cancels and refusals, which it answers at once."""
_SURGE_PERCENT = 1
"""With this share Serve starts one new replica before it removes an old one."""


class DoorReplica(FrontDoor):
    """The door as a Serve replica.

    It finds the workers' actors by name. `_workers` are bound only so that Serve starts the deployments that
    own these actors.
    """

    async def __init__(self, config: dict[str, Any], metrics_directory: str, *_workers: Any) -> None:  # type: ignore[misc]
        logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
        with last_line_alone("FrontDoor", served=True):
            await self._open(config, metrics_directory)

    async def _open(self, config: dict[str, Any], metrics_directory: str) -> None:
        settings = parse(config)
        door = settings.door
        self._id = secrets.token_hex(4)
        metrics = Metrics(Path(metrics_directory), door.model_name or settings.model.path)
        fleet = Fleet(
            RayDirectory(),
            observer(metrics, certificates(door)),
            refresh_s=door.refresh_s,
            renew_s=door.renew_s,
            pairing=pairing(
                settings.model, settings.handoff, settings.decode.kv_dtype, settings.decode.tensor_parallel
            ),
        )
        host = door.metrics_at
        shown = ray.util.get_node_ip_address() if host in ("0.0.0.0", "::") else host
        gate, files = Gate(door.tls_port) if door.tls_certificate else None, tls_files(door)
        self._tracing = make_tracing(door, self._id)
        super().__init__(
            request_handler(
                settings,
                fleet,
                metrics,
                metrics_address=joined(shown, door.metrics_port),
                door_id=self._id,
                cancel_at_other_doors=self._cancel_at_other_doors,
                gate=gate,
                tracing=self._tracing,
            )
        )
        open_door(self)
        self._fleet = fleet
        fleet.start()
        self._http = HttpDoor(
            self._requests,
            door.max_message_bytes,
            origins=door.allowed_origins,
            response_store_bytes=door.response_store_bytes,
            elsewhere=self._response_elsewhere,
            batches=batch_options(door, self._id, metrics.count_batch_lines),
            has_page=door.page and not (gate and door.tls_only),  # otherwise the page's calls are refused
        )
        self._exporter = Exporter(metrics, host, door.metrics_port)
        self._exporter.start()
        self._tls: TlsPort | None = None
        self._drain_s = _DOOR_SHUTDOWN_S + door.drain_s
        await fleet.wait_to_take_over()
        if files is not None and gate is not None:
            at, calls = joined(door.host, door.tls_port), _calls(door.max_requests)
            self._tls = TlsPort(self, files, gate, at, door.max_message_bytes, calls)
            await self._tls.start()
        if self._http.batches is not None:
            self._http.batches.start()

    async def end_requests(self, door: str, owner: str, request_id: str) -> int:
        """Cancel an owner's requests with this id at this door, on behalf of the door with id `door`. Return
        their number. Serve's broadcast also reaches the calling door, which returns 0.
        """
        return 0 if door == self._id else self._requests.cancel_here(owner, request_id)

    async def stored_response(self, door: str, response_id: str, owner: str, drop: bool) -> Any:
        """Return a response stored at this door, on behalf of the door with id `door`; None if it is not
        stored here. `drop`: also delete it. The calling door itself returns None."""
        return None if door == self._id else self._http.responses.take(response_id, owner, drop)

    async def _cancel_at_other_doors(self, owner: str, request_id: str) -> int:
        """Cancel an owner's requests with this id at the other doors, and return their number. A door that
        dies or hangs during this call ends its requests in any case.
        """
        answers = await self._at_other_doors("end_requests", owner, request_id)
        return sum(answer for answer in answers if isinstance(answer, int))

    async def _response_elsewhere(self, response_id: str, owner: str, drop: bool) -> StoredResponse | None:
        if not is_response_id(response_id):
            return None
        answers = await self._at_other_doors("stored_response", response_id, owner, drop)
        return next((answer for answer in answers if isinstance(answer, StoredResponse)), None)

    async def _at_other_doors(self, method: str, *arguments: Any) -> list[Any]:
        """Broadcast a call to all doors. It carries this door's id, so that this door ignores it. Results
        include the exceptions of doors. After a timeout or an error of Serve or Ray there are no results."""
        context = serve.get_replica_context()
        doors = serve.get_deployment_handle(context.deployment, context.app_name)
        asked = doors.broadcast(method, self._id, *arguments)
        try:
            async with asyncio.timeout(_DOORS_TIMEOUT_S):
                return list(await asked.results_async(return_exceptions=True))
        except (TimeoutError, RayError, RayServeException) as error:
            log.warning("other doors do not answer %s: %s", method, type(error).__name__)
            return []

    async def __del__(self) -> None:
        """Serve awaits this, after the requests through its ports have ended."""
        if self._tls is not None:
            await self._tls.stop(self._drain_s)
        self._exporter.stop()
        if self._http.batches is not None:
            await self._http.batches.stop()
        await self._requests.stop()
        await self._fleet.stop()
        with said_when_slow(lambda: "spans that are being sent"):
            await asyncio.to_thread(self._tracing.stop)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._http.app


def serve_config(content: Mapping[str, Any], host: str | None = None) -> dict[str, Any]:
    """Make Ray Serve's configuration (`serveConfigV2`) from the content of Deltafront's. Raises ConfigError.

    Args:
        host: The address at which Serve's ports listen. None: door.host.
    """
    door, builder = parse(content).door, f"{build.__module__}:{build.__name__}"
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host or door.host, "port": door.http_port},
        "grpc_options": {
            "port": door.grpc_port,
            "grpc_servicer_functions": list(SERVICERS),
            "enable_reflection": True,
        },
        "applications": [
            {"name": APP_NAME, "import_path": builder, "route_prefix": "/", "args": dict(content)}
        ],
    }


def build(config: ServiceConfig | Mapping[str, Any]) -> serve.Application:
    """Build the application; Serve calls it by name.

    Raises:
        RayServeException: The configuration or the model cannot be used. For this error Serve shows only its
            text as the application's message; for any other, the whole traceback.
    """
    try:
        settings = config if isinstance(config, ServiceConfig) else parse(config)
        return application(shared_model(settings), Path(tempfile.gettempdir()))
    except (ConfigError, ModelError, OSError) as error:
        raise RayServeException(f"{type(error).__name__}: {error}") from error


def application(settings: ServiceConfig, scratch: Path) -> serve.Application:
    """Make the Serve application with workers.

    Args:
        settings: From `wiring.local_model` where all processes share files, else from `shared_model`.
        scratch: Holds each node's metrics.
    """
    from deltafront.workers.decode import worker as decode_worker
    from deltafront.workers.prefill.group import group as prefill_group

    prefill, decode = settings.compiled_prefill, settings.decode
    groups = _replicas(prefill.groups, prefill.max_groups, GroupsByBacklog, backlog_s=prefill.backlog_s)
    workers = _replicas(
        decode.workers, decode.max_workers, WorkersByLoad, usage=decode.usage, max_batch=decode.max_batch
    )
    model, handoff, spans = settings.model, settings.handoff, span_sink(settings.door)
    owners = (
        _owner("PrefillGroup", prefill_group, prefill, groups).bind(
            model, prefill, handoff, spans, decode.kv_dtype, decode.tensor_parallel
        ),
        _owner("DecodeReplica", decode_worker, decode, workers).bind(model, decode, handoff, spans),
    )
    return assemble(settings, scratch, *owners)


def _replicas(least: int, most: int | None, policy: type, **limits: float) -> dict[str, Any]:
    if most is None:
        return {"num_replicas": least}
    chosen_by = {"policy_function": f"{policy.__module__}:{policy.__name__}", "policy_kwargs": limits}
    return {"autoscaling_config": {"min_replicas": least, "max_replicas": most, "policy": chosen_by}}


def _owner(name: str, module: Any, config: Any, replicas: dict[str, Any]) -> Any:
    bundles, strategy = module.placement(config)
    labels = [dict(config.node_labels)] * len(bundles) if config.node_labels else None
    return serve.deployment(
        name=name,
        **replicas,
        ray_actor_options={"num_cpus": module.REPLICA_CPUS},
        placement_group_bundles=bundles,
        placement_group_strategy=strategy,
        placement_group_bundle_label_selector=labels,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_OWNER_TIMEOUT_S,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES,
        max_surge_percent=_SURGE_PERCENT if config.surge else 0,
        graceful_shutdown_timeout_s=_SHUTDOWN_S + config.drain_s,
    )(getattr(module, name))


def _calls(max_requests: int) -> int:
    """Return a door's `max_ongoing_requests`: `max_requests` running requests, 2 × `max_requests` still being
    received, and _OTHER_CALLS. Further calls queue: Serve refuses no request that comes through HAProxy."""
    return 3 * max_requests + _OTHER_CALLS


def assemble(settings: ServiceConfig, scratch: Path, *workers: serve.Application) -> serve.Application:
    """Make the doors' deployment. Workers are bound to it so that Serve starts them."""
    door, directory = settings.door, str(scratch / f"deltafront-metrics-{secrets.token_hex(6)}")
    environment = {DIRECTORY_VARIABLE: directory, MESSAGE_SIZE_VARIABLE: str(door.max_message_bytes)}
    environment |= NO_WAIT_FOR_REASONS
    options: dict[str, Any] = {"num_cpus": door.cpus, "runtime_env": {"env_vars": environment}}
    if door.node_labels:
        options["label_selector"] = dict(door.node_labels)
    deployment = serve.deployment(
        name="FrontDoor",
        num_replicas=door.replicas,
        max_replicas_per_node=door.per_node,
        max_ongoing_requests=_calls(door.max_requests),
        ray_actor_options=options,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_DOOR_TIMEOUT_S,
        max_surge_percent=_SURGE_PERCENT if door.per_node is None else 0,
        graceful_shutdown_timeout_s=_DOOR_SHUTDOWN_S + door.drain_s,
    )(serve.ingress()(DoorReplica))
    return deployment.bind(settings.model_dump(mode="json"), directory, *workers)
