"""Groups, workers, configurations and nodes change under load, on a Ray cluster of four nodes.

The service has the cpu overlay's serveConfigV2 with a tiny model. Its answers are compared with those of an
undisturbed service. `make acceptance` and `pytest --acceptance` run these tests, which take about twelve
minutes on two cores.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafront.service.config import parse
from deltafront.service.errors import NotFound
from deltafront.service.fleet.session_ids import worker_of

from ..chaos.checks import Log
from ..chaos.references import references
from ..chaos.running import MODEL, Service, whole_of, write_model
from ..chaos.schedule import prompt
from .local_cluster import LocalCluster
from .manifests import serve_config
from .under_load import SHORT, Load, References, kept, longest, problems, remembered

pytestmark = pytest.mark.timeout(3600)

NODES = ("door", "door", "prefill", "decode")
MOST = 3
AFTER = 10
"""The number of requests that must succeed after each change."""
PATIENCE: dict[str, dict[str, Any]] = {
    "prefill": {"chunk_slack_s": 120, "stream_lease_s": 60},
    "decode": {"stream_lease_s": 60, "max_wait_s": 600},
    "door": {"worker_wait_s": 600},
}
"""Seconds to wait for an event, long enough for a busy machine."""


def content(model: Path, **sections: dict[str, Any]) -> Any:
    """Return the overlay's configuration with a fast model, room for three replicas of a kind per node, and
    without bearer tokens. sections: more changes."""
    found = copy.deepcopy(serve_config("cpu"))
    arguments = found["applications"][0]["args"]
    arguments["model"] = {"path": str(model), "dtype": "float32"}
    arguments["prefill"] |= {"chunk_tokens": 128, "cpus_per_stage": 0.25, "cache_tokens": 16_384}
    arguments["decode"] |= {"page_selection": "full", "delta_layers": [], "cpus": 0.25}
    arguments["door"] |= {"tokens_file": None, "model_name": MODEL, "default_method": "dense"}
    for patience in (PATIENCE, sections):
        for name, keys in patience.items():
            arguments[name] |= keys
    return found


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not request.config.getoption("--acceptance"):
        pytest.skip("takes minutes: pytest --acceptance")
    return write_model(tmp_path_factory.mktemp("model") / MODEL)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    if sys.platform != "linux":
        pytest.skip("nodes need loopback addresses of their own, which Linux has")
    serve = content(model)
    made = LocalCluster(NODES, parse(serve["applications"][0]["args"]))
    try:
        made.deploy(serve)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def service(cluster: LocalCluster) -> Service:
    return Service(os.getpid(), whole_of(1, 2, 1), cluster.doors[0], f"http://{cluster.http_doors[0]}")


@pytest.fixture(scope="module")
def known(service: Service) -> References:
    return references(service)


def changed(cluster: LocalCluster, service: Service, serve: Any) -> list[Log]:
    """Deploy a configuration under load, and wait until only its own replicas are left."""
    load = Load(service, 4)
    load.wait_for(AFTER)
    print(f"before: {longest(list(load.logs))}")
    began = time.monotonic()
    cluster.deploy(serve)
    ready = time.monotonic() - began
    for deployment, replicas in (("FrontDoor", 2), ("PrefillGroup", 1), ("DecodeReplica", 1)):
        cluster.wait_for(deployment, ["RUNNING"] * replicas)
    print(f"new replicas after {ready:.0f} s, alone after {time.monotonic() - began:.0f} s")
    load.wait_for(AFTER)
    logs = load.end()
    print(longest(logs))
    with service.client() as client:
        service.seconds_to_no_page(client)
    return logs


def test_changing_the_configuration_loses_no_request(
    cluster: LocalCluster, service: Service, known: References, model: Path
) -> None:
    """The old group and worker serve until the new ones have loaded."""
    serve = content(model, prefill={"chunk_tokens": 256}, decode={"page_budget": 96})
    logs = changed(cluster, service, serve)
    with service.client() as client:
        info = client.info()
        assert (info.chunk_tokens, info.page_budget) == (256, 96)
    assert not problems(logs, known)
    assert not any(log.again for log in logs), "a session went with its worker"


def test_each_answer_during_a_model_change_is_of_one_model_only(
    cluster: LocalCluster, service: Service, known: References, model: Path
) -> None:
    """Every answer comes from one of the two models alone. Sessions stay with the old model. The old group
    and worker end only when the new ones serve (`surge`)."""
    serve = content(model, prefill={"surge": True}, decode={"surge": True})
    serve["applications"][0]["args"]["model"]["rope_theta"] = 500.0
    with service.client() as client:
        session = kept(client)
        logs = changed(cluster, service, serve)
        new = references(service)
        long = [key for key in known if len(prompt(key[0])) > 1000]
        assert all(list(known[key].ids) != list(new[key].ids) for key in long), "the two models answer alike"
        assert not problems(logs, known, new)
        with pytest.raises(NotFound):
            list(client.generate(session_id=session, append="\nWho?", max_tokens=4))


def by_load(model: Path) -> Any:
    """Configure up to three groups and workers with small backlogs. Serve's delays are shortened by options
    of the deployments."""
    serve = content(model, prefill={"max_groups": MOST}, decode={"max_workers": MOST})
    delays = {"upscale_delay_s": 0, "downscale_delay_s": 10, "look_back_period_s": 3, "metrics_interval_s": 1}
    policies = {
        "PrefillGroup": ("GroupsByBacklog", {"backlog_s": 2.0}),
        "DecodeReplica": ("WorkersByLoad", {"usage": 0.8, "max_batch": 2}),
    }
    serve["applications"][0]["deployments"] = [
        {
            "name": name,
            "autoscaling_config": {
                "min_replicas": 1,
                "max_replicas": MOST,
                "policy": {
                    "policy_function": f"deltafront.service.fleet.scaling:{policy}",
                    "policy_kwargs": limits,
                },
                **delays,
            },
        }
        for name, (policy, limits) in policies.items()
    ]
    return serve


def test_load_scales_groups_and_workers_from_one_to_three_and_back(
    cluster: LocalCluster, service: Service, known: References, model: Path
) -> None:
    """A worker that is removed ends its sessions first, and answers questions to them until then."""
    cluster.deploy(by_load(model))
    for deployment in ("PrefillGroup", "DecodeReplica"):
        cluster.wait_for(deployment, ["RUNNING"])
    heavy, began = Load(service, 14), time.monotonic()
    with service.client() as client:
        sessions = [kept(client)]
        for deployment in ("PrefillGroup", "DecodeReplica"):
            cluster.wait_for(deployment, ["RUNNING"] * MOST)
            print(f"{deployment}: {MOST} after {time.monotonic() - began:.0f} s")
        while len({worker_of(session) for session in sessions}) < MOST:  # doors poll once a second
            assert len(sessions) < 300, "nobody is sent to a new worker"
            sessions.append(kept(client, len(sessions)))
        light = Load(service, 1, seed=1, prompts=SHORT)
        logs, began = heavy.end(), time.monotonic()
        print(longest(logs))
        cluster.wait_for("DecodeReplica", ["RUNNING", "STOPPING", "STOPPING"])
        for session in sessions:
            assert remembered(client, session)
        stopping = cluster.replicas("DecodeReplica")
        assert stopping == ["RUNNING", "STOPPING", "STOPPING"], "they wait for their sessions"
        print(f"{len(sessions)} sessions answered after {time.monotonic() - began:.0f} s")
        for session in sessions:
            client.release(session)
        for deployment in ("PrefillGroup", "DecodeReplica"):
            cluster.wait_for(deployment, ["RUNNING"])
            print(f"{deployment}: one after {time.monotonic() - began:.0f} s")
        light.wait_for(AFTER)
        logs += light.end()
        print(longest(logs))
        assert not problems(logs, known)
        assert not any(log.again for log in logs), "a session went with its worker"
        service.seconds_to_no_page(client)


def test_draining_nodes_loses_no_request(
    cluster: LocalCluster, service: Service, known: References, model: Path
) -> None:
    """Drains like a pod's preStop: replacements start elsewhere, running requests end, and the command
    returns."""
    cluster.deploy(content(model))
    load, old = Load(service, 4), cluster.nodes_of("StageActor") | cluster.nodes_of("DecodeActor")
    with service.client() as client:
        session = kept(client)
        load.wait_for(AFTER)
        print(f"before: {longest(list(load.logs))}")
        began, leaving = time.monotonic(), [NODES.index("prefill"), NODES.index("decode")]
        for number in leaving:
            cluster.join(NODES[number])
        drains = [cluster.drain(number) for number in leaving]
        cluster.wait_for("DecodeReplica", ["RUNNING", "STOPPING"])
        cluster.wait_for("PrefillGroup", ["RUNNING"])
        print(f"elsewhere after {time.monotonic() - began:.0f} s")
        assert remembered(client, session)
        assert drains[1].poll() is None, "the session's worker is still there"
        client.release(session)
        cluster.wait_for("DecodeReplica", ["RUNNING"])
        told = [drain.communicate()[1] for drain in drains]
        assert [drain.returncode for drain in drains] == [0, 0], told
        assert "waiting for" in told[0] and "PrefillGroup" in told[0]
        assert "waiting for" in told[1] and "DecodeReplica" in told[1]
        print(f"drained after {time.monotonic() - began:.0f} s")
        assert not old & (cluster.nodes_of("StageActor") | cluster.nodes_of("DecodeActor"))
        for number in leaving:
            cluster.remove(number)
        load.wait_for(AFTER)
        logs = load.end()
        print(longest(logs))
        assert not problems(logs, known)
        assert not any(log.again for log in logs), "a session went with its node"
        service.seconds_to_no_page(client)
