"""Runs Ray, Serve and Deltafront on this machine during a `with` block."""

import contextlib
import functools
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from deltafront.service import haproxy, listening
from deltafront.service.config import ConfigError, ServiceConfig
from deltafront.service.listening import LOOPBACK
from deltafront.service.local import cleanup
from deltafront.service.local.machine import check_machine
from deltafront.service.local.ports import check_ports, haproxy_hosts, serve_ports
from deltafront.service.local.ray_patches import START_S, minimal_node, slow_start, start_serve
from deltafront.service.local.readiness import (
    StartError,
    failure_reason,
    wait_until_answering,
    wait_until_running,
)
from deltafront.service.local.troubles import Troubles
from deltafront.workers import logs
from deltafront.workers.messages.states import NAMESPACE
from deltafront.workers.waits import said_when_slow

_OBJECT_STORE_BYTES = 2 << 30
_LEAST_BYTES = 100 << 20
"""The least memory besides the object store with which Ray starts a node."""
PERIOD_S = 0.5
"""Seconds between two checks of Ray's processes."""
REQUIRED = {"gcs_server": "Ray's control store", "raylet": "Ray's node"}
"""Our names for Ray's processes."""
_OWNER_CPUS = 0.1
_LOG_LINES = 20
_RETRY_S = 0.2
_LONGEST_SOCKET_PATH = 97
_SOCKET_PATH = f"/deltafront-{8 * 'x'}/{56 * 'x'}/metrics.sock"
"""The longest path of a socket below TMPDIR: our folder, Serve's node id, HAProxy's longest name."""
PROXY_PERIOD_S = 2.0
"""Seconds between Serve's checks of each HAProxy (Ray's default: 10), which it replaces after three failures.
"""
_DEFAULTS = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": f"{PROXY_PERIOD_S}",
    # Five control loops per second instead of ten, for less idle work. Fewer would delay the start.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    # A node looks for its own object store every 50 ms instead of every second, for the same total time.
    "RAY_raylet_client_connect_timeout_milliseconds": "50",
    "RAY_raylet_client_num_connect_attempts": "200",
    # Ray's defaults are 5 s (proxy), 30 s (HAProxy, control store), 60 s (worker).
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{START_S:g}",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": f"{START_S:g}",
    "RAY_worker_register_timeout_seconds": f"{START_S:g}",
    "RAY_gcs_server_port_wait_time_s": f"{START_S:g}",
    # Keep all lines of the audit log, which look alike.
    "RAY_DEDUP_LOGS": "0",
}
"""Variables that the caller's environment may override."""


Make = Callable[[ServiceConfig, Path], Any]
"""A function that makes the Serve application."""


class RayProcesses:
    """Watches Ray's own processes, because Ray notices a lost control store only after a minute, and then
    leaves HAProxy running."""

    def __init__(self, processes: Mapping[str, subprocess.Popen[bytes]], folder: Path | None = None) -> None:
        self._processes = dict(processes)
        self._folder = folder

    def said(self) -> None:
        """Record that the failure was printed. From then on Ray may end this process at any time."""
        if self._folder is not None:
            cleanup.said(self._folder)

    def failure(self) -> str | None:
        """Describe which process has ended, and how; None if all run."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"{REQUIRED[name]} ({name}) {_describe_exit(code)}"
        return None

    def wait_for_failure(self) -> str:
        while (failure := self.failure()) is None:
            time.sleep(PERIOD_S)
        return failure


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


@contextlib.contextmanager
def running(
    settings: ServiceConfig,
    make: Make | None = None,
    *,
    terminal: Console | None = None,
    log: Path | None = None,
) -> Iterator[RayProcesses]:
    """Start Ray, Serve and the service, wait until it answers, and stop all when the `with` block ends.
    Raises ConfigError or StartError.

    When one of Ray's processes has ended, leaving the block kills the others.

    Args:
        settings: From `wiring.local_model`.
        make: By default `app.application`.
        terminal: Console for messages about delays and the service's end.
        log: The file with this process's output.
    """
    prepare(settings)
    descriptor = None if terminal is None else terminal.file.fileno()
    last_words = f"deltafront: the service has ended; {log} says more"
    with (
        cleanup.service_folder(descriptor, last_words) as folder,
        _environment(ray_environment(settings, folder) | listening.loopback()),
        listening.at_loopback(),
        contextlib.ExitStack() as watch,
    ):
        processes: RayProcesses | None = None
        try:
            with _start_errors():
                started = _start_ray(settings, folder)
                watch.enter_context(_troubles(terminal, log))
                _start_application(settings, folder, make, started)
            processes = started
            yield processes
        finally:
            watch.close()  # asking for Serve's status would start Ray again
            with said_when_slow(lambda: f"{_running(folder)} to stop", say=_say(terminal)):
                _stop(processes, folder)


def _stop(processes: RayProcesses | None, folder: Path) -> None:
    import ray
    from ray import serve

    if processes is not None and processes.failure() is None:
        with contextlib.suppress(Exception):  # Serve may be gone
            serve.shutdown()
    else:
        _print_log_ends(folder / "ray")  # before the kill, because Ray ends this process with its node
        cleanup.kill_processes(folder)
    ray.shutdown()


def _running(folder: Path) -> str:
    """List the service's processes for a message: their names in `ps`, each with a count."""
    names = Counter[str]()
    for pid in cleanup.writers(folder):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            names[Path(f"/proc/{pid}/comm").read_text().strip()] += 1
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items())) or "Ray"


def _say(terminal: Console | None) -> Callable[[str], object]:
    if terminal is None:
        return logging.getLogger(__name__).warning
    return functools.partial(terminal.print, soft_wrap=True, markup=False, highlight=False)


def _troubles(terminal: Console | None, log: Path | None) -> contextlib.AbstractContextManager[object]:
    from ray import serve

    from deltafront.service.app import APP_NAME

    if terminal is None or log is None:
        return contextlib.nullcontext()
    return Troubles(log, serve.status, APP_NAME, _say(terminal))


def _check_memory() -> None:
    """Check that Ray's object store fits into memory. Raises ConfigError."""
    from ray._common.utils import get_system_memory
    from ray._private.utils import estimate_available_memory

    free, needed = estimate_available_memory(), _OBJECT_STORE_BYTES + _LEAST_BYTES
    if free < needed:
        raise ConfigError(
            f"memory: {free / 2**30:.1f} GiB of {get_system_memory() / 2**30:.1f} are free, but the object "
            f"store alone takes {needed / 2**30:.1f}, and the model comes on top: end other programs, or "
            "give the machine or container more"
        )


def _print_log_ends(sessions: Path) -> None:
    for name in REQUIRED:
        for path in sorted(sessions.glob(f"session_*/logs/{name}.*")):
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            print(f"{path.name}:", *lines, sep="\n  ", file=sys.stderr, flush=True)


def prepare(settings: ServiceConfig) -> None:
    """Clean up after killed services, and check libraries, GPUs and ports. Raises ConfigError.

    A port in use is checked again for a while, because a killed service may be about to free it.
    """
    check_socket_paths(tempfile.gettempdir())
    cleanup.clean_up_killed_services()
    check_machine(settings)
    deadline = time.monotonic() + cleanup.EXIT_S
    while True:
        try:
            return check_ports(settings.door)
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def check_socket_paths(temporary: str) -> None:
    """Check that the paths of HAProxy's sockets are short enough; otherwise it would be restarted forever.
    Raises ConfigError.
    """
    longest = _LONGEST_SOCKET_PATH - len(_SOCKET_PATH)
    if len(temporary) > longest:
        raise ConfigError(
            f"TMPDIR: {temporary} is too long a name for HAProxy's sockets there: "
            f"unset it, or name a folder in {longest} characters, such as /tmp"
        )


def _start_ray(settings: ServiceConfig, folder: Path) -> RayProcesses:
    import ray  # Ray reads its environment when it is imported

    _check_memory()
    with slow_start(settings.door.grpc_port), minimal_node(), _keep_sigterm_handler():
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=cpus(settings),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=str(folder / "ray"),
            _node_ip_address=LOOPBACK,
        )
    logs.name_loggers()
    started = ray._private.worker._global_node.all_processes
    return RayProcesses({name: started[name][0].process for name in REQUIRED}, folder)


def _start_application(
    settings: ServiceConfig, folder: Path, make: Make | None, processes: RayProcesses
) -> None:
    import ray
    from ray import serve
    from ray.serve.config import gRPCOptions

    from deltafront.service.app import APP_NAME, application, serve_config

    check_gpus(settings, ray.cluster_resources().get("GPU", 0.0))
    options = serve_config(settings.model_dump(), LOOPBACK)
    start_serve(options["http_options"], gRPCOptions(**options["grpc_options"]))
    target = serve.RunTarget((make or application)(settings, folder), APP_NAME, "/")
    serve.run_many([target], wait_for_applications_running=False)
    wait_until_running(serve.status, APP_NAME, processes.failure)
    wait_until_answering(settings.door, processes.failure, START_S)


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Raise errors of Ray and Serve as StartError, and print their tracebacks."""
    try:
        yield
    except (ConfigError, StartError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise StartError(failure_reason(error)) from error


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the caller's SIGTERM handler, because Ray's would end the process at once."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # other threads cannot set signal handlers
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def check_gpus(settings: ServiceConfig, present: float) -> None:
    """Check that Ray has enough GPUs; otherwise Serve would wait forever. Raises ConfigError."""
    prefill, decode = settings.prefill, settings.decode
    needed = prefill.groups * prefill.stages * prefill.gpus_per_stage
    needed += decode.workers * decode.tensor_parallel * decode.gpus
    if needed > present + 1e-6:  # GPUs may be shared, so the sum has rounding errors
        raise ConfigError(
            f"prefill.gpus_per_stage and decode.gpus: {needed:g} GPUs in all, but Ray finds {present:g} here"
        )
    if decode.device == "cuda" and not decode.gpus and decode.tensor_parallel > present:
        raise ConfigError(
            f"decode.tensor_parallel: with decode.gpus 0, {decode.tensor_parallel} ranks take a GPU each by "
            f"their numbers, but Ray finds {present:g} here"
        )


def ray_environment(settings: ServiceConfig, folder: Path) -> dict[str, str]:
    """Return variables to set before Ray starts. Writes HAProxy's program to `folder`."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": ".",
        "SERVER_STATE_FILE": "server-state",
        "METRICS_SOCKET_PATH": "metrics.sock",
    }
    haproxy.write(folder / "haproxy", haproxy_hosts(settings.door))
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(settings.door.max_message_bytes),
        "RAY_USAGE_STATS_ENABLED": "0",
        **listening.token(),
        haproxy.BINARY_VARIABLE: str(folder / "haproxy"),
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
        **serve_ports(settings.door.grpc_port),
        **{name: os.environ.get(name, value) for name, value in _DEFAULTS.items()},
    }


def cpus(settings: ServiceConfig) -> int:
    """Return the number of CPUs for `ray.init`: at least the configuration's sum. It does not limit
    real use."""
    prefill, decode, door = settings.prefill, settings.decode, settings.door
    needed = (
        door.replicas * door.cpus
        + prefill.groups * (_OWNER_CPUS + prefill.stages * prefill.cpus_per_stage)
        + decode.workers * (_OWNER_CPUS + decode.cpus)
    )
    return max(os.cpu_count() or 1, math.ceil(needed) + 1)
