"""Two doors: each resumes the other's answers, and a dead door leaves no pages in use."""

from __future__ import annotations

import csv
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import grpc
import psutil
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.client import (
    DeltafrontClient,
    GenerateFinished,
    Token,
)
from deltafront.service.local.ports import serve_ports
from deltafront.service.local.server_process import LocalService

from .conftest import Haystack, Sizes, Table
from .wire import PATIENCE_S, Wire, text

RAYS_WORDS = ("actor", "ray", "traceback", "replica")
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 24, "ignore_eos": True}
GREEDY = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture
def client(service: LocalService) -> Iterator[DeltafrontClient]:
    with DeltafrontClient(service.address) as client:
        yield client


def doors(service: LocalService) -> list[int]:
    """Process ids of the doors."""
    found = []
    for process in psutil.Process(service.pid).children(recursive=True):
        try:
            if "ServeReplica:deltafront:FrontDoor" in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def at_doors(service: LocalService, column: str) -> dict[str, int]:
    """Return HAProxy's counts for each door: `scur`, its current requests; `hrsp_2xx`, its answers."""
    port = serve_ports(int(service.address.split(":")[1]))["RAY_SERVE_HAPROXY_STATS_PORT"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats;csv", timeout=PATIENCE_S) as reply:
        rows = list(csv.DictReader(reply.read().decode().removeprefix("# ").splitlines()))
    of = [row for row in rows if row["pxname"] == "grpc-deltafront" and "SERVE_REPLICA" in row["svname"]]
    return {row["svname"]: int(row[column] or 0) for row in of}


def wait_for_two_doors(service: LocalService) -> list[int]:
    """Wait until both doors answer, which is long after their processes start.

    Each try uses a new connection, because an old one may stay with a replaced HAProxy, which does not know
    new doors.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        before = at_doors(service, "hrsp_2xx")
        wire = Wire(service.address)
        workers = [
            wire.info().decode_workers for _ in range(4)
        ]  # HAProxy sends each to the door with fewer requests
        after = at_doors(service, "hrsp_2xx")
        answering = [name for name in after if after[name] > before.get(name, 0)]
        if len(found := doors(service)) == len(answering) == 2 and all(workers):
            return found
        assert time.monotonic() < until, f"{len(found)} doors, {len(answering)} answer"
        time.sleep(0.2)


def seconds_to_no_page(client: DeltafrontClient) -> float:
    started = time.monotonic()
    while True:
        info = client.info()
        held = info.decode_pages_total + info.prefill_pages_total
        held -= info.decode_pages_free + info.prefill_pages_free
        if not held:
            return time.monotonic() - started
        assert time.monotonic() - started < PATIENCE_S, f"{held} pages are still held"
        time.sleep(0.1)


def test_answers_resume_when_their_api_server_is_killed(
    service: LocalService, client: DeltafrontClient, haystack: Haystack, sizes: Sizes, table: Table
) -> None:
    """Both doors have requests in prefill and in decode, greedy and sampled."""
    prompts = [haystack.text[: 400 + 40 * number] for number in range(6)]
    options = [GREEDY if number % 2 else SAMPLED for number in range(6)]

    def answer(number: int, on_token: threading.Event | None = None) -> list[int]:
        ids: list[int] = []
        finishes = 0
        for event in client.generate(prompts[number], method="dense", **options[number]):  # type: ignore[arg-type]
            if isinstance(event, Token):
                assert event.index == len(ids)
                ids.append(event.token_id)
                if on_token is not None and len(ids) == 3:
                    on_token.set()
            finishes += isinstance(event, GenerateFinished)
        assert finishes == 1
        return ids

    alone = [answer(number) for number in range(6)]
    found = wait_for_two_doors(service)
    started = [threading.Event() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(answer, number, started[number]) for number in range(6)]
        assert started[0].wait(PATIENCE_S)
        os.kill(found[0], signal.SIGKILL)
        answers = [one.result(PATIENCE_S) for one in running]
    assert answers == alone
    table.add("to zero pages after answers through a killed door, s", round(seconds_to_no_page(client), 2))
    wait_for_two_doors(service)


def test_a_dead_api_servers_requests_and_sessions_are_dropped(
    service: LocalService, client: DeltafrontClient, sizes: Sizes, table: Table
) -> None:
    """Their clients do not resume, and do not see Ray's error texts."""
    request = pb.GenerateRequest(
        prompt=text("Call me Ishmael. " * 20), sampling=pb.SamplingOptions(max_tokens=10_000, ignore_eos=True)
    )
    request.session_ttl.FromSeconds(500)
    streams = streams_at_both_doors(service, request)
    os.kill(doors(service)[0], signal.SIGKILL)
    killed = time.monotonic()
    with ThreadPoolExecutor(len(streams)) as pool:
        ends = [pool.submit(end_of, stream) for stream in streams]
        lost = list(islice(as_completed(ends, PATIENCE_S), len(streams) // 2))
        for stream in streams:  # the other door's streams
            stream.cancel()
    for end in ends:
        assert ended_here(end.result()) == (end not in lost), end.result()
    for error in (end.result() for end in lost):
        assert not any(word in (error.details() or "").lower() for word in RAYS_WORDS), error.details()
    seconds_to_no_page(client)
    took = time.monotonic() - killed
    table.add("to zero pages after a door's death, s", round(took, 2))
    assert took < 10 or not sizes.timed
    wait_for_two_doors(service)


def streams_at_both_doors(service: LocalService, request: pb.GenerateRequest) -> list[Any]:
    """Begin four answers, two at each door."""
    until = time.monotonic() + PATIENCE_S
    while True:
        wait_for_two_doors(service)
        wire = Wire(service.address)
        streams = [wire.start(request) for _ in range(4)]
        for stream in streams:
            while next(stream).WhichOneof("event") != "token":
                pass
        held = at_doors(service, "scur")
        if sorted(number for number in held.values() if number) == [2, 2]:
            return streams
        assert time.monotonic() < until, f"the doors' streams: {held}"
        for stream in streams:
            stream.cancel()


def end_of(stream: Iterator[object]) -> grpc.RpcError:
    try:
        for _response in stream:
            pass
    except grpc.RpcError as error:
        return error
    raise AssertionError("an endless answer ended")


def ended_here(error: grpc.RpcError) -> bool:
    """Return whether this process has cancelled the stream."""
    return error.code() is grpc.StatusCode.CANCELLED and "locally" in (error.details() or "").lower()
