"""Ray, Serve and Deltafront on this machine, for as long as a block runs."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...workers.messages.states import NAMESPACE
from .. import haproxy, listening
from ..config import ConfigError, DoorConfig, ServiceConfig
from ..listening import LOOPBACK
from . import cleanup
from .exposure import listens
from .machine import check_machine
from .ray_processes import NEEDED, Watch
from .readiness import until_answering, until_running
from .start_errors import NotStarted, reason_of

_KEYS = {"gRPC": "grpc_port", "OpenAI": "http_port", "gRPC with TLS": "tls_port", "metrics": "metrics_port"}
"""By what `exposure.listens` calls it."""
_OBJECT_STORE_BYTES = 2 << 30
_OWNER_CPUS = 0.1
_LAST_LINES = 20
_START_S = 300.0
_ASK_AGAIN_S = 0.2
_FIRST_BLOCK, _BLOCKS, _BLOCK = 20_000, 120, 100
"""Where ports that nobody configures begin, how many services may have some, and how many each has. They end
where the ports begin that the kernel gives to clients; Ray's own workers have those below."""
_SOCKET_NAME = 97
"""HAProxy's longest name of a socket."""
_A_SOCKET = f"/deltafront-{8 * 'x'}/{56 * 'x'}/metrics.sock"
"""In the temporary directory: the service's folder, the node's id, as Serve adds it, and the longer one."""
_ALONE = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
_AGENTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
PROXY_PERIOD_S = 2.0
"""Serve asks each HAProxy that often how it is (Ray: 10 s). Three failures in a row, and it is replaced."""
_QUIET = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
}
_PATIENT = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{_START_S:g}",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": f"{_START_S:g}",
    "RAY_worker_register_timeout_seconds": f"{_START_S:g}",
    "RAY_gcs_server_port_wait_time_s": f"{_START_S:g}",
}
"""What gives up on a process that starts slowly, each after the whole start's time. Else Serve kills a proxy
that is not ready after 5 s, HAProxy has 30 s, a worker 60, the control store 30."""
_WHOLE_LOG = {"RAY_DEDUP_LOGS": "0"}
"""Ray leaves out lines that are alike, as those of the audit log are."""
_OBJECT_STORE_RETRIES = {
    "RAY_raylet_client_connect_timeout_milliseconds": "50",
    "RAY_raylet_client_num_connect_attempts": "200",
}
"""A node that asks for its own object store before that listens tries again only after this time. Ray: ten
times 1000 ms, which is as long in all."""


@contextlib.contextmanager
def running(
    settings: ServiceConfig, make: Callable[[ServiceConfig, Path], Any] | None = None
) -> Iterator[Watch]:
    """Start everything, wait until it answers, and stop it when the block ends.

    `settings` from `wiring.local_model`. make: what to serve, by default `app.application`. Gives what
    watches over Ray's processes: once one is lost nothing answers any more, and leaving the block ends the
    others at once. Ray reads its environment when it is imported, so this module imports it only here. Raises
    ConfigError (`check_start`), and NotStarted, in one line, if the service does not come up.
    """
    check_start(settings)
    with (
        cleanup.own_folder() as folder,
        _variables(environment(settings, folder, haproxy_hosts(settings.door)) | listening.loopback()),
        listening.at_loopback(),
    ):
        import ray
        from ray import serve

        watch: Watch | None = None
        try:
            with _in_one_line():
                started = _start_ray(settings, folder)
                _start_serve(settings, (make or application_of)(settings, folder), started)
            watch = started
            yield watch
        finally:
            if watch is not None and not watch.lost():
                with contextlib.suppress(Exception):  # Serve may be gone; stopping goes on
                    serve.shutdown()
            else:
                cleanup.end_processes(folder)
                _last_words(folder / "ray")
            ray.shutdown()


def _last_words(sessions: Path) -> None:
    """To stderr, since the folder goes: the last lines of what Ray's own processes wrote."""
    for name in NEEDED:
        for path in sorted(sessions.glob(f"session_*/logs/{name}.*")):
            lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            print(f"{path.name}:", *lines, sep="\n  ", file=sys.stderr, flush=True)


def check_start(settings: ServiceConfig) -> None:
    """Check the machine before anything starts, after clearing away what killed services have left. Raises
    ConfigError for libraries and GPUs that are not there, and for a port that is taken and does not become
    free as it does when a killed service dies."""
    check_sockets(tempfile.gettempdir())
    cleanup.sweep()
    check_machine(settings)
    until = time.monotonic() + cleanup.DYING_S
    while True:
        try:
            return check_ports(settings)
        except ConfigError:
            if time.monotonic() > until:
                raise
            time.sleep(_ASK_AGAIN_S)


def check_sockets(temporary: str) -> None:
    """HAProxy would be started again and again, and refuse the long names of its sockets. Raises
    ConfigError."""
    longest = _SOCKET_NAME - len(_A_SOCKET)
    if len(temporary) > longest:
        raise ConfigError(
            f"TMPDIR: {temporary} is too long a name for HAProxy's sockets there: "
            f"unset it, or name a folder in {longest} characters, such as /tmp"
        )


def application_of(settings: ServiceConfig, folder: Path) -> Any:
    from ..app import application

    return application(settings, folder)


def _start_ray(settings: ServiceConfig, folder: Path) -> Watch:
    import ray

    with slow_start(settings.door.grpc_port), _nothing_idle(), _own_sigterm():
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=cpus(settings),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=str(folder / "ray"),
            _node_ip_address=LOOPBACK,
        )
    started = ray._private.worker._global_node.all_processes
    return Watch({name: started[name][0].process for name in NEEDED})


def _start_serve(settings: ServiceConfig, application: Any, watch: Watch) -> None:
    import ray
    from ray import serve
    from ray.serve.config import gRPCOptions

    from ..app import APP_NAME, serve_config

    check_gpus(settings, ray.cluster_resources().get("GPU", 0.0))
    options = serve_config(settings.model_dump(), LOOPBACK)
    _begin_serve(options["http_options"], gRPCOptions(**options["grpc_options"]))
    target = serve.RunTarget(application, APP_NAME, "/")
    serve.run_many([target], wait_for_applications_running=False)
    until_running(serve.status, APP_NAME, watch.lost)
    until_answering(settings.door, watch.lost, _START_S)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Whatever Ray or Serve raise in the block is a NotStarted of one line; stderr gets all of it."""
    try:
        yield
    except (ConfigError, NotStarted):
        raise
    except Exception as error:
        traceback.print_exc()
        raise NotStarted(reason_of(error)) from error


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray ends the process at once when it is terminated; then nobody stops Ray. What the caller wants done
    stays. Signals are the main thread's business."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def slow_start(grpc_port: int) -> Iterator[None]:
    """Nodes of Ray that are started in this block may take up to _START_S seconds.

    A node ends itself if it does not find within 15 s the files in which its agents write their ports, and
    is given up if it has not registered after 30: a busy machine needs longer, and Ray has no setting for
    either. So agents get their ports here, from the same block as `inner_ports`, their files are written for
    them, and registering is waited for.
    """
    from ray._private import node, parameter, services
    from ray._raylet import persist_port  # type: ignore[attr-defined]

    ask, init, start = services.get_node, parameter.RayParams.__init__, node.Node.start_raylet
    nodes: list[node.Node] = []

    def get_node(*arguments: Any, **named: Any) -> Any:
        until = time.monotonic() + _START_S
        while True:
            try:
                return ask(*arguments, **named)
            except RuntimeError:  # it has not registered yet
                for one in nodes:
                    _must_run(one)
                if time.monotonic() > until:
                    raise
                time.sleep(_ASK_AGAIN_S)

    def with_ports(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.update(**agent_ports(grpc_port))

    def with_files(self: Any, *arguments: Any, **named: Any) -> None:
        for name, port in agent_ports(grpc_port).items():
            persist_port(self.get_session_dir_path(), self.node_id, name, port)
        start(self, *arguments, **named)
        nodes.append(self)

    services.get_node, parameter.RayParams.__init__, node.Node.start_raylet = get_node, with_ports, with_files
    try:
        yield
    finally:
        services.get_node, parameter.RayParams.__init__, node.Node.start_raylet = ask, init, start


def _must_run(node: Any) -> None:
    """Raises RuntimeError if the node's raylet has ended."""
    for raylet in node.all_processes.get("raylet", ()):
        if (code := raylet.process.poll()) is not None:
            logs = node.get_logs_dir_path()
            raise RuntimeError(f"Ray's node ended while it started, with code {code}: {logs}/raylet.err")


@contextlib.contextmanager
def _nothing_idle() -> Iterator[None]:
    """Nodes of Ray that are started in this block have no API server, for which `ray.init` waits although all
    it does without a dashboard is to report usage, and no autoscaler, which has no nodes to add here."""
    from ray._private import node, parameter

    start, init = node.Node.start_api_server, parameter.RayParams.__init__

    def alone(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.update(no_monitor=True)

    node.Node.start_api_server = lambda *_arguments, **_named: None
    parameter.RayParams.__init__ = alone
    try:
        yield
    finally:
        node.Node.start_api_server, parameter.RayParams.__init__ = start, init


def _begin_serve(http: Mapping[str, Any], grpc: Any) -> None:
    """`serve.start` without its end, and without that of what runs an application: they wait for the proxies
    that are there at that moment, and fail with one that Serve replaces."""
    from ray.serve._private import api, client
    from ray.serve.config import ControllerOptions

    controller, _proxies = api._create_controller_and_proxy_refs(
        dict(http), grpc, None, None, ControllerOptions(), None
    )
    begun = client.ServeControllerClient(controller)
    begun.wait_for_proxies_serving = lambda **_named: None
    api._set_global_client(begun)


def check_ports(settings: ServiceConfig) -> None:
    """HAProxy listens with SO_REUSEPORT: a second service on the same port would get half the requests
    instead of an error. So look first. Raises ConfigError naming the key."""
    door = settings.door
    wanted = [(f"{_KEYS[what]}: port {port}", host, port) for what, host, port in listens(door)]
    serves = inner_ports(door.grpc_port)
    own = {**{name: int(serves[name]) for name in _ALONE}, **agent_ports(door.grpc_port)}
    beside = f"beside {door.grpc_port},"
    wanted += [(f"grpc_port: port {port}, {name} {beside}", LOOPBACK, port) for name, port in own.items()]
    for named, host, port in wanted:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no obstacle
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"door.{named} cannot be used ({error.strerror}): "
                    "stop what listens there, or configure another port"
                ) from None


def check_gpus(settings: ServiceConfig, found: float) -> None:
    """Serve would wait without end for more GPUs than Ray has found here. Raises ConfigError."""
    prefill, decode = settings.prefill, settings.decode
    asked = prefill.groups * prefill.stages * prefill.gpus_per_stage + decode.workers * decode.gpus
    if asked > found + 1e-6:  # a sum of shares
        raise ConfigError(
            f"prefill.gpus_per_stage and decode.gpus: {asked:g} GPUs in all, but Ray finds {found:g} here"
        )


def inner_ports(grpc_port: int) -> dict[str, str]:
    """Ports of Ray Serve's that nobody calls from outside, by the variable that sets them: a block that
    follows from the gRPC port, so that services with ports of their own stand side by side.

    Serve starts the doors' own gRPC servers with SO_REUSEPORT, whatever it is told: two services with the
    same range would get each other's requests.
    """
    first, singles = _block(grpc_port), len(_ALONE) + len(_AGENTS)
    doors, half = first + singles, (_BLOCK - singles) // 2
    ports = {name: first + number for number, name in enumerate(_ALONE)}
    for number, kind in enumerate(("HTTP", "GRPC")):
        ports[f"RAY_SERVE_DIRECT_INGRESS_MIN_{kind}_PORT"] = doors + number * half
        ports[f"RAY_SERVE_DIRECT_INGRESS_MAX_{kind}_PORT"] = doors + (number + 1) * half
    return {name: str(port) for name, port in ports.items()}


def agent_ports(grpc_port: int) -> dict[str, int]:
    """Ports of a node's agents, by Ray's name for each."""
    return {name: _block(grpc_port) + len(_ALONE) + number for number, name in enumerate(_AGENTS)}


def _block(grpc_port: int) -> int:
    return _FIRST_BLOCK + _BLOCK * (grpc_port % _BLOCKS)


def haproxy_hosts(door: DoorConfig) -> dict[int, str]:
    """Where HAProxy listens on this machine, by port. Serve knows of loopback alone, so that what it starts
    beside HAProxy is reached by nobody else."""
    inner = (int(inner_ports(door.grpc_port)[name]) for name in _ALONE)
    return dict.fromkeys(inner, LOOPBACK) | dict.fromkeys((door.grpc_port, door.http_port), door.host)


def environment(
    settings: ServiceConfig, folder: Path, hosts: Mapping[int, str] = haproxy.AS_SERVE_SAYS
) -> dict[str, str]:
    """What has to be set before Ray starts: HAProxy in front of the replicas, with its files in `folder`, and
    its program, which is written there. hosts: as for `haproxy.write`.

    _QUIET turns down what a small machine pays for and nobody reads: Serve's control loop looks five times
    a second instead of ten (not less: a start takes several looks, one after the other), and Ray collects no
    metrics or task events of its own. What the caller's environment says comes before this,
    _OBJECT_STORE_RETRIES and PROXY_PERIOD_S.
    """
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": ".",
        "SERVER_STATE_FILE": "server-state",
        "METRICS_SOCKET_PATH": "metrics.sock",
    }
    haproxy.write(folder / "haproxy", hosts)
    ours = {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(PROXY_PERIOD_S), **_QUIET, **_OBJECT_STORE_RETRIES}
    ours |= _PATIENT | _WHOLE_LOG
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(settings.door.max_message_bytes),
        "RAY_USAGE_STATS_ENABLED": "0",
        **listening.token(),
        haproxy.BINARY_VARIABLE: str(folder / "haproxy"),
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
        **inner_ports(settings.door.grpc_port),
        **{name: os.environ.get(name, value) for name, value in ours.items()},
    }


def cpus(settings: ServiceConfig) -> int:
    """Ray's count of CPUs: at least what the configuration asks for. It is bookkeeping, not a limit."""
    prefill, decode, door = settings.prefill, settings.decode, settings.door
    needed = (
        door.replicas * door.cpus
        + prefill.groups * (_OWNER_CPUS + prefill.stages * prefill.cpus_per_stage)
        + decode.workers * (_OWNER_CPUS + decode.cpus)
    )
    return max(os.cpu_count() or 1, math.ceil(needed) + 1)
