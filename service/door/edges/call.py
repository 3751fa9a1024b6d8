"""A call over HTTP: a JSON body in, and an object or a stream of events out.

Requests run as for gRPC. While the prompt of a streamed answer waits or is prefilled, keep-alive lines, which
clients skip, stop proxies from closing the connection. The first keep-alive line also sends the HTTP status,
so a later error is sent as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from deltafront.service.door.edges.answering import Answering, OneAnswer
from deltafront.service.door.edges.edge import Asked, Edge, Json, ReplyContext
from deltafront.service.door.edges.errors import headers_of, rate_headers, status_of
from deltafront.service.door.edges.parts import AnswerSplitter, answer_splitters, reasoning_first
from deltafront.service.door.http_stream import EventStream, until_disconnect
from deltafront.service.door.json_body import NotJson
from deltafront.service.errors import Cancelled, DeltafrontError, InvalidArgument, Overloaded, TooSlow
from deltafront.service.request.answers import ChoiceEvent, RequestEvent
from deltafront.service.request.callers import Caller
from deltafront.service.request.calls import CompletionRequest, GenerateRequest
from deltafront.service.request.check import is_request_id
from deltafront.service.request.context import Accepted
from deltafront.service.request.handler import RequestHandler
from deltafront.workers.messages.events import Progress
from deltafront.workers.messages.service_tiers import LOWEST

KEEP_ALIVE_S = 5.0
"""The longest silence of a stream."""
REQUEST_ID = "x-request-id"
"""Serve's middleware returns this header to the client (`haproxy_config.py`)."""
_JSON_BYTES = 6
"""The most bytes that one character takes in JSON."""
_RECEIVE_S = 60.0
"""How long a client may take to send a request."""
_IDLE_S = 10.0
"""How long a client may pause while it sends a request."""
_JSON = "application/json"

Work = Callable[[RequestHandler, Accepted, bytes], Awaitable[Json]]
"""A function that makes the answer to a body."""
Events = AsyncIterator[RequestEvent | None]


@dataclass
class Exchange:
    """One request over HTTP. `arrived`: true if the body has arrived. `stream`: set for a streamed answer."""

    request: Request
    request_id: str
    send: Send
    arrived: bool = False
    stream: EventStream | None = None
    answering: Answering | None = None
    accepted: Accepted | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers of a caller's limits; none without limits."""
        return {} if self.accepted is None else rate_headers(self.accepted.use.rates)

    def fail(self, error: DeltafrontError) -> Iterable[Json]:
        """Abandon the answer after an error. Returns the objects that end its stream."""
        return () if self.answering is None else self.answering.fail(error)

    async def respond(self, content: Json) -> None:
        """Send an object. A thread serialises it, because half a million tokens take long."""
        await self.respond_with(await asyncio.to_thread(JSONResponse, content, 200, self.headers()))

    async def respond_with(self, response: Response) -> None:
        await response(self.request.scope, self.request.receive, self.send)


@dataclass(frozen=True)
class EdgeCall:
    """The ASGI application of one endpoint.

    Args:
        rpc: The name in metrics and the audit log.
        keep_alive_s: Longest silence of a stream, in seconds.
    """

    edge: Edge
    requests: RequestHandler
    max_body_bytes: int
    keep_alive_s: float = KEEP_ALIVE_S
    rpc: str = "Generate"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        exchange = Exchange(request, request_id_of(request), send)
        try:
            async with self.requests.accept(
                self.rpc, request.headers.items(), request_id=exchange.request_id
            ) as accepted:
                exchange.accepted = accepted
                try:
                    await self._serve(exchange, accepted)
                except ClientDisconnect:  # there is no client to tell
                    exchange.fail(Cancelled("the client left"))
        except DeltafrontError as error:
            await self._fail(exchange, error)

    async def _serve(self, exchange: Exchange, accepted: Accepted) -> None:
        asked = await self._read(await self.body(exchange, accepted), accepted.caller.owner)
        generate = self._request(asked, exchange.request_id)
        exchange.answering = answering = await self._answering(asked, generate, accepted.text.size)
        stream, progress = asked.stream, asked.include_progress
        events = self.requests.run(accepted, generate)
        del asked, generate  # free the text once it is tokenised
        watched = until_disconnect(events, exchange.request.receive, self.keep_alive_s)
        async with contextlib.aclosing(watched):
            if stream:
                edge = self.edge
                exchange.stream = EventStream(exchange.send, progress, edge.named_events, exchange.headers())
                await _stream(answering, watched, exchange.stream)
                if edge.ends_with:
                    await exchange.stream.write(edge.ends_with)
                await exchange.stream.end()
            else:
                await exchange.respond(await _answer(answering, watched))

    async def answer(self, caller: Caller, body: bytes, request_id: str) -> Json:
        """Answer a body that no client waits for, at the lowest service tier. Raises DeltafrontError."""
        async with self.requests.accept(self.rpc, (), request_id=request_id, known=caller) as accepted:
            self._check_length(len(body))
            accepted.text.grow(len(body))
            asked = await self._read(body, caller.owner)
            if asked.stream:
                raise InvalidArgument("stream", "is not for batches: leave it out")
            generate = replace(self._request(asked, request_id), service_tier=LOWEST)
            answering = await self._answering(asked, generate, accepted.text.size)
            try:
                async with contextlib.aclosing(self.requests.run(accepted, generate)) as events:
                    return await _answer(answering, events)
            except DeltafrontError as error:
                answering.fail(error)
                raise

    def _request(self, asked: Asked, request_id: str) -> GenerateRequest:
        generate = replace(asked.request, request_id=request_id)
        reasons = self.edge.splits and self.requests.marks_reasoning
        return reasoning_first(generate) if reasons else generate

    async def _answering(self, asked: Asked, request: GenerateRequest, size: int) -> Answering:
        count = request.answers if isinstance(request, CompletionRequest) else 1
        reasoning = self.edge.splits and self.requests.marks_reasoning
        splitters = await answer_splitters(self.requests, request, size, reasoning=reasoning, answers=count)
        answers = [self._one(asked, request, splitter, at) for at, splitter in enumerate(splitters)]
        return answers[0] if asked.several is None else asked.several(answers)

    def _one(self, asked: Asked, request: GenerateRequest, splitter: AnswerSplitter, index: int) -> OneAnswer:
        requests = self.requests
        context = ReplyContext(
            requests.model,
            requests.positions,
            request.request_id,
            splitter,
            lambda: requests.token_bytes,
            index,
        )
        return OneAnswer(asked.reply(context), splitter)

    async def _read(self, body: bytes, owner: str) -> Asked:
        """Parse the body in a thread, because a large one takes long. Raises InvalidArgument or NotFound."""
        work = self.requests.text_budget.work
        return await work(len(body), lambda _: self.edge.read(body, self.requests.model, owner))

    async def _fail(self, exchange: Exchange, error: DeltafrontError) -> None:
        events = exchange.fail(error)
        if exchange.stream is not None and exchange.stream.started:
            await exchange.stream.send_json(events)
            await exchange.stream.end()
            return
        content = self.edge.error(error, self.requests.positions, exchange.request_id)
        response = JSONResponse(content, status_of(error), headers_of(error))
        if not exchange.arrived:  # no client waits for the rest
            response.headers["connection"] = "close"
        await exchange.respond_with(response)

    async def body(self, exchange: Exchange, accepted: Accepted) -> bytes:
        """Receive the body. Raises Overloaded, TooSlow or Cancelled."""
        request, held = exchange.request, accepted.text
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
        exchange.arrived = True
        accepted.clock.restart()
        return b"".join(body)

    def _check_length(self, size: int) -> None:
        limit = min(self.max_body_bytes, _JSON_BYTES * self.requests.max_request_bytes)
        if size > limit:
            raise Overloaded(f"the request is longer than {limit} bytes")


@dataclass(frozen=True)
class UnaryCall(EdgeCall):
    """An endpoint whose answer is one object, made without a worker."""

    work: Work | None = None

    async def _serve(self, exchange: Exchange, accepted: Accepted) -> None:
        assert self.work is not None
        await exchange.respond(await self.work(self.requests, accepted, await self.body(exchange, accepted)))


async def _answer(answering: Answering, events: Events) -> Json:
    async for event in events:
        if event is not None:
            answering.take(event)
    return answering.whole()


async def _stream(answering: Answering, events: Events, stream: EventStream) -> None:
    async for event in events:
        inner = event.event if isinstance(event, ChoiceEvent) else event
        if event is None:
            await stream.skipped("waiting")
        elif isinstance(inner, Progress) and inner.expected_first_token_seconds:
            await stream.expect(inner.expected_first_token_seconds)
        elif isinstance(inner, Progress):
            await stream.progress(inner)
        else:
            await stream.send_json(answering.chunks(event))


def request_id_of(request: Request) -> str:
    """Return the request id of the caller or of Serve's middleware; without either, a new one."""
    given = request.headers.get(REQUEST_ID, "")
    return given if given and is_request_id(given) else uuid.uuid4().hex


def _check_type(content_type: str) -> None:
    """Refuse content types that web pages may send to any server without a CORS preflight. Raises NotJson."""
    if content_type.partition(";")[0].strip().lower() != _JSON:
        raise NotJson(content_type)
