"""OpenAI's answers: objects, chunks of a stream, and errors with their HTTP statuses.

Session, timings and density are under `deltafront`, named as in the gRPC contract.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deltafront.service.door.json_body import NotJson, UnknownModel
from deltafront.service.door.openai.logprobs import ChatLogprobs, Logprobs, TextLogprobs
from deltafront.service.door.openai.requests import StreamOptions, read_chat, read_text
from deltafront.service.door.reasoning import AnswerPart, ReasoningSplitter
from deltafront.service.errors import (
    Code,
    DeadlineExceeded,
    DeltafrontError,
    InvalidArgument,
    Overloaded,
    TooLong,
    TooSlow,
)
from deltafront.service.request.answers import GenerateFinished, ServerInfo
from deltafront.service.request.calls import GenerateRequest
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.service.request.text.tool_calls import CallPart, ToolCallParser
from deltafront.workers.messages.events import FinishReason, Token, Usage

Json = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """The object names in an endpoint's answers. `source` is the request field that holds the prompt."""

    prefix: str
    object_type: str
    chunk_type: str
    source: str
    read: Callable[[bytes, str], tuple[GenerateRequest, StreamOptions | None]]
    first_delta: Json | None
    answer: Callable[[AnswerPart], Json]
    delta: Callable[[AnswerPart], Json]
    logprobs: Callable[[TokenBytes, int], Logprobs]


def _reasoning(part: AnswerPart) -> Json:
    """Return reasoning under vLLM's field name and under its older name."""
    return {"reasoning": part.reasoning, "reasoning_content": part.reasoning} if part.reasoning else {}


def _message(part: AnswerPart) -> Json:
    calls = [
        {"id": first.call_id, "type": "function", "function": {"name": first.name, "arguments": arguments}}
        for first in part.calls
        if first.call_id
        for arguments in ["".join(more.arguments for more in part.calls if more.index == first.index)]
    ]
    content = part.content or (None if calls else "")
    message = {"role": "assistant", "content": content, "refusal": None} | _reasoning(part)
    return message | ({"tool_calls": calls} if calls else {})


def _call_deltas(part: AnswerPart) -> Json:
    deltas = [
        {"index": call.index, "id": call.call_id, "type": "function",
         "function": {"name": call.name, "arguments": ""}}
        if call.call_id
        else {"index": call.index, "function": {"arguments": call.arguments}}
        for call in part.calls
    ]  # fmt: skip
    return {"tool_calls": deltas} if deltas else {}


CHAT = Endpoint(
    prefix="chatcmpl-",
    object_type="chat.completion",
    chunk_type="chat.completion.chunk",
    source="messages",
    read=read_chat,
    first_delta={"delta": {"role": "assistant", "content": ""}},
    answer=lambda part: {"message": _message(part)},
    delta=lambda part: {
        "delta": ({"content": part.content} if part.content else {}) | _reasoning(part) | _call_deltas(part)
    },
    logprobs=ChatLogprobs,
)
TEXT = Endpoint(
    prefix="cmpl-",
    object_type="text_completion",
    chunk_type="text_completion",
    source="prompt",
    read=read_text,
    first_delta=None,
    answer=lambda part: {"text": part.content},
    delta=lambda part: {"text": part.content},
    logprobs=TextLogprobs,
)


@dataclass(frozen=True)
class Reply:
    """Makes the response objects of one request.

    Args:
        positions: Maximum tokens of prompt and answer together.
        reasoning: Splits reasoning from content; None: all text is content. calls: Parses tool calls; None:
            the answer may not call tools.
        logprobs: Collects log-probabilities; None: the request asks for none.
    """

    endpoint: Endpoint
    model: str
    positions: int
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    reasoning: ReasoningSplitter | None = None
    calls: ToolCallParser | None = None
    logprobs: Logprobs | None = None

    def answer(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> Json:
        """Make the response object of a complete answer. parts: all parts but the last one, which `finish`
        has.
        """
        parts = [*parts, *self.parts(finish.text, finish.usage.completion_tokens, last=True)]
        whole = AnswerPart(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            tuple(call for part in parts for call in part.calls),
        )
        choice = self._choice(self.endpoint.answer(whole), self._reason(finish))
        usage = self._usage(finish.usage)
        return self._object(self.endpoint.object_type, [choice], usage=usage, **_report(finish))

    def first_chunks(self, usage: Usage | None) -> list[Json]:
        delta = self.endpoint.first_delta
        return [] if delta is None else [self._chunk(self._choice(delta), usage)]

    def chunks(self, parts: Iterable[AnswerPart], usage: Usage | None) -> list[Json]:
        return [self._chunk(self._choice(self.endpoint.delta(part)), usage) for part in parts]

    def token_parts(self, token: Token) -> list[AnswerPart]:
        """Take a token. Its log-probability comes with the next part, its own or a later one."""
        if self.logprobs is not None:
            self.logprobs.add(token)
        return self.parts(token.text, token.index + 1)

    def parts(self, text: str, tokens: int, last: bool = False) -> list[AnswerPart]:
        """Split text into reasoning, content and tool calls. The parts are empty while the text is held back.
        tokens: tokens of the answer so far, including this text."""
        parts = [AnswerPart(content=text)]
        if self.reasoning is not None:
            parts = [self.reasoning.push(text, tokens), *([self.reasoning.flush()] if last else [])]
        if self.calls is not None:
            parts = [found for part in parts for found in _with_calls(self.calls, part)]
            parts += [AnswerPart(content=rest) for rest in (self.calls.flush() if last else ())]
        return [part for part in parts if any(part)]

    def _reason(self, finish: GenerateFinished) -> str:
        if finish.reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.calls is not None and self.calls.calls else "stop"

    def last_chunks(self, finish: GenerateFinished, options: StreamOptions) -> list[Json]:
        """Make a stream's last chunks: the held-back text, the finish reason with the `deltafront` report,
        and usage if requested.
        """
        usage = finish.usage if options.continuous_usage_stats else None
        chunks = self.chunks(self.parts(finish.text, finish.usage.completion_tokens, last=True), usage)
        empty = self._choice(self.endpoint.delta(AnswerPart()), self._reason(finish))
        chunks += [self._chunk(empty, usage, **_report(finish))]
        if options.include_usage:
            chunks += [self._object(self.endpoint.chunk_type, [], usage=self._usage(finish.usage))]
        return chunks

    def _chunk(self, choice: Json, usage: Usage | None, **more: Any) -> Json:
        shown = None if usage is None else self._usage(usage)
        return self._object(self.endpoint.chunk_type, [choice], usage=shown, **more)

    def _usage(self, usage: Usage) -> Json:
        told = {} if self.reasoning is None else {"reasoning_tokens": self.reasoning.tokens}
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cached_tokens_details": {
                    "device": usage.cached_tokens - usage.host_tokens - usage.disk_tokens,
                    "host": usage.host_tokens,
                    "storage": usage.disk_tokens,
                },
            },
            **({"completion_tokens_details": told} if told else {}),
        }

    def _choice(self, content: Json, reason: str | None = None) -> Json:
        logprobs = None if self.logprobs is None else self.logprobs.take()
        return {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}

    def _object(self, object_type: str, choices: list[Json], **more: Any) -> Json:
        head = {"id": self.request_id, "object": object_type, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def _with_calls(calls: ToolCallParser, part: AnswerPart) -> list[AnswerPart]:
    found = [AnswerPart(reasoning=part.reasoning)]
    for piece in calls.push(part.content):
        if isinstance(piece, CallPart):
            found.append(AnswerPart(calls=(piece,)))
        else:
            found.append(AnswerPart(content=piece))
    return found


_REPORTED = ("session", "timings", "density", "page_share", "recomputed_tokens", "trace_id")


def _report(finish: GenerateFinished) -> Json:
    fields = asdict(finish)
    return {"deltafront": {name: fields[name] for name in _REPORTED}}


def model_card(info: ServerInfo, created: int) -> Json:
    """Make the model's object for /v1/models. `max_model_len` counts tokens of prompt and answer together."""
    card = {"id": info.model, "object": "model", "created": created, "owned_by": "deltafront"}
    return {**card, "display_name": info.display_name, "max_model_len": info.max_positions}


# --- errors ------------------------------------------------------------------------------------------------

_CLIENT_ERROR, _SERVER_ERROR = "invalid_request_error", "server_error"
_STATUSES: Mapping[Code, tuple[int, str, str | None]] = {
    Code.INVALID_ARGUMENT: (400, _CLIENT_ERROR, None),
    Code.UNAUTHENTICATED: (401, _CLIENT_ERROR, "invalid_api_key"),
    Code.NOT_FOUND: (404, _CLIENT_ERROR, "session_not_found"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Code.CANCELLED: (499, _SERVER_ERROR, "cancelled"),
    Code.INTERNAL: (500, _SERVER_ERROR, "internal_error"),
    Code.UNKNOWN: (500, _SERVER_ERROR, "internal_error"),
    Code.UNAVAILABLE: (503, _SERVER_ERROR, "unavailable"),
    Code.DEADLINE_EXCEEDED: (504, _SERVER_ERROR, "deadline_exceeded"),
}
"""HTTP status, OpenAI's type and OpenAI's code of each error code. No client sees 499, because the client has
left."""

_FIELD_NAMES = (
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^attention\.options"), "options"),
    (re.compile(r"^attention(\.name)?"), "method"),
    (re.compile(r"^session_ttl$"), "session_ttl_s"),
    (re.compile(r"^deadline$"), "timeout_s"),
    (re.compile(r"^constraint\.json_schema$"), "response_format"),
    (re.compile(r"^constraint\."), "structured_outputs."),
    (re.compile(r"^(prompt|append)\.messages\.(chat_template_kwargs|tools)"), r"\2"),
)
_SOURCE = re.compile(r"^(prompt|append)(\.(text|messages|token_ids))?")


def _classify(error: DeltafrontError) -> tuple[int, str, str | None]:
    """Return an error's status, type and code. If waiting cannot help, the status is 413 and not 429."""
    if isinstance(error, Overloaded) and error.retry_after_s is None:
        return 413, _CLIENT_ERROR, "request_too_large"
    if isinstance(error, TooSlow):
        return 408, _CLIENT_ERROR, None
    if isinstance(error, NotJson):
        return 415, _CLIENT_ERROR, None
    return _STATUSES[error.code]


def status_of(error: DeltafrontError) -> int:
    return _classify(error)[0]


def error_object(
    message: str, kind: str = _CLIENT_ERROR, param: str | None = None, code: str | None = None
) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: DeltafrontError, source: str, positions: int) -> Json:
    """Make OpenAI's object of an error.

    Args:
        source: Replaces gRPC's field names `prompt` and `append` in the message.
        positions: The model's context length. Clients recognise a too long prompt by OpenAI's wording, which
            contains it.
    """
    status, kind, code = _classify(error)
    message, param = error.message.replace("the deadline", "timeout_s"), None
    if _is_late(error):
        param, message = "timeout_s", message.partition(";")[0]  # leave out the advice to compare clocks
    if isinstance(error, UnknownModel):
        param, code = "model", "model_not_found"
    elif isinstance(error, TooLong):
        code = "context_length_exceeded"
    if isinstance(error, InvalidArgument) and error.field:
        param = error.field
        for pattern, replacement in _FIELD_NAMES:
            param = pattern.sub(replacement, param)
        param = param if param == source else _SOURCE.sub(source, param, count=1)
        message = f"{param}{error.message.removeprefix(error.field)}"
    if isinstance(error, TooLong) or status == 413:
        shown = f" ({code})" if isinstance(error, TooLong) else ""  # some clients show only the message
        message = f"This model's maximum context length is {positions} tokens{shown}. {message}"
    return error_object(message, kind, param, code)


def _is_late(error: DeltafrontError) -> bool:
    """Say whether the client's own deadline ended the request."""
    return isinstance(error, DeadlineExceeded) and not isinstance(error, TooSlow)


def headers_of(error: DeltafrontError) -> dict[str, str]:
    """Return retry headers. OpenAI's client retries by itself unless a header forbids it."""
    if error.retry_after_s is not None:
        return {"retry-after": str(math.ceil(max(error.retry_after_s, 0.0)))}
    if _is_late(error):
        return {"x-should-retry": "false"}
    return {"www-authenticate": "Bearer"} if error.code is Code.UNAUTHENTICATED else {}
