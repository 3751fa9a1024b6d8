"""A server that stops answering but keeps its connections, like one whose machine is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deltafront.service.client.client import DeltafrontClient
from deltafront.service.errors import ConnectionLost

SERVER = """
import concurrent.futures, time, grpc
from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc

class Reading(pb_grpc.DeltafrontServiceServicer):
    def Prefill(self, request, context):
        yield pb.PrefillResponse(progress=pb.Progress(tokens_total=9))
        time.sleep(3600)

server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
pb_grpc.add_DeltafrontServiceServicer_to_server(Reading(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
time.sleep(3600)
"""
"""The code of a server that reports the start of prefill and then stays silent."""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield the server's process and port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.long  # gRPC pings a silent server once a minute
def test_server_that_stays_silent_counts_as_a_lost_connection(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server
    with DeltafrontClient(f"127.0.0.1:{port}", retry_s=0) as client:
        events = client.prefill("Call me Ishmael.")
        next(events)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectionLost):
            next(events)
