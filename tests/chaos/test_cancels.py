"""Clients that leave, by the hundred, at random moments; and doors that die with all that they had."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.client import DeltafrontClient, DeltafrontError, Progress, Token

from .conftest import Amount, Record
from .running import MODEL, Service
from .schedule import PROMPTS, Kind, prompt

TOGETHER = 10
TOKENS = 40
WAYS = ("stream", "stream", "cancel", "http")


def leave(
    service: Service, stub: pb_grpc.DeltafrontServiceStub, way: str, number: int, seconds: float
) -> None:
    """Ask, and be gone after so many seconds: by closing the stream, by the request's id, or over HTTP."""
    text = prompt(number)
    if way == "http":
        body = {"model": MODEL, "prompt": text, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        until = time.monotonic() + seconds
        with httpx.stream("POST", f"{service.http}/v1/completions", json=body, timeout=60) as reply:
            for _line in reply.iter_lines():
                if time.monotonic() > until:
                    return
        return
    request_id = uuid.uuid4().hex
    request = pb.GenerateRequest(
        prompt=pb.Prompt(text=text),
        sampling=pb.SamplingOptions(max_tokens=TOKENS, ignore_eos=True),
        request_id=request_id,
    )
    if number % 3 == 0:
        request.session_ttl.FromSeconds(600)
    stream = stub.Generate(request)

    def end() -> None:
        if way == "cancel":
            stub.CancelRequest(pb.CancelRequestRequest(request_id=request_id))
        else:
            stream.cancel()

    timer = threading.Timer(seconds, end)
    timer.start()
    session = ""
    with contextlib.suppress(grpc.RpcError):
        for response in stream:
            session = session or response.finish.session.session_id
    timer.join()
    if session:  # it was faster than we
        stub.ReleaseSession(pb.ReleaseSessionRequest(session_id=session))


def chunk_seconds(service: Service) -> float:
    """The longest wait between two chunks of one prompt, while as many are read as in the storm."""

    def longest(client: DeltafrontClient) -> float:
        at, waits = time.monotonic(), list[float]()
        for event in client.generate(prompt(5), max_tokens=1, ignore_eos=True):
            if isinstance(event, Progress):
                waits.append(time.monotonic() - at)
                at = time.monotonic()
        return statistics.median(waits[1:])

    with service.client() as client:
        return longest(client)


@pytest.mark.timeout(24 * 3600)
def test_a_storm_of_cancels(service: Service, amount: Amount, record: Record) -> None:
    tries = amount.tries or 1000
    draw = random.Random(amount.seed)
    chunk = chunk_seconds(service)
    times, late, done = list[float](), 0, 0
    until = time.monotonic() + amount.budget_s
    channels = [
        grpc.insecure_channel(service.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)
    ]
    stubs = [pb_grpc.DeltafrontServiceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    with service.client() as client, ThreadPoolExecutor(TOGETHER) as pool:
        while done < tries and time.monotonic() < until:
            ways = [draw.choice(WAYS if service.http else WAYS[:3]) for _ in range(TOGETHER)]
            left = [
                pool.submit(leave, service, stubs[at % 4], way, draw.randrange(PROMPTS), draw.uniform(0, 2.0))
                for at, way in enumerate(ways)
            ]
            for one in left:
                one.result(120)
            done += TOGETHER
            times.append(service.seconds_to_no_page(client))
            late += TOGETHER * (times[-1] > chunk + 1.0)
    for channel in channels:
        channel.close()
    note = f"{TOGETHER} at a time; to zero pages after the last {statistics.median(times):.2f} s, at most "
    note += f"{max(times):.2f} s; a chunk takes {chunk:.2f} s"
    record("cancels", done, late, note)
    assert not late


@contextlib.contextmanager
def endless(service: Service, clients: int) -> Iterator[None]:
    """Clients that do not come back: each has an endless answer, begun, and its prompt as a session."""
    streams, channels = [], []
    for _ in range(clients):
        channel = grpc.insecure_channel(service.address, [("grpc.use_local_subchannel_pool", 1)])
        channels.append(channel)
        stub = pb_grpc.DeltafrontServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(
            prompt=pb.Prompt(text=prompt(0)), sampling=pb.SamplingOptions(max_tokens=10_000, ignore_eos=True)
        )
        request.session_ttl.FromSeconds(600)
        streams.append(stub.Generate(request))
    for stream in streams:
        while next(stream).WhichOneof("event") != "token":
            pass
    yield
    for stream in streams:
        stream.cancel()
    for channel in channels:
        channel.close()


@pytest.mark.timeout(24 * 3600)
def test_a_doors_death_frees_its_pages(service: Service, amount: Amount, record: Record) -> None:
    """Clients of the other door leave at that moment, so that what stays is the dead one's."""
    tries, done, late, times = amount.tries or 10, 0, 0, list[float]()
    draw = random.Random(amount.seed)
    until = time.monotonic() + amount.budget_s
    with service.client() as client:
        while done < tries and time.monotonic() < until:
            service.seconds_to_whole(client)
            with endless(service, 6):
                victim = draw.choice(service.processes()[Kind.DOOR])
                os.kill(victim.pid, signal.SIGKILL)
            killed = time.monotonic()
            service.seconds_to_no_page(client)
            times.append(time.monotonic() - killed)
            late += times[-1] > 10.0
            done += 1
    record("door_death_pages", done, late, f"6 endless answers; zero pages after at most {max(times):.1f} s")
    assert not late


@pytest.mark.timeout(24 * 3600)
def test_a_hanging_stage_is_noticed(service: Service, amount: Amount, record: Record) -> None:
    """Long prompts at both groups, and a stage stands still: every one is answered, and none waits longer for
    its next event than two chunks, 5 s, and what a chunk of it takes at the other group."""
    tries, done, late, pauses = amount.tries or 10, 0, 0, list[float]()
    draw = random.Random(amount.seed)
    chunk = chunk_seconds(service)
    until = time.monotonic() + amount.budget_s

    def read(number: int, started: threading.Event) -> float:
        at, longest = time.monotonic(), 0.0
        with service.client() as client:
            for event in client.generate(prompt(2 * number + 1), max_tokens=4, ignore_eos=True):
                now = time.monotonic()
                if not isinstance(event, Token):
                    started.set()
                longest, at = max(longest, now - at), now
        return longest

    with service.client() as client, ThreadPoolExecutor(4) as pool:
        while done < tries and time.monotonic() < until:
            service.seconds_to_whole(client)
            started = [threading.Event() for _ in range(4)]
            reading = [pool.submit(read, number, event) for number, event in enumerate(started)]
            started[0].wait(60)
            os.kill(draw.choice(service.processes()[Kind.STAGE]).pid, signal.SIGSTOP)
            try:
                pauses.append(max(one.result(120) for one in reading))
                late += pauses[-1] > 3 * chunk + 5.0 + 1.0
            except (DeltafrontError, TimeoutError) as error:
                print(error)
                late += 1
            done += 1
    note = f"longest pause of a client {statistics.median(pauses):.1f} s, at most {max(pauses):.1f} s"
    record("sigstop", done, late, f"{note}; a chunk takes {chunk:.2f} s")
    assert not late
