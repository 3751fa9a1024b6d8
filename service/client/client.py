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
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ...protos.v1 import deltafront_pb2 as pb
from ...protos.v1 import deltafront_pb2_grpc as pb_grpc
from ...workers.messages import Progress, Token
from ..errors import InvalidArgument, from_status
from ..request.plan import packed
from .results import (
    GenerateFinished,
    PrefillFinished,
    ServerInfo,
    generate_finished,
    prefill_finished,
    server_info,
)

__all__ = [
    "DeltafrontClient",
    "GenerateFinished",
    "PrefillFinished",
    "Progress",
    "ServerInfo",
    "Token",
]

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages ({"role": …, "content": …})."""

_SELECTIONS = {"": 0, "full": 1, "delta": 2}
_CHANNEL = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class DeltafrontClient:
    """Raises subclasses of DeltafrontError (`errors.py`) with code, message and retry_after_s.

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
        request = pb.PrefillRequest(
            prompt=_prompt(prompt),
            attention=pb.AttentionMethod(name=method, options=dict(options or {})),
            session_ttl=_duration(session_ttl_s),
            deadline=_deadline(timeout_s),
            request_id=request_id,
        )
        for response in self._receive(self._stub.Prefill, request, timeout_s):
            if response.WhichOneof("event") == "progress":
                yield Progress(response.progress.tokens_done, response.progress.tokens_total)
            else:
                yield prefill_finished(response.result)

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
        if page_selection not in _SELECTIONS:
            raise InvalidArgument("page_selection", f"{page_selection!r} is not full or delta")
        sampling = pb.SamplingOptions(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, max_tokens=max_tokens,
            ignore_eos=ignore_eos,
        )  # fmt: skip
        request = pb.GenerateRequest(
            prompt=None if prompt is None else _prompt(prompt),
            session_id=session_id,
            append=None if append is None else _prompt(append),
            attention=pb.AttentionMethod(name=method, options=dict(options or {})),
            sampling=sampling,
            page_selection=_SELECTIONS[page_selection],  # type: ignore[arg-type]
            session_ttl=_duration(session_ttl_s),
            deadline=_deadline(timeout_s),
            request_id=request_id,
        )
        for response in self._receive(self._stub.Generate, request, timeout_s):
            kind = response.WhichOneof("event")
            if kind == "token":
                one = response.token
                yield Token(one.index, one.token_id, one.logprob, one.text)
            elif kind == "progress":
                yield Progress(response.progress.tokens_done, response.progress.tokens_total)
            else:
                yield generate_finished(response.finish)

    def release(self, session_id: str) -> None:
        """Free a session's pages now. Raises NotFound."""
        self._ask(self._stub.ReleaseSession, pb.ReleaseSessionRequest(session_id=session_id))

    def info(self) -> ServerInfo:
        return server_info(self._ask(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

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


def _prompt(prompt: PromptLike) -> pb.Prompt:
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    messages = [one for one in prompt if isinstance(one, Mapping)]
    if messages:
        chat = [pb.ChatMessage(role=one["role"], content=one["content"]) for one in messages]
        return pb.Prompt(messages=pb.ChatMessages(messages=chat))
    return pb.Prompt(token_ids=packed([int(one) for one in prompt if isinstance(one, int)]))


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration


def _deadline(timeout_s: float | None) -> Timestamp | None:
    if timeout_s is None:
        return None
    deadline = Timestamp()
    deadline.FromMicroseconds(round((time.time() + timeout_s) * 1e6))
    return deadline
