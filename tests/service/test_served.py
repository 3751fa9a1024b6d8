"""Tests that need a real Ray Serve with HAProxy: codes, trailing metadata, cancels, large messages."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltafront.service.client import (
    DeltafrontClient,
    PrefillFinished,
    Tls,
    Token,
)
from deltafront.service.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    Unauthenticated,
)

from ..strangers import listeners, run_code, send_pickle, uninvited
from .conftest import Served
from .fakes import Speed
from .inprocess import HANG_S, wait_until
from .reflection import reflected
from .test_requests import collect, expected, ids

pytestmark = pytest.mark.service


@pytest.fixture
def client(served: Served) -> Iterator[DeltafrontClient]:
    served.configure(served.group, speed=Speed(), rate=0.0, waiting_tokens=0, chunk_tokens=128, pause_at=-1)
    served.configure(served.decode, speed=Speed(), script=[], pause_at=-1)
    with DeltafrontClient(served.address, served.token) as client:
        wait_until(lambda: client.info().decode_workers, "the door does not see its workers")
        yield client


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.address) as channel:
        yield channel


def nothing_left(served: Served) -> None:
    """Wait until the workers hold nothing. Ask only now and then, because each check takes two calls through
    Ray."""
    wait_until(lambda: not served.pages_used(), "pages are left", every_s=0.1)


def test_served_request_streams_progress_tokens_and_timings(served: Served, client: DeltafrontClient) -> None:
    text, tokens, finish, progress = collect(client.generate("y" * 400, append="?", max_tokens=20))
    assert text == expected(ids("y" * 400 + "?"), 20)
    assert len(tokens) == 20
    assert progress[-1].tokens_done == 402
    assert sum(finish.timings.parts.values()) == pytest.approx(finish.timings.ttft_seconds)
    assert min(finish.timings.parts.values()) >= 0
    nothing_left(served)


def test_serves_grpc_health_and_reflection(client: DeltafrontClient, channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in ("", "deltafront.v1.DeltafrontService"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == serving
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == serving
    watch.cancel()

    for version in ("v1", "v1alpha"):
        names = reflected(channel, version)
        assert {"deltafront.v1.DeltafrontService", "grpc.health.v1.Health"} <= names
        assert {f"grpc.reflection.{known}.ServerReflection" for known in ("v1", "v1alpha")} <= names


def test_all_ports_listen_on_loopback_by_default(served: Served) -> None:
    """TLS and metrics included: `door.host` is loopback."""
    wanted = set(served.ports.values())
    wait_until(lambda: wanted <= {port for _, port, _ in listeners(os.getpid())}, "not all ports are seen")
    assert not uninvited(os.getpid(), set())


@pytest.mark.parametrize("whose", ["nobody's", "another", "ours"])
def test_ray_control_store_runs_code_only_for_its_token(served: Served, tmp_path: Path, whose: str) -> None:
    """Connects as another process on this machine, on loopback."""
    import ray

    token = {"another": "0" * 32, "ours": os.environ["RAY_AUTH_TOKEN"]}.get(whose)
    mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    said = run_code(ray.get_runtime_context().gcs_address, tmp_path, **mode)
    assert ("inside 42" in said) == (whose == "ours"), said
    assert ("AuthenticationError" in said) == (whose != "ours"), said


def test_replica_unpickles_nothing_without_the_token(served: Served, tmp_path: Path) -> None:
    """With the token the same pickle runs, so only the token prevents it."""
    ports = [port for _, port, name in listeners(os.getpid()) if "ServeReplica" in name]
    inner = [port for port in ports if port not in served.ports.values()]
    answers = {port: send_pickle(port, tmp_path / "opened") for port in inner}
    refusing = [port for port, code in answers.items() if code is grpc.StatusCode.UNAUTHENTICATED]
    assert len(refusing) >= 2, "each of the two doors has such a server"
    assert not (tmp_path / "opened").exists()
    for port in refusing:
        send_pickle(port, tmp_path / "opened", os.environ["RAY_AUTH_TOKEN"])
    assert (tmp_path / "opened").exists()


def test_every_door_serves_tls_on_its_own_port(served: Served, client: DeltafrontClient) -> None:
    """Both doors listen there; each new connection may reach either."""
    *_, result = client.prefill("document", session_ttl_s=60)
    assert isinstance(result, PrefillFinished)
    session = result.session.session_id
    for number in range(8):
        with DeltafrontClient(served.encrypted, served.token, tls=Tls(served.ca)) as secure:
            text, *_ = collect(secure.generate(session_id=session, append="?", max_tokens=3))
            assert text == expected(ids("document") + ids("?", bos=False), 3)
            if number == 7:
                secure.release(session)
    tls = Tls(served.ca)
    with DeltafrontClient(served.encrypted, "wrong", tls=tls) as stranger, pytest.raises(Unauthenticated):
        stranger.info()
    nothing_left(served)


def test_any_door_cancels_a_request_of_another(served: Served, client: DeltafrontClient) -> None:
    """Each door asks the others through Serve."""
    served.configure(served.decode, pause_at=2)
    for number in range(4):
        stream = client.generate("x" * 300, request_id=f"endless-{number}")
        while not isinstance(next(stream), Token):
            pass
        with DeltafrontClient(served.address, served.other) as stranger:
            assert stranger.cancel(f"endless-{number}") == 0
        with DeltafrontClient(served.address, served.token) as canceller:
            assert canceller.cancel(f"endless-{number}") == 1
            assert canceller.cancel(f"endless-{number}") == 0
        with pytest.raises(Cancelled):
            list(stream)
    nothing_left(served)


def test_overload_error_carries_a_retry_time(served: Served, client: DeltafrontClient) -> None:
    """At one token per second the backlog takes 100,000 s, so the test's own time does not matter."""
    served.configure(served.group, rate=1.0, waiting_tokens=100_000)
    refusals: list[Overloaded] = []

    def refused() -> bool:
        try:
            list(client.generate("x" * 100, timeout_s=50_000))
        except Overloaded as error:
            refusals.append(error)
        return len(refusals) >= 4

    wait_until(refused, "not every door knows of the backlog")
    for error in refusals:
        assert error.retry_after_s is not None
        assert 0 <= error.retry_after_s - (100_101 - 50_000) <= HANG_S
    with pytest.raises(DeadlineExceeded, match="takes about 1001"):
        list(client.generate("x" * 1000, timeout_s=500))


@pytest.mark.parametrize("after", [0, 3, 20])
def test_client_that_leaves_frees_its_pages(served: Served, client: DeltafrontClient, after: int) -> None:
    """Before the first event, during prefill, and during the answer. `test_leaving` tries other moments."""
    served.configure(served.group, speed=Speed(chunk=0.05))
    served.configure(served.decode, speed=Speed(token=0.05))
    stream = client.generate("x" * 1280, max_tokens=200)
    for _ in range(after):
        next(stream)
    threading.Timer(0.02 if after == 0 else 0, stream.close).run()  # type: ignore[attr-defined]
    nothing_left(served)


def test_prompt_of_half_a_million_token_ids_is_answered(served: Served, client: DeltafrontClient) -> None:
    served.configure(served.group, speed=Speed(chunk=0.0), total=1 << 16, chunk_tokens=1 << 14)
    served.configure(served.decode, total=1 << 16)
    wait_until(lambda: knows(served, 1 << 16), "not every door knows of the pages")
    text, _, finish, _ = collect(client.generate([65] * (1 << 19), max_tokens=3))
    assert finish.usage.prompt_tokens == 1 << 19
    assert len(text) == 3
    nothing_left(served)


def knows(served: Served, pages: int) -> bool:
    """Return whether all doors know the number of pages."""
    for _ in range(4):
        with DeltafrontClient(served.address, served.token) as client:
            if client.info().decode_pages_total != pages:
                return False
    return True


def test_a_huge_message_is_refused(served: Served, client: DeltafrontClient, channel: grpc.Channel) -> None:
    call = channel.unary_stream("/deltafront.v1.DeltafrontService/Generate")
    token = [("authorization", f"Bearer {served.token}")]
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\x0a" + b"\0" * 600_000_000, timeout=10 * HANG_S, metadata=token))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.info().vocabulary == 258
    nothing_left(served)


def scrape(served: Served) -> dict[str, float]:
    with urllib.request.urlopen(served.metrics, timeout=HANG_S) as reply:
        lines = reply.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}


def total(samples: dict[str, float], name: str, labels: Sequence[str]) -> float:
    named = {k: v for k, v in samples.items() if k.startswith(f"deltafront_{name}{{")}
    return sum(v for k, v in named.items() if all(label in k for label in labels))


@pytest.fixture
def api(served: Served, client: DeltafrontClient) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key=served.token, max_retries=0) as api:
        yield api


def test_http_errors_name_the_field(served: Served, api: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="wrong").models.list()
    model = api.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="use_beam_search: is not supported") as caught:
        api.completions.create(model=model, prompt="x", extra_body={"use_beam_search": True})
    assert caught.value.param == "use_beam_search"
    served.configure(served.group, rate=1.0, waiting_tokens=100_000)
    full: list[openai.RateLimitError] = []

    def refused() -> bool:
        try:
            api.completions.create(model=model, prompt="x" * 100, extra_body={"timeout_s": 50_000})
        except openai.RateLimitError as error:
            full.append(error)
        return bool(full)

    wait_until(refused, "no door knows of the backlog")
    assert int(full[0].response.headers["retry-after"]) > 0


def test_http_refusals_have_one_form_from_every_layer(served: Served) -> None:
    """The layers are HAProxy, Serve's HTTP server and the door."""
    assert httpx.get(f"{served.http}/health").json() == {"status": "ok"}
    asked = {431: ("GET", {"x-long": "a" * 40_000}), 400: ("WHAT", {}), 405: ("PUT", {})}
    for status, (verb, headers) in asked.items():
        answer = httpx.request(verb, f"{served.http}/health", headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("doing", ["reading", "answering"])
def test_leaving_an_http_stream_frees_its_pages(served: Served, api: openai.OpenAI, doing: str) -> None:
    """The work pauses where the test stops it, so no buffer holds back earlier events."""
    served.configure(served.group if doing == "reading" else served.decode, pause_at=2)
    model, headers = api.models.list().data[0].id, {"authorization": f"Bearer {served.token}"}
    request = {"model": model, "prompt": "x" * 300, "stream": True, "max_tokens": 50}
    request["stream_options"] = {"include_progress": True}
    expected_lines = [":"] if doing == "reading" else ["data:", "data:"]
    with httpx.stream("POST", f"{served.http}/v1/completions", json=request, headers=headers) as response:
        lines = (line for line in response.iter_lines() if line not in ("", ": waiting"))
        if doing == "answering":
            lines = (line for line in lines if line[0] != ":")
        assert [next(lines).split(" ")[0] for _ in expected_lines] == expected_lines
        assert served.pages_used()
    nothing_left(served)


def cancelled(served: Served) -> float:
    return total(scrape(served), "requests_total", ['method_rpc="Generate"', 'outcome="cancelled"'])


@pytest.mark.parametrize("answering", [False, True], ids=["reading", "answering"])
def test_leaving_before_an_unstreamed_http_answer_frees_its_pages(
    served: Served, api: openai.OpenAI, answering: bool
) -> None:
    """Meanwhile nothing is written to the client. Its request arrives in two pieces."""
    served.configure(served.decode if answering else served.group, pause_at=25 if answering else 2)

    def tokens() -> float:
        return total(scrape(served), "inter_token_latency_seconds_count", [])

    before, told = cancelled(served), tokens()
    ask = {"model": api.models.list().data[0].id, "prompt": "x" * 300, "max_tokens": 50}
    body = json.dumps(ask).encode()
    connection = http.client.HTTPConnection(served.http.removeprefix("http://"), timeout=HANG_S)
    connection.putrequest("POST", "/v1/completions")
    for name, value in {
        "Authorization": f"Bearer {served.token}",
        "Content-Type": "application/json",
    }.items():
        connection.putheader(name, value)
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()
    time.sleep(0.05)  # many clients send two pieces, which HAProxy may treat differently
    connection.send(body)
    begun = (lambda: tokens() > told + 20) if answering else served.pages_used
    wait_until(begun, "the request does not begin", every_s=0.1)
    connection.close()
    nothing_left(served)
    wait_until(lambda: cancelled(served) == before + 1, "it is not counted as cancelled", every_s=0.1)
