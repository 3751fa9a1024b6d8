"""The synchronous client.

with DeltafrontClient("127.0.0.1:9000") as client:
    for event in client.generate("Once upon a time", max_tokens=32):
        ...
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self, Unpack

import grpc

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.protos.v1 import deltafront_pb2_grpc as pb_grpc
from deltafront.service.client.connection import Connection, rpc_timeout
from deltafront.service.client.endpoint import Tls
from deltafront.service.client.prompts import PromptLike
from deltafront.service.client.requests import (
    GenerateOptions,
    PrefillOptions,
    generate_request,
    prefill_request,
)
from deltafront.service.client.retries import Retries
from deltafront.service.door import wire
from deltafront.service.errors import ConnectionLost, DeltafrontError, NotFound
from deltafront.service.request import calls
from deltafront.service.request.answers import GenerateFinished, PrefillFinished, ServerInfo
from deltafront.workers.messages.events import Progress, Token


class DeltafrontClient:
    """The synchronous client of a server. Methods raise subclasses of DeltafrontError. Closing an iterator
    cancels its request.

    After a lost connection a request resumes where its answer stopped. If the server never answered,
    Unavailable is raised at once. A server whose machine is gone is noticed after 6 minutes of silence.

    Args:
        token: A bearer token; by default DELTAFRONT_TOKEN.
        tls: Use TLS. True takes the files named by the environment.
        retry_s: Seconds for which to retry without an answer; 0 raises ConnectionLost at once.

    Raises:
        InvalidArgument: The address is not host:port, or the token has characters that a header cannot hold.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9000",
        token: str | None = None,
        *,
        tls: bool | Tls = False,
        retry_s: float = 30.0,
    ) -> None:
        self._retry_s = retry_s
        self._connection = Connection(grpc, address, token, tls)
        self._stub: Any = pb_grpc.DeltafrontServiceStub(self._connection.channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel. Running requests raise Cancelled."""
        self._connection.closed = True
        self._connection.channel.close()

    def prefill(
        self, prompt: PromptLike, **options: Unpack[PrefillOptions]
    ) -> Iterator[Progress | PrefillFinished]:
        """Prefill a prompt and keep its KV cache as a session."""
        request, deadline = prefill_request(prompt, **options)
        yield from self._stream(self._stub.Prefill, request, deadline)

    def generate(
        self, prompt: PromptLike | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[Progress | Token | GenerateFinished]:
        """Answer a prompt, or a session plus `append`."""
        request, deadline = generate_request(prompt, **options)
        yield from self._stream(self._stub.Generate, request, deadline)

    def release(self, session_id: str) -> None:
        """End a session and free its pages. Raises NotFound."""
        request = wire.fill_message(pb.ReleaseSessionRequest, session_id=session_id)
        retries = Retries(self._retry_s, None)
        try:
            self._call(self._stub.ReleaseSession, request, retries)
        except NotFound:
            if not retries.retried:  # after a retry, the first try may have released it
                raise

    def cancel(self, request_id: str) -> int:
        """Cancel all requests with this id and this client's token. Returns their number."""
        request = wire.fill_message(pb.CancelRequestRequest, request_id=request_id)
        return int(self._call(self._stub.CancelRequest, request).requests)

    def info(self) -> ServerInfo:
        return wire.read(self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest()))  # type: ignore[no-any-return]

    def _call(self, rpc: Any, request: Any, retries: Retries | None = None) -> Any:
        retries = retries or Retries(self._retry_s, None)
        while True:
            try:
                answer = rpc(request, metadata=self._connection.metadata)
                self._connection.answered()
                return answer
            except grpc.RpcError as error:
                time.sleep(retries.pause_s(self._connection.translate(error)))

    def _stream(self, rpc: Any, request: Any, deadline: float | None) -> Iterator[Any]:
        retries, answered = Retries(self._retry_s, deadline), list[int]()
        while True:
            try:
                for event in self._stream_once(rpc, request, deadline):
                    retries.reset()
                    if isinstance(event, Token):
                        answered.append(event.token_id)
                    yield event
                return
            except DeltafrontError as error:
                time.sleep(retries.pause_s(error))
            if answered:
                request.answered_ids = calls.pack_ids(answered)

    def _stream_once(self, rpc: Any, request: Any, deadline: float | None) -> Iterator[Any]:
        stream = rpc(request, metadata=self._connection.metadata, timeout=rpc_timeout(deadline))
        complete = False
        try:
            for response in stream:
                self._connection.answered()
                if (event := wire.read_response(response)) is not None:
                    complete = isinstance(event, PrefillFinished | GenerateFinished)
                    yield event
        except grpc.RpcError as error:
            if not complete:
                raise self._connection.translate(error) from None
        finally:
            stream.cancel()
        if not complete:
            raise ConnectionLost("the stream ended before its last event")
