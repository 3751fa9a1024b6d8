"""Hundreds of clients that disconnect at random moments."""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc

from .conftest import Amount, Record
from .running import MODEL, Service
from .schedule import PROMPTS, prompt

TOGETHER = 10
TOKENS = 40
WAYS = ("stream", "stream", "cancel", "http")


def leave(
    service: Service,
    stub: pb_grpc.DeltafrontServiceStub,
    way: str,
    number: int,
    seconds: float,
    sessions: bool,
) -> None:
    """Send a request and end it after some seconds: by closing the stream, by the request's id, or over HTTP.
    sessions: whether some requests make sessions."""
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
    if sessions and number % 3 == 0:
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
    if session:  # the answer ended first
        stub.ReleaseSession(pb.ReleaseSessionRequest(session_id=session))


@pytest.mark.timeout(24 * 3600)
def test_many_cancels_free_their_pages_in_time(service: Service, amount: Amount, record: Record) -> None:
    """Uses sessions only in one process. In a real service an answer may have ended, with its session kept,
    before its client leaves without having seen it. Such a session stays until its lease ends."""
    tries = amount.tries or 1000
    draw = random.Random(amount.seed)
    chunk = service.chunk_seconds()
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
                pool.submit(
                    leave,
                    service,
                    stubs[at % 4],
                    way,
                    draw.randrange(PROMPTS),
                    draw.uniform(0, 2.0),
                    amount.inside,
                )
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
