"""The synchronous client.

with DeltafrontClient("127.0.0.1:9000") as client:
    for event in client.generate("Once upon a time", max_tokens=32):
        ...
"""

from __future__ import annotations

import operator
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from ...protos.v1 import deltafront_pb2 as pb
from ...protos.v1 import deltafront_pb2_grpc as pb_grpc
from ...workers.messages.events import Progress, Token
from ...workers.messages.requests import PageSelection
from ..door import wire
from ..door.status import from_status, is_ours
from ..errors import Cancelled, ConnectionLost, DeltafrontError, InvalidArgument, NotFound, Unavailable
from ..request import calls
from ..request.answers import GenerateFinished, PrefillFinished, ServerInfo
from .endpoint import Tls, check_address, wrong_endpoint
from .retries import Retries

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or messages ({"role": …, "content": …})."""

_CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # this limits how long connecting may take
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Pings find a machine that is gone. Servers accept one in 5 minutes.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # any number
)
_UNREACHABLE = ("failed to connect", "errors resolving", "name resolution", "dns resolution")
"""Parts of gRPC's messages, which differ by version."""


class DeltafrontClient:
    """Calls a server. Methods raise subclasses of DeltafrontError. Closing an iterator cancels its request.

    After a lost connection a request goes on where its answer stopped. A server that never answered is
    Unavailable at once. One whose machine is gone is noticed after 6 minutes of silence.

    Args:
        token: A bearer token; by default DELTAFRONT_TOKEN.
        tls: The address speaks TLS. True takes the environment's files.
        retry_s: How long to retry without an answer; 0 raises ConnectionLost at once.

    Raises:
        InvalidArgument: The address is not host:port, or no header can hold the token.
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
        self._answered = self._closed = False
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

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel. Running requests raise Cancelled."""
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
        retain_s: float | None = None,
        skip_cache: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens: str = "text",
    ) -> Iterator[Progress | PrefillFinished]:
        """Read a prompt and keep it as a session.

        Args:
            cache_salt: K/V is shared only with requests of the same salt.
            retain_s: A hint to remember the prompt for this number of seconds; 0: not at all.
            skip_cache: Read all of the prompt, whatever is remembered of it.
            chat_template_kwargs: Variables of the template for messages.
            special_tokens: `parse` reads control tokens in text, but never in messages.
        """
        request = calls.PrefillRequest(
            prompt=_prompt(prompt, special_tokens, variables=chat_template_kwargs),
            attention=calls.AttentionMethod(method, options or {}),
            session_ttl=session_ttl_s,
            deadline=_deadline(timeout_s),
            request_id=request_id or uuid.uuid4().hex,
            cache_salt=cache_salt,
            retain_s=retain_s,
            skip_cache=skip_cache,
        )
        yield from self._stream(self._stub.Prefill, wire.write(pb.PrefillRequest, request), request.deadline)

    def generate(
        self,
        prompt: PromptLike | None = None,
        *,
        session_id: str | None = None,
        append: PromptLike | None = None,
        method: str = "",
        options: Mapping[str, float] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        page_selection: str = "",
        recompute_blocks: int | None = None,
        session_ttl_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        cache_salt: str = "",
        retain_s: float | None = None,
        skip_cache: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens: str = "text",
    ) -> Iterator[Progress | Token | GenerateFinished]:
        """Answer a prompt, or a session plus `append`. More arguments are at `prefill`.

        Args:
            recompute_blocks: Blocks of a sparse prompt that are computed again densely; None: the server's
                default.
        """
        if page_selection not in list(PageSelection):
            raise InvalidArgument("page_selection", f"{page_selection!r} is not full or delta")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = calls.SamplingParams(
            temperature, top_p, top_k, seed, stop=stops, max_tokens=max_tokens, ignore_eos=ignore_eos
        )
        parse = partial(_prompt, special_tokens=special_tokens, variables=chat_template_kwargs)
        request = calls.GenerateRequest(
            prompt=None if prompt is None else parse(prompt),
            session_id=session_id,
            append=None if append is None else parse(append, name="append"),
            attention=calls.AttentionMethod(method, options or {}),
            sampling=sampling,
            page_selection=PageSelection(page_selection),
            recompute_blocks=recompute_blocks,
            session_ttl=session_ttl_s,
            deadline=_deadline(timeout_s),
            request_id=request_id or uuid.uuid4().hex,
            cache_salt=cache_salt,
            retain_s=retain_s,
            skip_cache=skip_cache,
        )
        yield from self._stream(self._stub.Generate, wire.generate_request(request), request.deadline)

    def release(self, session_id: str) -> None:
        """Free a session's pages now. Raises NotFound."""
        request = wire.fill_message(pb.ReleaseSessionRequest, session_id=session_id)
        retries = Retries(self._retry_s, None)
        try:
            self._call(self._stub.ReleaseSession, request, retries)
        except NotFound:
            if not retries.retried:  # otherwise the first try may have released it
                raise

    def cancel(self, request_id: str) -> int:
        """Cancel all requests of this token with this id. Returns their number."""
        request = wire.fill_message(pb.CancelRequestRequest, request_id=request_id)
        answer = self._call(self._stub.CancelRequest, request)
        return int(answer.requests)

    def info(self) -> ServerInfo:
        return wire.read(self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest()))  # type: ignore[no-any-return]

    def _call(self, rpc: Any, request: Any, retries: Retries | None = None) -> Any:
        retries = retries or Retries(self._retry_s, None)
        while True:
            try:
                answer = rpc(request, metadata=self._metadata)
                self._answered = True
                return answer
            except grpc.RpcError as error:
                retries.wait(self._translate(error))

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
                retries.wait(error)
            if answered:
                request.answered_ids = calls.pack_ids(answered)

    def _stream_once(self, rpc: Any, request: Any, deadline: float | None) -> Iterator[Any]:
        # The server enforces the deadline and says in which phase it passed. gRPC's is only a safety net.
        timeout = None if deadline is None else max(deadline - time.time(), 0.0) + 5.0
        stream, complete = rpc(request, metadata=self._metadata, timeout=timeout), False
        try:
            for response in stream:
                self._answered = True
                if (event := wire.read_response(response)) is not None:
                    complete = isinstance(event, PrefillFinished | GenerateFinished)
                    yield event
        except grpc.RpcError as error:
            if not complete:
                raise self._translate(error) from None
        finally:
            stream.cancel()
        if not complete:
            raise ConnectionLost("the stream ended before its last event")

    def _translate(self, error: Any) -> DeltafrontError:
        details = error.details() or ""
        if self._closed:
            return Cancelled("the client was closed")
        metadata = error.trailing_metadata() or ()
        translated = from_status(error.code(), details, metadata)
        if not self._answered and not is_ours(metadata) and (wrong := wrong_endpoint(self._address, details)):
            return wrong
        if not isinstance(translated, ConnectionLost):
            self._answered = True
        elif not self._answered and any(words in details.lower() for words in _UNREACHABLE):
            hint = " (does it speak TLS?)" if "socket closed" in details.lower() else ""
            return Unavailable(f"{self._address} cannot be reached{hint}: {details}")
        return translated


def _prompt(
    prompt: PromptLike, special_tokens: str, name: str = "prompt", variables: Mapping[str, Any] | None = None
) -> calls.Prompt:
    """Make a prompt. Raises InvalidArgument for a list of anything but ids or whole messages."""
    if special_tokens not in list(calls.SpecialTokens):
        raise InvalidArgument("special_tokens", f"{special_tokens!r} is not text or parse")
    if isinstance(prompt, str):
        return calls.Prompt(text=prompt, special_tokens=calls.SpecialTokens(special_tokens))
    if isinstance(prompt, bytes | bytearray):
        raise InvalidArgument(name, "is bytes: decode a text, and give token ids as numbers")
    parts = list(prompt)
    messages = tuple(part for part in parts if isinstance(part, Mapping))
    if messages:
        if len(messages) < len(parts):
            raise InvalidArgument(f"{name}.messages", "holds something else beside messages")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise InvalidArgument(f"{name}.messages[{index}].{key}", "must be text")
            for key, value in message.items():
                if value is not None and key not in ("role", "content"):
                    raise InvalidArgument(f"{name}.messages[{index}].{key}", "must be left out")
        return calls.Prompt(messages=messages, chat_template_kwargs=variables or {})
    try:
        return calls.Prompt(token_ids=calls.pack_ids([operator.index(part) for part in parts]))  # type: ignore[arg-type]
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"{name}.token_ids", f"{error}: give whole numbers from 0 on") from None


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.time() + timeout_s
