"""OpenAI's HTTP API, and /health for probes.

Requests run as for gRPC. A streamed answer is server-sent events. While its prompt waits or is prefilled,
comment lines keep proxies from closing the connection. The first of them also sends the HTTP status, so a
later error is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deltafront.service.door.http_stream import EventStream, answer_http_1_0_without_chunks, until_disconnect
from deltafront.service.door.json_body import NotJson, UnknownModel
from deltafront.service.door.openai.answers import (
    CHAT,
    TEXT,
    Endpoint,
    Json,
    Reply,
    error_body,
    error_object,
    headers_of,
    model_card,
    status_of,
)
from deltafront.service.door.openai.requests import StreamOptions
from deltafront.service.door.reasoning import AnswerPart, ReasoningSplitter, is_open
from deltafront.service.errors import Cancelled, DeltafrontError, Overloaded, TooSlow, Unavailable
from deltafront.service.request.answers import GenerateFinished, RequestEvent, ServerInfo
from deltafront.service.request.calls import GenerateRequest
from deltafront.service.request.check import is_request_id
from deltafront.service.request.handler import RequestHandler, internal_error
from deltafront.service.request.text.text_budget import HeldText
from deltafront.service.request.text.tool_calls import ToolCallParser
from deltafront.workers.messages.events import Progress, Token, Usage

KEEP_ALIVE_S = 5.0
"""The longest silence of a stream."""
_ADVICE = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/embeddings": "this server generates text, and makes no embeddings",
}
"""Advice for OpenAI's paths that are not served."""

_JSON_BYTES = 6
"""The most bytes that one character takes in JSON."""
_RECEIVE_S = 60.0
"""How long a client may take to send a request."""
_IDLE_S = 10.0
"""How long a client may pause while it sends a request."""
_JSON = "application/json"
_REQUEST_ID = "x-request-id"
"""Serve's middleware returns this header to the client (`haproxy_config.py`)."""


class HttpDoor:
    """Makes the ASGI application.

    Args:
        max_body_bytes: Maximum size of a request body.
        keep_alive_s: Longest silence of a stream, in seconds.
        origins: Web origins that may call (CORS); `*` for all.
    """

    def __init__(
        self,
        requests: RequestHandler,
        max_body_bytes: int,
        keep_alive_s: float = KEEP_ALIVE_S,
        origins: Sequence[str] = (),
    ) -> None:
        answer_http_1_0_without_chunks()
        self._requests = requests
        self._started = int(time.time())
        chat, text = (_Completions(form, requests, max_body_bytes, keep_alive_s) for form in (CHAT, TEXT))
        self.app: ASGIApp = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/completions", text, methods=["POST"]),
                Route("/health", self._health),
                Route("/ping", self._health),
                Route("/version", self._version),
            ],
            middleware=[*_for_pages_of(origins), Middleware(_StripTrailingSlash)],
            exception_handlers={DeltafrontError: self._models_error, HTTPException: _not_served},
        )

    async def _health(self, _request: Request) -> Response:
        """Answer a probe. Like gRPC's health check, this needs no token."""
        if not self._requests.ready:
            missing = Unavailable("workers are missing: the server is starting, or one died")
            return _error_response(missing, "", self._requests.positions)
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": (await self._info(request)).version})

    async def _models(self, request: Request) -> Response:
        info = await self._info(request)
        return JSONResponse({"object": "list", "data": [model_card(info, self._started)]})

    async def _model(self, request: Request) -> Response:
        info, wanted = await self._info(request), request.path_params["model"]
        if info.model != wanted:
            raise UnknownModel(wanted, info.model)
        return JSONResponse(model_card(info, self._started))

    async def _models_error(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, DeltafrontError)
        return _error_response(error, "model", self._requests.positions)

    async def _info(self, request: Request) -> ServerInfo:
        headers, request_id = request.headers.items(), _request_id(request)
        async with self._requests.accept("GetServerInfo", headers, request_id=request_id, counted=False):
            return await self._requests.server_info()


@dataclass(frozen=True)
class _Completions:
    endpoint: Endpoint
    requests: RequestHandler
    max_body_bytes: int
    keep_alive_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request_id, positions, arrived = _request_id(request), self.requests.positions, False
        reply = Reply(self.endpoint, self.requests.model, positions, self.endpoint.prefix + request_id)
        try:
            async with self.requests.accept(
                "Generate", request.headers.items(), request_id=request_id
            ) as accepted:
                body = await self._body(request, accepted.text)
                arrived = True
                accepted.clock.restart()
                generate, options = await self._read(body, reply)
                generate = replace(generate, request_id=request_id)
                if self.requests.marks_reasoning and self.endpoint is CHAT:
                    opening = await asyncio.to_thread(self.requests.generation_prompt, generate)
                    reply = replace(reply, reasoning=ReasoningSplitter(is_open(opening)))
                form = self.requests.tool_format if generate.tools is not None else None
                if form is not None:
                    reply = replace(reply, calls=ToolCallParser(form))
                if generate.sampling.top_logprobs is not None:
                    made = self.endpoint.logprobs(self.requests.token_bytes, generate.sampling.top_logprobs)
                    reply = replace(reply, logprobs=made)
                events = self.requests.run(accepted, generate)
                del body, generate  # free the text once it is tokenised
                watched = until_disconnect(events, receive, self.keep_alive_s)
                with contextlib.suppress(ClientDisconnect):  # there is no client to tell
                    async with contextlib.aclosing(watched):
                        if options is not None:
                            stream = EventStream(send, options.include_progress)
                            await _stream(reply, options, watched, stream)
                        else:
                            await JSONResponse(await _answer(reply, watched))(scope, receive, send)
        except DeltafrontError as error:
            response = _error_response(error, self.endpoint.source, positions)
            if not arrived:  # no client waits for the rest
                response.headers["connection"] = "close"
            await response(scope, receive, send)

    async def _read(self, body: bytes, reply: Reply) -> tuple[GenerateRequest, StreamOptions | None]:
        """Parse the body in a thread, because a large one takes long. Raises InvalidArgument or
        UnknownModel."""
        work = self.requests.text_budget.work
        return await work(len(body), lambda _: self.endpoint.read(body, reply.model))

    async def _body(self, request: Request, held: HeldText) -> bytes:
        """Receive the body. Raises Overloaded, TooSlow or Cancelled."""
        _check_type(request.headers.get("content-type", ""))
        length, body, size = request.headers.get("content-length", ""), list[bytes](), 0
        self._check_length(int(length) if length.isdecimal() else 0)
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(_RECEIVE_S), asyncio.timeout(_IDLE_S) as idle:
                async for part in request.stream():
                    idle.reschedule(clock() + _IDLE_S)
                    size += len(part)
                    self._check_length(size)
                    held.grow(size)
                    body.append(part)
        except TimeoutError:
            late = f"the request did not arrive within {_RECEIVE_S:.0f} s"
            silent = f"nothing of the request arrived for {_IDLE_S:.0f} s"
            raise TooSlow(silent if idle.expired() else late) from None
        except ClientDisconnect:
            raise Cancelled("the client left while it sent the request") from None
        return b"".join(body)

    def _check_length(self, size: int) -> None:
        limit = min(self.max_body_bytes, _JSON_BYTES * self.requests.max_request_bytes)
        if size > limit:
            raise Overloaded(f"the request is longer than {limit} bytes")


async def _answer(reply: Reply, events: AsyncIterator[RequestEvent | None]) -> Json:
    parts, answer = list[AnswerPart](), Json()
    async for event in events:
        if isinstance(event, Token):
            parts += reply.token_parts(event)
        elif isinstance(event, GenerateFinished):
            answer = reply.answer(parts, event)
    return answer


async def _stream(
    reply: Reply, options: StreamOptions, events: AsyncIterator[RequestEvent | None], stream: EventStream
) -> None:
    """Send an answer as a stream. Raises DeltafrontError for an error before the first byte."""
    usage = None
    try:
        async for event in events:
            if event is None:
                await stream.skipped("waiting")
            elif isinstance(event, Progress):
                await stream.skipped(f"read {event.tokens_done} of {event.tokens_total} tokens")
            elif isinstance(event, Usage):
                usage = event if options.continuous_usage_stats else None
                await stream.send_json(reply.first_chunks(usage))
            elif isinstance(event, Token):
                usage = usage and replace(usage, completion_tokens=event.index + 1)
                await stream.send_json(reply.chunks(reply.token_parts(event), usage))
            elif isinstance(event, GenerateFinished):
                await stream.send_json(reply.last_chunks(event, options))
        await stream.write(b"data: [DONE]\n\n")
    except ClientDisconnect:
        raise
    except Exception as error:
        if not stream.started:
            raise
        told = error if isinstance(error, DeltafrontError) else internal_error()
        await stream.send_json([error_body(told, reply.endpoint.source, reply.positions)])
    await stream.end()


def _request_id(request: Request) -> str:
    """Return the request id of the caller or of Serve's middleware; without either, a new one."""
    given = request.headers.get(_REQUEST_ID, "")
    return given if given and is_request_id(given) else uuid.uuid4().hex


def _check_type(content_type: str) -> None:
    """Refuse content types that a web page may send to any server without a CORS preflight. Raises
    NotJson."""
    if content_type.partition(";")[0].strip().lower() != _JSON:
        raise NotJson(content_type)


def _for_pages_of(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    pages = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[_REQUEST_ID, "retry-after", "x-should-retry"],
    )
    return [pages]


def _error_response(error: DeltafrontError, source: str, positions: int) -> Response:
    return JSONResponse(error_body(error, source, positions), status_of(error), headers_of(error))


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, code = request.url.path, None
    if error.status_code == 404:
        served = ", ".join(route.path for route in request.app.routes)
        hint = _ADVICE.get(path, f"there are {served}")
        message, code = f"{request.method} {path} is not served here: {hint}", "unknown_url"
    elif error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        message = f"{request.method} is not what {path} takes: use {allowed}"
    else:
        message = error.detail
    return JSONResponse(error_object(message, code=code), error.status_code, error.headers)


class _StripTrailingSlash:
    """Serves `/v1/models/` as `/v1/models`. A redirect would be wrong behind a proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if len(path) > 1 and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)
