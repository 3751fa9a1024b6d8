"""A small synchronous client: plain Python in, plain Python out, one exception tree.

with DeltafrontClient("127.0.0.1:9000") as client:
    for event in client.generate("Once upon a time", max_tokens=32):
        ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from ...protos.v1 import deltafront_pb2 as pb
from ...protos.v1 import deltafront_pb2_grpc as pb_grpc
from ...workers.messages import PageSelection, Progress, Token
from ..door import wire
from ..door.status import from_status
from ..errors import InvalidArgument
from ..request.answers import GenerateFinished, PrefillFinished, ServerInfo
from ..request.calls import GenerateRequest, PrefillRequest, Prompt, Wishes
from ..request.plan import packed

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages ({"role": …, "content": …})."""

_CHANNEL = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class DeltafrontClient:
    """Raises subclasses of DeltafrontError with code, message and retry_after_s.

    token: a bearer token; default: the environment's DELTAFRONT_TOKEN. tls: for an address whose TLS ends
    at a proxy. Closing an iterator early cancels its request on the server.
    """

    def __init__(
        self, address: str = "127.0.0.1:9000", token: str | None = None, *, tls: bool = False
    ) -> None:
        token = os.environ.get("DELTAFRONT_TOKEN") if token is None else token
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        credentials = grpc.ssl_channel_credentials() if tls else None
        self._channel = (
            grpc.secure_channel(address, credentials, _CHANNEL)
            if credentials is not None
            else grpc.insecure_channel(address, _CHANNEL)
        )
        self._stub: Any = pb_grpc.DeltafrontServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> DeltafrontClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def prefill(
        self,
        prompt: PromptLike,
        *,
        method: str = "",
        options: Mapping[str, float] | None = None,
        session_ttl_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
    ) -> Iterator[Progress | PrefillFinished]:
        """Read a prompt and keep it. timeout_s: until the server gives up."""
        request = PrefillRequest(
            prompt=_prompt(prompt),
            method=method,
            options=options or {},
            session_ttl_s=session_ttl_s,
            deadline=_deadline(timeout_s),
            request_id=request_id,
        )
        for response in self._receive(self._stub.Prefill, wire.prefill_request(request), timeout_s):
            if (event := wire.read_prefill_response(response)) is not None:
                yield event

    def generate(
        self,
        prompt: PromptLike | None = None,
        *,
        session_id: str | None = None,
        append: PromptLike | None = None,
        method: str = "",
        options: Mapping[str, float] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int = 0,
        seed: int = 0,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        page_selection: str = "",
        session_ttl_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
    ) -> Iterator[Progress | Token | GenerateFinished]:
        """Answer a prompt, or a session plus `append`."""
        if page_selection not in list(PageSelection):
            raise InvalidArgument("page_selection", f"{page_selection!r} is not full or delta")
        request = GenerateRequest(
            prompt=None if prompt is None else _prompt(prompt),
            session_id=session_id,
            append=None if append is None else _prompt(append),
            method=method,
            options=options or {},
            sampling=Wishes(temperature, top_p, top_k, seed, tuple(stop), max_tokens, ignore_eos),
            page_selection=PageSelection(page_selection),
            session_ttl_s=session_ttl_s,
            deadline=_deadline(timeout_s),
            request_id=request_id,
        )
        for response in self._receive(self._stub.Generate, wire.generate_request(request), timeout_s):
            if (event := wire.read_generate_response(response)) is not None:
                yield event

    def release(self, session_id: str) -> None:
        """Free a session's pages now. Raises NotFound."""
        self._ask(self._stub.ReleaseSession, pb.ReleaseSessionRequest(session_id=session_id))

    def info(self) -> ServerInfo:
        return wire.read_server_info(self._ask(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    def _ask(self, call: Any, request: Any) -> Any:
        try:
            return call(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _translated(error) from None

    def _receive(self, call: Any, request: Any, timeout_s: float | None) -> Iterator[Any]:
        # The server enforces the deadline and says which phase it hit; gRPC's own is only a safety net.
        patience = None if timeout_s is None else timeout_s + 5.0
        stream = call(request, metadata=self._metadata, timeout=patience)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise _translated(error) from None
        finally:
            stream.cancel()


def _translated(error: Any) -> Exception:
    return from_status(error.code(), error.details() or "", error.trailing_metadata() or ())


def _prompt(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    messages = tuple(one for one in prompt if isinstance(one, Mapping))
    if messages:
        return Prompt(messages=messages)
    return Prompt(token_ids=packed([int(one) for one in prompt if isinstance(one, int)]))


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.time() + timeout_s
