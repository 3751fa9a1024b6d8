"""Plain data as OpenAI's answers: objects, chunks of a stream, and errors with their HTTP statuses.

What OpenAI's answers have no place for (session, timings, density) stands in them under `deltafront`, named
as in the gRPC contract.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...workers.messages.events import FinishReason, Usage
from ..errors import Code, DeadlineExceeded, DeltafrontError, InvalidArgument, Overloaded, TooLong
from ..request.answers import GenerateFinished, ServerInfo
from ..request.calls import GenerateRequest
from .openai_requests import Asked, UnknownModel, read_chat, read_text

Json = dict[str, Any]


@dataclass(frozen=True)
class AnswerForm:
    """What differs between the endpoints. source: the field that holds the prompt. opening: the text of the
    first chunk, if there is one before the answer; whole, piece: of an answer and of a chunk."""

    prefix: str
    name: str
    chunk_name: str
    source: str
    read: Callable[[bytes, str, str], tuple[GenerateRequest, Asked]]
    opening: Json | None
    whole: Callable[[str], Json]
    piece: Callable[[str], Json]


CHAT = AnswerForm(
    prefix="chatcmpl-",
    name="chat.completion",
    chunk_name="chat.completion.chunk",
    source="messages",
    read=read_chat,
    opening={"delta": {"role": "assistant", "content": ""}},
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    piece=lambda text: {"delta": {"content": text} if text else {}},
)
TEXT = AnswerForm(
    prefix="cmpl-",
    name="text_completion",
    chunk_name="text_completion",
    source="prompt",
    read=read_text,
    opening=None,
    whole=lambda text: {"text": text},
    piece=lambda text: {"text": text},
)


@dataclass(frozen=True)
class Reply:
    """The answer to one request, as JSON objects."""

    form: AnswerForm
    model: str
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, text: str, finish: GenerateFinished) -> Json:
        choice = _choice(self.form.whole(text), _reason(finish))
        return self._object(self.form.name, [choice], usage=_usage(finish.usage), **_report(finish))

    def opening(self, usage: Usage | None) -> list[Json]:
        """What a stream begins with, if anything. usage: what is told of it so far, as in all chunks."""
        return [] if self.form.opening is None else [self._chunk(_choice(self.form.opening), usage)]

    def piece(self, text: str, usage: Usage | None) -> Json:
        return self._chunk(_choice(self.form.piece(text)), usage)

    def ending(self, finish: GenerateFinished, usage: bool, so_far: bool) -> list[Json]:
        """Text that was held back, why the answer ended with our report, and usage if it was asked for: at
        the end, and so far in every chunk."""
        shown = finish.usage if so_far else None
        chunks = [self.piece(finish.text, shown)] if finish.text else []
        chunks += [self._chunk(_choice(self.form.piece(""), _reason(finish)), shown, **_report(finish))]
        if usage:
            chunks += [self._object(self.form.chunk_name, [], usage=_usage(finish.usage))]
        return chunks

    def _chunk(self, choice: Json, usage: Usage | None, **more: Any) -> Json:
        told = None if usage is None else _usage(usage)
        return self._object(self.form.chunk_name, [choice], usage=told, **more)

    def _object(self, name: str, choices: list[Json], **more: Any) -> Json:
        about = {"id": self.request_id, "object": name, "created": self.created, "model": self.model}
        return {**about, "choices": choices, **more}


def _choice(text: Json, reason: str | None = None) -> Json:
    return {"index": 0, **text, "logprobs": None, "finish_reason": reason}


def _reason(finish: GenerateFinished) -> str:
    return "length" if finish.reason is FinishReason.LENGTH else "stop"


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


_REPORTED = ("session", "timings", "density", "page_share", "recomputed_tokens", "trace_id")


def _report(finish: GenerateFinished) -> Json:
    every = asdict(finish)
    return {"deltafront": {name: every[name] for name in _REPORTED}}


def model_card(info: ServerInfo, created: int) -> Json:
    """max_model_len: the positions that prompt and answer share. display_name: for people."""
    card = {"id": info.model, "object": "model", "created": created, "owned_by": "deltafront"}
    return {**card, "display_name": info.display_name, "max_model_len": info.max_positions}


# --- errors ------------------------------------------------------------------------------------------------

_BAD, _OURS = "invalid_request_error", "server_error"
_STATUSES: Mapping[Code, tuple[int, str, str | None]] = {
    Code.INVALID_ARGUMENT: (400, _BAD, None),
    Code.UNAUTHENTICATED: (401, _BAD, "invalid_api_key"),
    Code.NOT_FOUND: (404, _BAD, "session_not_found"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    Code.CANCELLED: (499, _OURS, "cancelled"),
    Code.INTERNAL: (500, _OURS, "internal_error"),
    Code.UNKNOWN: (500, _OURS, "internal_error"),
    Code.UNAVAILABLE: (503, _OURS, "unavailable"),
    Code.DEADLINE_EXCEEDED: (504, _OURS, "deadline_exceeded"),
}
"""Code → HTTP status, OpenAI's type and code. 499 is nginx's, seen by nobody: the client has left."""

_NAMES = (
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^attention\.options"), "options"),
    (re.compile(r"^attention(\.name)?"), "method"),
    (re.compile(r"^session_ttl$"), "session_ttl_s"),
    (re.compile(r"^deadline$"), "timeout_s"),
    (re.compile(r"^(prompt|append)\.messages\.chat_template_kwargs"), "chat_template_kwargs"),
)
_SOURCE = re.compile(r"^(prompt|append)(\.(text|messages|token_ids))?")


def _described(error: DeltafrontError) -> tuple[int, str, str | None]:
    """HTTP status, OpenAI's type and code. What no waiting makes room for is not OpenAI's rate limit."""
    if isinstance(error, Overloaded) and error.retry_after_s is None:
        return 413, _BAD, "request_too_large"
    return _STATUSES[error.code]


def status_of(error: DeltafrontError) -> int:
    return _described(error)[0]


def error_object(message: str, kind: str = _BAD, param: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(error: DeltafrontError, source: str) -> Json:
    """source: the field that holds the prompt; what the contract calls prompt or append is named so."""
    _status, kind, code = _described(error)
    message, param = error.message.replace("the deadline", "timeout_s"), None
    if isinstance(error, DeadlineExceeded):
        param, message = "timeout_s", message.partition(";")[0]  # without words on clocks
    if isinstance(error, UnknownModel):
        param, code = "model", "model_not_found"
    elif isinstance(error, TooLong):
        code = "context_length_exceeded"
    if isinstance(error, InvalidArgument) and error.field:
        param = _name(error.field, source)
        message = f"{param}{error.message.removeprefix(error.field)}"
    return error_object(message, kind, param, code)


def headers_of(error: DeltafrontError) -> dict[str, str]:
    """When to come back; OpenAI's client tries again by itself unless it is told not to."""
    if error.retry_after_s is not None:
        return {"retry-after": str(math.ceil(max(error.retry_after_s, 0.0)))}
    if isinstance(error, DeadlineExceeded):
        return {"x-should-retry": "false"}
    return {"www-authenticate": "Bearer"} if error.code is Code.UNAUTHENTICATED else {}


def _name(name: str, source: str) -> str:
    """A field of the contract as the request calls it."""
    for pattern, ours in _NAMES:
        name = pattern.sub(ours, name)
    return name if name == source else _SOURCE.sub(source, name, count=1)
