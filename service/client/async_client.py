"""The client for asyncio.

async with AsyncDeltafrontClient("127.0.0.1:9000") as client:
    async for event in client.generate("Once upon a time", max_tokens=32):
        ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Self, Unpack

import grpc
import grpc.aio

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
from deltafront.service.errors import Cancelled, ConnectionLost, DeltafrontError, NotFound
from deltafront.service.request import calls
from deltafront.service.request.answers import GenerateFinished, PrefillFinished, ServerInfo
from deltafront.workers.messages.events import Progress, Token


class AsyncDeltafrontClient:
    """`DeltafrontClient` for asyncio: the same arguments, events and errors. Create it in a running event
    loop, and use it in that loop.
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
        self._connection = Connection(grpc.aio, address, token, tls)
        self._stub: Any = pb_grpc.DeltafrontServiceStub(self._connection.channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel. Running requests raise Cancelled."""
        self._connection.closed = True
        await self._connection.channel.close()

    def prefill(
        self, prompt: PromptLike, **options: Unpack[PrefillOptions]
    ) -> AsyncGenerator[Progress | PrefillFinished, None]:
        """Prefill a prompt and keep its KV cache as a session."""
        return self._stream(self._stub.Prefill, *prefill_request(prompt, **options))

    def generate(
        self, prompt: PromptLike | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Progress | Token | GenerateFinished, None]:
        """Answer a prompt, or a session plus `append`."""
        return self._stream(self._stub.Generate, *generate_request(prompt, **options))

    async def release(self, session_id: str) -> None:
        """End a session and free its pages. Raises NotFound."""
        request = wire.fill_message(pb.ReleaseSessionRequest, session_id=session_id)
        retries = Retries(self._retry_s, None)
        try:
            await self._call(self._stub.ReleaseSession, request, retries)
        except NotFound:
            if not retries.retried:  # after a retry, the first try may have released it
                raise

    async def cancel(self, request_id: str) -> int:
        """Cancel all requests with this id and this client's token. Returns their number."""
        request = wire.fill_message(pb.CancelRequestRequest, request_id=request_id)
        return int((await self._call(self._stub.CancelRequest, request)).requests)

    async def info(self) -> ServerInfo:
        return wire.read(await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest()))  # type: ignore[no-any-return]

    async def _call(self, rpc: Any, request: Any, retries: Retries | None = None) -> Any:
        retries = retries or Retries(self._retry_s, None)
        while True:
            try:
                answer = await rpc(request, metadata=self._connection.metadata)
                self._connection.answered()
                return answer
            except (grpc.RpcError, asyncio.CancelledError) as error:
                await asyncio.sleep(retries.pause_s(self._translate(error)))

    async def _stream(self, rpc: Any, request: Any, deadline: float | None) -> AsyncGenerator[Any, None]:
        retries, answered = Retries(self._retry_s, deadline), list[int]()
        while True:
            try:
                async with aclosing(self._stream_once(rpc, request, deadline)) as events:
                    async for event in events:
                        retries.reset()
                        if isinstance(event, Token):
                            answered.append(event.token_id)
                        yield event
                return
            except DeltafrontError as error:
                await asyncio.sleep(retries.pause_s(error))
            if answered:
                request.answered_ids = calls.pack_ids(answered)

    async def _stream_once(self, rpc: Any, request: Any, deadline: float | None) -> AsyncGenerator[Any, None]:
        stream = rpc(request, metadata=self._connection.metadata, timeout=rpc_timeout(deadline))
        complete = False
        try:
            async for response in stream:
                self._connection.answered()
                if (event := wire.read_response(response)) is not None:
                    complete = isinstance(event, PrefillFinished | GenerateFinished)
                    yield event
        except (grpc.RpcError, asyncio.CancelledError) as error:
            translated = self._translate(error)
            if not complete:
                raise translated from None
        finally:
            stream.cancel()
        if not complete:
            raise ConnectionLost("the stream ended before its last event")

    def _translate(self, error: BaseException) -> DeltafrontError:
        """Translate gRPC's error. A closed channel raises CancelledError in calls, which becomes Cancelled. A
        real cancellation of the task stays CancelledError."""
        if isinstance(error, grpc.RpcError):
            return self._connection.translate(error)
        if not self._connection.closed:
            raise error
        return Cancelled("the client was closed")
