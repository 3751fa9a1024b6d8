"""A small synchronous client: plain Python in, plain Python out, one exception tree.

with DeltafrontClient("127.0.0.1:9000") as client:
    for event in client.generate("Once upon a time", max_tokens=32):
        ...
"""

from __future__ import annotations

import operator
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import grpc

from ...protos.v1 import deltafront_pb2 as pb
from ...protos.v1 import deltafront_pb2_grpc as pb_grpc
from ...workers.messages.events import Progress, Token
from ...workers.messages.requests import PageSelection
from ..door import wire
from ..door.status import from_status, is_ours
from ..errors import Cancelled, ConnectionLost, DeltafrontError, InvalidArgument, NotFound, Unavailable
from ..request.answers import GenerateFinished, PrefillFinished, ServerInfo
from ..request.calls import (
    GenerateRequest,
    PrefillRequest,
    Prompt,
    SamplingParams,
    SpecialTokens,
    pack_ids,
)
from .address import check_address, mistaken
from .credentials import Tls
from .losses import Losses

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages ({"role": …, "content": …})."""

_CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # in fact how long a connection may take to come about
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A server whose machine is gone closes nothing. Servers take a ping each 5 minutes, and not more.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # any number
)
_NOBODY = ("failed to connect", "errors resolving", "name resolution", "dns resolution")
"""In gRPC's words, which differ by its version: nothing listens at the address, or there is none."""


class DeltafrontClient:
    """Raises subclasses of DeltafrontError with code, message and retry_after_s.

    token: a bearer token; default: the environment's DELTAFRONT_TOKEN. tls: the address speaks TLS;
    True: with the environment's files. Closing an iterator early cancels its request on the server.

    When the connection is lost (a door died), a request is sent again, with what its answer has brought so
    far, and goes on where it stopped: for up to retry_s seconds in which nothing is heard, and within
    timeout_s. 0 raises ConnectionLost at once. An address where nobody ever answered is Unavailable at once.
    That a server's machine is gone shows after 6 minutes of silence. Raises InvalidArgument for an address
    that is not host:port, and for a token that no header can hold.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9000",
        token: str | None = None,
        *,
        tls: bool | Tls = False,
        retry_s: float = 30.0,
    ) -> None:
        self._address, self._retry_s = address, retry_s
        self._heard = self._closed = False
        check_address(address)
        token = os.environ.get("DELTAFRONT_TOKEN") if token is None else token
        if token and not (token.isascii() and token.isprintable()):
            raise InvalidArgument("token", "must be printable ASCII, as a header is")
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        files = Tls.from_environment() if tls is True else tls
        self._channel = (
            grpc.secure_channel(address, files.credentials(), _CHANNEL)
            if files
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
        """Running requests end as Cancelled."""
        self._closed = True
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
        cache_salt: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens: str = "text",
    ) -> Iterator[Progress | PrefillFinished]:
        """Read a prompt and keep it. timeout_s: until the server gives up. cache_salt: what was read is
        shared only with requests of the same one. chat_template_kwargs: variables of the chat template that
        renders messages. special_tokens: `parse` takes control tokens that a text spells for these; they are
        text otherwise, as in messages."""
        request = PrefillRequest(
            prompt=_prompt(prompt, special_tokens, variables=chat_template_kwargs),
            method=method,
            options=options or {},
            session_ttl_s=session_ttl_s,
            deadline=_deadline(timeout_s),
            request_id=request_id or uuid.uuid4().hex,
            cache_salt=cache_salt,
        )
        sent = wire.prefill_request(request)
        read = wire.read_prefill_response
        yield from self._stream(self._stub.Prefill, lambda _: sent, read, request.deadline)

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
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        page_selection: str = "",
        recompute_blocks: int | None = None,
        session_ttl_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        cache_salt: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens: str = "text",
    ) -> Iterator[Progress | Token | GenerateFinished]:
        """Answer a prompt, or a session plus `append`. recompute_blocks: of what was read with a sparse
        method, so many blocks of 128 tokens are computed again with dense attention, those that the question
        looks at most; None: the server's default. stop: one string or several. cache_salt,
        chat_template_kwargs: as for `prefill`. special_tokens: as there, for `append` too."""
        if page_selection not in list(PageSelection):
            raise InvalidArgument("page_selection", f"{page_selection!r} is not full or delta")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        request = GenerateRequest(
            prompt=None
            if prompt is None
            else _prompt(prompt, special_tokens, variables=chat_template_kwargs),
            session_id=session_id,
            append=None
            if append is None
            else _prompt(append, special_tokens, "append", chat_template_kwargs),
            method=method,
            options=options or {},
            sampling=SamplingParams(temperature, top_p, top_k, seed, stops, max_tokens, ignore_eos),
            page_selection=PageSelection(page_selection),
            recompute_blocks=recompute_blocks,
            session_ttl_s=session_ttl_s,
            deadline=_deadline(timeout_s),
            request_id=request_id or uuid.uuid4().hex,
            cache_salt=cache_salt,
        )

        def sent(answered: list[int]) -> pb.GenerateRequest:
            return wire.generate_request(replace(request, answered_ids=pack_ids(answered)))

        yield from self._stream(self._stub.Generate, sent, wire.read_generate_response, request.deadline)

    def release(self, session_id: str) -> None:
        """Free a session's pages now. Raises NotFound."""
        request = wire.fill_message(pb.ReleaseSessionRequest, session_id=session_id)
        losses = Losses(self._retry_s, None)
        try:
            self._ask(self._stub.ReleaseSession, request, losses)
        except NotFound:
            if not losses.any:  # otherwise the call that got no answer may have done it
                raise

    def cancel(self, request_id: str) -> int:
        """End the running requests of this id, whoever started them with this token; how many there were."""
        request = wire.fill_message(pb.CancelRequestRequest, request_id=request_id)
        answer = self._ask(self._stub.CancelRequest, request)
        return int(answer.requests)

    def info(self) -> ServerInfo:
        return wire.read_server_info(self._ask(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    def _ask(self, call: Any, request: Any, losses: Losses | None = None) -> Any:
        """A call that may be made twice."""
        losses = losses or Losses(self._retry_s, None)
        while True:
            try:
                answer = call(request, metadata=self._metadata)
                self._heard = True
                return answer
            except grpc.RpcError as error:
                losses.pause(self._translated(error))

    def _stream(
        self,
        call: Any,
        request: Callable[[list[int]], Any],
        read: Callable[[Any], Any],
        deadline: float | None,
    ) -> Iterator[Any]:
        """The events of a request, however often its connection is lost. request: the message, given the
        tokens that have arrived."""
        losses, answered = Losses(self._retry_s, deadline), list[int]()
        while True:
            try:
                for event in self._once(call, request(answered), read, deadline):
                    losses.heard()
                    if isinstance(event, Token):
                        answered.append(event.token_id)
                    yield event
                return
            except DeltafrontError as error:
                losses.pause(error)

    def _once(
        self, call: Any, request: Any, read: Callable[[Any], Any], deadline: float | None
    ) -> Iterator[Any]:
        """The events of one try. Raises ConnectionLost if it ends without its last one."""
        # The server enforces the deadline and says which phase it hit; gRPC's own is only a safety net.
        patience = None if deadline is None else max(deadline - time.time(), 0.0) + 5.0
        stream, complete = call(request, metadata=self._metadata, timeout=patience), False
        try:
            for response in stream:
                self._heard = True
                if (event := read(response)) is not None:
                    complete = isinstance(event, PrefillFinished | GenerateFinished)
                    yield event
        except grpc.RpcError as error:
            if not complete:
                raise self._translated(error) from None
        finally:
            stream.cancel()
        if not complete:
            raise ConnectionLost("the stream ended before its last event")

    def _translated(self, error: Any) -> DeltafrontError:
        details = error.details() or ""
        if self._closed:
            return Cancelled("the client was closed")
        metadata = error.trailing_metadata() or ()
        found = from_status(error.code(), details, metadata)
        if not self._heard and not is_ours(metadata) and (wrong := mistaken(self._address, details)):
            return wrong
        if not isinstance(found, ConnectionLost):
            self._heard = True
        elif not self._heard and any(words in details.lower() for words in _NOBODY):
            hint = " (does it speak TLS?)" if "socket closed" in details.lower() else ""
            return Unavailable(f"{self._address} cannot be reached{hint}: {details}")
        return found


def _prompt(
    prompt: PromptLike, special_tokens: str, name: str = "prompt", variables: Mapping[str, Any] | None = None
) -> Prompt:
    """Raises InvalidArgument for a list that holds anything but ids or anything but whole messages. name: of
    the field. variables: of the template that renders messages."""
    if special_tokens not in list(SpecialTokens):
        raise InvalidArgument("special_tokens", f"{special_tokens!r} is not text or parse")
    if isinstance(prompt, str):
        return Prompt(text=prompt, special_tokens=SpecialTokens(special_tokens))
    if isinstance(prompt, bytes | bytearray):
        raise InvalidArgument(name, "is bytes: decode a text, and give token ids as numbers")
    parts = list(prompt)
    messages = tuple(one for one in parts if isinstance(one, Mapping))
    if messages:
        if len(messages) < len(parts):
            raise InvalidArgument(f"{name}.messages", "holds something else beside messages")
        for place, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise InvalidArgument(f"{name}.messages[{place}].{key}", "must be text")
            for key, value in message.items():
                if value is not None and key not in ("role", "content"):
                    raise InvalidArgument(f"{name}.messages[{place}].{key}", "must be left out")
        return Prompt(messages=messages, chat_template_kwargs=variables or {})
    try:
        return Prompt(token_ids=pack_ids([operator.index(one) for one in parts]))  # type: ignore[arg-type]
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"{name}.token_ids", f"{error}: give whole numbers from 0 on") from None


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.time() + timeout_s
