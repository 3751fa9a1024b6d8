"""A server that answers nothing any more and closes nothing, as one whose machine is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.client import client as module
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.errors import ConnectionLost


class Reading(pb_grpc.DeltafrontServiceServicer):
    """Says that it has begun, and no more."""

    def Prefill(self, request: Any, context: Any) -> Iterator[Any]:
        del request, context
        yield pb.PrefillResponse(progress=pb.Progress(tokens_total=9))
        time.sleep(3600)


def serve(pipe: Any) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_DeltafrontServiceServicer_to_server(Reading(), server)  # type: ignore[no-untyped-call]
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    time.sleep(3600)


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Its process and port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    yield process.pid, ours.recv()
    process.kill()
    process.join()


@pytest.mark.long  # gRPC pings a silent server once a minute
def test_a_server_that_is_silent_for_good_is_a_lost_connection(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(module._CHANNEL)
    assert options["grpc.keepalive_time_ms"] > 300_000, "more often, servers close the connection"
    quick = options | {"grpc.keepalive_time_ms": 500, "grpc.keepalive_timeout_ms": 500}
    monkeypatch.setattr(module, "_CHANNEL", tuple(quick.items()))
    pid, port = server
    with DeltafrontClient(f"127.0.0.1:{port}", retry_s=0) as client:
        events = client.prefill("Call me Ishmael.")
        next(events)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ConnectionLost):
            next(events)
