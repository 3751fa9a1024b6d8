"""Tries every connection in the table "Who trusts whom" of docs/deploy.md: permitted ones work, others do
not."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..manifests import Object
from .conftest import Deployed, active, ready_of
from .kube import CLIENTS, NAMESPACE, RESTRICTED, STRANGERS, Kube, client_pod, names
from .test_faults import uids

RAY = ("headgroup", "door", "prefill", "decode")
PORTS = {
    "headgroup": (6379, 8265, 8000, 8080, 10001),
    "door": (9000, 8000, 9464, 8080),
    "prefill": (8080,),
    "decode": (8080,),
    "redis": (6379,),
}
"""The listening ports of each kind of pod."""
TRY = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def connects(target):
    try:
        socket.create_connection(tuple(target), 5.0).close()
        return True
    except OSError:
        return False
with ThreadPoolExecutor(32) as pool:
    print(json.dumps([*pool.map(connects, json.loads(sys.argv[1]))]))
"""
ASLEEP = ("python", "-c", "import time; time.sleep(100000)")


def may(who: str, whom: str, port: int) -> bool:
    """Return whether the table permits a connection."""
    if who in RAY:
        return whom in RAY or who == "headgroup"
    if who == "prometheus":
        return whom in RAY and (port == 8080 or (whom, port) == ("door", 9464))
    return who == "client" and whom == "door" and port in (9000, 8000)


def of_monitoring(name: str, label: str) -> dict[str, object]:
    pod = client_pod(name, "monitoring", *ASLEEP)
    pod["metadata"]["labels"] = {"app.kubernetes.io/name": label}
    return pod


@pytest.fixture
def outside(deployed: Deployed) -> Iterator[dict[str, tuple[str, str]]]:
    """Start pods that do not belong to the service, and return (namespace, name) of each."""
    kube = deployed.kube
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}})
    pods = {
        "client": client_pod("client", CLIENTS, *ASLEEP),
        "stranger": client_pod("stranger", STRANGERS, *ASLEEP),
        "neighbour": client_pod("neighbour", NAMESPACE, *ASLEEP),
        "prometheus": of_monitoring("prometheus", "prometheus"),
        "grafana": of_monitoring("grafana", "grafana"),
    }
    kube.apply(*pods.values())
    at = {name: (pod["metadata"]["namespace"], name) for name, pod in pods.items()}
    try:
        for namespace, name in at.values():
            kube("-n", namespace, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=600s")
        yield at
    finally:
        for namespace, name in at.values():
            kube("-n", namespace, "delete", "pod", name, "--force", "--grace-period=0", check=False)


def connects(kube: Kube, namespace: str, pod: str, targets: list[tuple[str, int]]) -> list[bool]:
    said = kube("-n", namespace, "exec", pod, "--", "python", "-c", TRY, json.dumps(targets))
    found: list[bool] = json.loads(said.splitlines()[-1])
    return found


def check_table(deployed: Deployed, outside: dict[str, tuple[str, str]]) -> None:
    """Compare every connection with the table. outside: (namespace, name) of pods of others."""
    kube = deployed.kube
    pods = {group: ready_of(deployed, group)[0] for group in RAY} | {"redis": kube.pods("redis")[0]}
    cells = [(group, port) for group, ports in PORTS.items() for port in ports]
    targets = [(pods[group]["status"]["podIP"], port) for group, port in cells]
    askers = outside | {group: (NAMESPACE, pods[group]["metadata"]["name"]) for group in RAY}

    def wrong() -> list[str]:
        found = []
        for who, (namespace, name) in askers.items():
            for (whom, port), did in zip(cells, connects(kube, namespace, name, targets), strict=True):
                if did != may(who, whom, port):
                    found.append(f"{who} {'reaches' if did else 'does not reach'} {whom}:{port}")
        print(*found, sep="\n")
        return found

    # Policies apply to a new pod after a moment.
    kube.until(lambda: not wrong(), "every cell as the table says", seconds=120.0)
    print(f"\nwho trusts whom: {len(cells) * len(askers)} cells as the table says")


def test_pods_connect_only_where_the_trust_table_permits(
    deployed: Deployed, outside: dict[str, tuple[str, str]]
) -> None:
    check_table(deployed, outside)


def test_ray_pods_write_no_root_and_have_no_token(deployed: Deployed) -> None:
    kube = deployed.kube
    for group in RAY:
        name = kube.pods(group)[0]["metadata"]["name"]
        script = "touch /x /opt/x 2>&1; ls /var/run/secrets/kubernetes.io 2>&1; id -u"
        said = kube("-n", NAMESPACE, "exec", name, "--", "bash", "-c", script)
        assert said.count("Read-only file system") == 2 and "No such file" in said, said
        assert said.splitlines()[-1] == str(RESTRICTED["runAsUser"])


LISTENING = """
import json, os, pathlib
owners = {}
for entry in pathlib.Path('/proc').glob('[0-9]*'):
    try:
        name = ' '.join((entry / 'cmdline').read_text().split(chr(0)))[:200]
        for link in (entry / 'fd').iterdir():
            owners[os.readlink(link)] = name
    except OSError:
        continue
found = set()
for table in ('tcp', 'tcp6'):
    for line in pathlib.Path('/proc/net', table).read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].rsplit(':', 1)
        if words[3] == '0A' and address not in ('0100007F', '0' * 24 + '01000000'):
            found.add((int(port, 16), owners.get(f'socket:[{words[9]}]', '')))
print(json.dumps(sorted(found)))
"""
"""Prints the ports that listen beyond loopback, each with its process."""
WITHOUT_CERTIFICATE = r"""
import json, socket, ssl, sys
from concurrent.futures import ThreadPoolExecutor
context = ssl._create_unverified_context()
def answers(target):
    try:
        with socket.create_connection(tuple(target), 5.0) as plain:
            plain.sendall(b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes(3) + b'\x04' + bytes(5))
            said = plain.recv(1)
    except OSError:
        said = b''
    if said not in (b'', bytes([21])):  # 21: an alert of TLS
        return 'plain'
    try:
        with socket.create_connection(tuple(target), 5.0) as plain, context.wrap_socket(plain) as secured:
            return 'no certificate' if secured.recv(1) else ''
    except TimeoutError:
        return 'no certificate'
    except OSError:
        return ''
with ThreadPoolExecutor(32) as pool:
    print(json.dumps([*pool.map(answers, json.loads(sys.argv[1]))]))
"""
"""Prints how each port answers a client without a certificate: not at all ('') is right."""
UNENCRYPTED = ("haproxy", "RuntimeEnvAgent", "dashboard.py", "ProxyActor")
"""Processes with ports of HTTP or of clients' gRPC, which Ray never encrypts."""
HTTP = {8080, 52365, 9464, 30000, 40000}
"""Ports of the same kind: metrics, the dashboard's agent, a door's metrics, and HAProxy's calls to it."""


def with_tls(deployed: Deployed) -> None:
    """Change to TLS, unless the service has it. This is an upgrade: a second cluster takes over."""
    kube = deployed.kube
    if not kube.get("deployments", "-A", "-l", "app.kubernetes.io/name=cert-manager"):
        pytest.skip("cert-manager is not installed")
    if certificates(deployed):
        return
    before = active(deployed)
    with deployed.load("upgrade to tls") as load:
        deployed.apply("tls")
        kube.until(lambda: active(deployed) != before, "the cluster with TLS serves")
    assert not load.lost


def certificates(deployed: Deployed) -> list[Object]:
    """Return the certificates that the pods of the cluster that serves use, without the CA's."""
    found = deployed.kube.get("certificates", "-l", f"ray.io/cluster={active(deployed)}")
    return [one for one in found if not one["spec"].get("isCA")]


@pytest.mark.slow
def test_with_tls_rays_ports_refuse_clients_without_a_certificate(
    deployed: Deployed, outside: dict[str, tuple[str, str]]
) -> None:
    with_tls(deployed)
    check_table(deployed, outside)
    kube = deployed.kube
    of_cluster = {group: ready_of(deployed, group)[0] for group in RAY}
    (asker, *_) = ready_of(deployed, "door")
    wrong = []
    for group, pod in of_cluster.items():
        name, address = pod["metadata"]["name"], pod["status"]["podIP"]
        ports = inside(kube, name, LISTENING)
        targets = [(address, port) for port, _ in ports]
        found = inside(kube, asker["metadata"]["name"], WITHOUT_CERTIFICATE, targets)
        for (port, process), how in zip(ports, found, strict=True):
            print(f"{group} {port} {how or 'refused'}: {process}")
            plain = port in HTTP or any(name in process for name in UNENCRYPTED)
            if how and not (how == "plain" and plain):
                wrong.append(f"{group} {port}: {how}, {process}")
    assert not wrong, wrong


ISSUING = {"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "a test renews it"}
"""The condition by which cert-manager's own tool has a certificate renewed."""


@pytest.mark.slow
def test_renewed_certificates_need_no_restart_at_once(deployed: Deployed) -> None:
    """Ray's processes read certificates when they start. Running ones keep the old, a new pod has the new."""
    with_tls(deployed)
    deployed.wait_until_whole()
    kube, cluster = deployed.kube, active(deployed)
    kept = {group: uids(deployed, group) for group in RAY if group != "decode"}
    gone = kube.pods("decode")[0]["metadata"]["name"]
    with deployed.load("certificates renewed, then the decode pod killed") as load:
        renew(deployed)
        kube("-n", NAMESPACE, "delete", "pod", gone, "--force", "--grace-period=0")
        kube.until(lambda: gone not in names(ready_of(deployed, "decode")), f"{gone} is gone")
        kube.until(lambda: ready_of(deployed, "decode") and deployed.is_healthy(), "another decode pod")
    assert not load.lost and active(deployed) == cluster
    assert kept == {group: uids(deployed, group) for group in kept}, "nothing else has started again"


def renew(deployed: Deployed) -> None:
    """Have cert-manager issue new certificates, and wait until they are there."""
    kube = deployed.kube
    issued = {one["metadata"]["name"]: one["status"]["revision"] for one in certificates(deployed)}
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    value = ISSUING | {"lastTransitionTime": since}
    patch = json.dumps([{"op": "add", "path": "/status/conditions/-", "value": value}])
    for name in issued:
        kube(
            "-n", NAMESPACE, "patch", "certificate", name, "--subresource=status", "--type=json", "-p", patch
        )
    kube.until(
        lambda: all(
            one["status"]["revision"] > issued[one["metadata"]["name"]] for one in certificates(deployed)
        ),
        "renewed certificates",
    )


def inside(kube: Kube, pod: str, script: str, *arguments: object) -> Any:
    command = ("python", "-c", script, *map(json.dumps, arguments))
    return json.loads(kube("-n", NAMESPACE, "exec", pod, "--", *command).splitlines()[-1])
