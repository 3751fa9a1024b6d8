"""The HTTP port: OpenAI's and Anthropic's endpoints, models, and /health for probes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deltafront.service.door.anthropic.answers import MESSAGES, count_tokens
from deltafront.service.door.batches.routes import BatchDoor, BatchOptions
from deltafront.service.door.edges.call import (
    KEEP_ALIVE_S,
    REQUEST_ID,
    EdgeCall,
    UnaryCall,
    request_id_of,
)
from deltafront.service.door.edges.errors import RATE_HEADERS, FieldNames, headers_of, status_of
from deltafront.service.door.http_stream import EXPECTED_HEADER, answer_http_1_0_without_chunks
from deltafront.service.door.json_body import UnknownModel
from deltafront.service.door.openai.answers import CHAT, TEXT, model_card
from deltafront.service.door.openai.errors import error_body, error_object
from deltafront.service.door.openai.tokens import detokenize, tokenize
from deltafront.service.door.page import page
from deltafront.service.door.responses.answers import ResponsesEdge
from deltafront.service.door.responses.call import ResponsesCall
from deltafront.service.door.responses.store import (
    Elsewhere,
    ResponseStore,
    UnknownResponse,
    nowhere_else,
)
from deltafront.service.errors import DeltafrontError, InvalidArgument, Unavailable
from deltafront.service.request.answers import ServerInfo
from deltafront.service.request.handler import RequestHandler

_ADVICE = {
    "/v1/embeddings": "this server generates text, and makes no embeddings",
    "/v1/audio/": "this server reads and writes text, and no audio",
    "/v1/images/": "this server reads and writes text, and no images",
    **dict.fromkeys(
        ("/v1/files/", "/v1/batches/"),
        "files and batches are off: set door.batches to a folder, or to a URL such as s3://bucket/folder",
    ),
    "/metrics/": "Prometheus metrics have a port of their own (door.metrics_port): see `deltafront info`",
}
"""Advice for the beginnings of paths that are not served."""
_MODEL = FieldNames("model", ())


class HttpDoor:
    """Makes the ASGI application.

    Args:
        max_body_bytes: Maximum size of a request body.
        keep_alive_s: Longest silence of a stream, in seconds.
        origins: Web origins that may call (CORS); `*` for all.
        response_store_bytes: Bytes of responses that are kept for `previous_response_id`.
        elsewhere: Finds responses that other doors keep.
        has_page: True if `/` serves a web page.
        batches: How to serve files and batches; None: they are not served.
    """

    def __init__(
        self,
        requests: RequestHandler,
        max_body_bytes: int,
        keep_alive_s: float = KEEP_ALIVE_S,
        origins: Sequence[str] = (),
        response_store_bytes: int = 1 << 28,
        elsewhere: Elsewhere = nowhere_else,
        has_page: bool = True,
        batches: BatchOptions | None = None,
    ) -> None:
        answer_http_1_0_without_chunks()
        self._requests = requests
        self._started = int(time.time())
        chat, text, messages = (
            EdgeCall(edge, requests, max_body_bytes, keep_alive_s) for edge in (CHAT, TEXT, MESSAGES)
        )
        self.responses, self._elsewhere = ResponseStore(response_store_bytes), elsewhere
        responses = ResponsesCall(
            ResponsesEdge(self.responses), requests, max_body_bytes, keep_alive_s, elsewhere=elsewhere
        )
        count, tokens, words = (
            UnaryCall(edge, requests, max_body_bytes, rpc="Tokenize", work=work)
            for edge, work in ((MESSAGES, count_tokens), (TEXT, tokenize), (TEXT, detokenize))
        )
        of_lines = {"/v1/chat/completions": chat, "/v1/completions": text, "/v1/responses": responses}
        batch_door = None if batches is None else BatchDoor(batches, requests, of_lines, max_body_bytes)
        self.batches = None if batch_door is None else batch_door.runner
        self.app: ASGIApp = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/completions", text, methods=["POST"]),
                Route("/v1/responses", responses, methods=["POST"]),
                Route("/v1/responses/{response_id}", self._response, methods=["GET", "DELETE"]),
                Route("/v1/messages", messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", count, methods=["POST"]),
                *(batch_door.routes() if batch_door else []),
                Route("/tokenize", tokens, methods=["POST"]),
                Route("/detokenize", words, methods=["POST"]),
                Route("/health", self._health),
                Route("/ping", self._health),
                Route("/version", self._version),
                *([Route("/", page(), methods=["GET"])] if has_page else []),
            ],
            middleware=[*_for_pages_of(origins), Middleware(_StripTrailingSlash)],
            exception_handlers={DeltafrontError: self._models_error, HTTPException: _not_served},
        )

    async def _health(self, _request: Request) -> Response:
        """Answer a probe. Like gRPC's health check, this needs no token."""
        if not self._requests.ready:
            missing = Unavailable("workers are missing: the server is starting, or one died")
            return _error_response(missing, self._requests.positions)
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": (await self._info(request)).version})

    async def _response(self, request: Request) -> Response:
        """Return or delete a stored response."""
        headers, number = request.headers.items(), request.path_params["response_id"]
        accepting = self._requests.accept(
            "StoredResponse", headers, request_id=request_id_of(request), counted=False
        )
        async with accepting as accepted:
            owner, drop = accepted.caller.owner, request.method == "DELETE"
            if request.query_params.get("stream", "").lower() == "true":
                raise InvalidArgument("stream", "is not supported for a stored response: leave it out")
            found = self.responses.take(number, owner, drop) or await self._elsewhere(number, owner, drop)
            if found is None:
                raise UnknownResponse(number)
        gone = {"id": number, "object": "response", "deleted": True}
        return await asyncio.to_thread(JSONResponse, gone if drop else found.response)

    async def _models(self, request: Request) -> Response:
        info = await self._info(request)
        return JSONResponse({"object": "list", "data": [model_card(info, self._started)]})

    async def _model(self, request: Request) -> Response:
        info, wanted = await self._info(request), request.path_params["model"]
        if info.model != wanted:
            raise UnknownModel(wanted, info.model)
        return JSONResponse(model_card(info, self._started))

    async def _models_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, DeltafrontError)
        response = _error_response(error, self._requests.positions)
        if request.method == "POST":  # no client waits for the rest of an upload
            response.headers["connection"] = "close"
        return response

    async def _info(self, request: Request) -> ServerInfo:
        headers, request_id = request.headers.items(), request_id_of(request)
        async with self._requests.accept("GetServerInfo", headers, request_id=request_id, counted=False):
            return await self._requests.server_info()


def _for_pages_of(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    pages = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID, EXPECTED_HEADER, "retry-after", "x-should-retry", *RATE_HEADERS],
    )
    return [pages]


def _error_response(error: DeltafrontError, positions: int) -> Response:
    return JSONResponse(error_body(error, _MODEL, positions), status_of(error), headers_of(error))


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, code = request.url.path, None
    if error.status_code == 404:
        paths = dict.fromkeys(route.path for route in request.app.routes)
        served = ", ".join(paths)
        unserved = (one for one in _ADVICE.items() if one[0].rstrip("/") not in paths)
        advice = (said for begin, said in unserved if f"{path}/".startswith(begin))
        hint = next(advice, f"there are {served}")
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
