"""A plain gRPC caller for the end-to-end tests, which uses the contract and not our client library."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc

PATIENCE_S = 300.0
"""The longest wait for an event, only to keep a failing test from hanging."""


@dataclass
class Answer:
    """The result of one Generate, with the client's own times besides the server's."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    client_ttft: float = 0.0
    finish: pb.Finish = field(default_factory=pb.Finish)

    @property
    def parts(self) -> dict[str, float]:
        return {part.name: part.seconds for part in self.finish.timings.parts}


class Wire:
    """A channel to the service. token: the bearer token of every call. Prompts without a salt skip the prefix
    cache."""

    def __init__(self, address: str, token: str | None = None) -> None:
        options: list[tuple[str, int]] = [("grpc.use_local_subchannel_pool", 1)]  # its own connection
        options += [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options)
        self.stub = pb_grpc.DeltafrontServiceStub(self.channel)
        self.metadata = [("authorization", f"Bearer {token}")] if token else []

    def info(self) -> pb.GetServerInfoResponse:
        return self.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=self.metadata, timeout=PATIENCE_S)

    def pages_used(self) -> int:
        info = self.info()
        total = info.decode_pages_total + info.prefill_pages_total
        return int(total - info.decode_pages_free - info.prefill_pages_free)

    def seconds_to_no_page(self, patience_s: float = PATIENCE_S) -> float:
        """Wait until every page is free, and return the seconds."""
        started = time.perf_counter()
        while used := self.pages_used():
            assert time.perf_counter() - started < patience_s, f"{used} pages are still held"
            time.sleep(0.02)
        return time.perf_counter() - started

    def prefill(self, request: pb.PrefillRequest, timeout: float = 600) -> pb.PrefillResult:
        request.skip_cache = not request.cache_salt
        for response in self.stub.Prefill(request, metadata=self.metadata, timeout=timeout):
            if response.HasField("result"):
                return response.result
        raise AssertionError("Prefill ended without a result")

    def start(self, request: pb.GenerateRequest, timeout: float = 600) -> Any:
        """Start a call, and return gRPC's stream of responses, which has .cancel()."""
        request.skip_cache = request.skip_cache or not request.cache_salt
        return self.stub.Generate(request, metadata=self.metadata, timeout=timeout)

    def generate(
        self, request: pb.GenerateRequest, timeout: float = 600, reading: threading.Event | None = None
    ) -> Answer:
        """Generate an answer. reading: set when the first chunk has been prefilled."""
        answer, started, finishes = Answer(), time.perf_counter(), 0
        for response in self.start(request, timeout):
            match response.WhichOneof("event"):
                case "progress":
                    answer.progress.append(response.progress.tokens_done)
                    if reading is not None and response.progress.tokens_done:
                        reading.set()
                case "token":
                    if not answer.token_ids:
                        answer.client_ttft = time.perf_counter() - started
                    answer.token_ids.append(response.token.token_id)
                    answer.text += response.token.text
                case "finish":
                    answer.finish = response.finish
                    answer.text += response.finish.text
                    finishes += 1
        assert finishes == 1, f"{finishes} finish events"
        return answer


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def text(value: str) -> pb.Prompt:
    return pb.Prompt(text=value)


def method(name: str, **options: float) -> pb.AttentionMethod:
    return pb.AttentionMethod(name=name, options=options)
