"""Formats answers and errors of Anthropic's Messages API: content blocks, and named events."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import from_json

from deltafront.service.door.anthropic.requests import read_count, read_message
from deltafront.service.door.edges.blocks import Block, BlockKind, Blocks, Change, Step
from deltafront.service.door.edges.edge import Asked, Json, ReplyContext
from deltafront.service.door.edges.errors import TOO_LARGE, FieldNames, status_of
from deltafront.service.door.openai.answers import report
from deltafront.service.errors import DeltafrontError, TooLong
from deltafront.service.request.answers import AnswerPart, GenerateFinished
from deltafront.service.request.context import Accepted
from deltafront.service.request.handler import RequestHandler
from deltafront.workers.messages.events import FinishReason, Token, Usage
from deltafront.workers.messages.requests import ID_BYTES

NAMES = FieldNames(
    "messages",
    (
        (re.compile(r"^sampling\.stop"), "stop_sequences"),
        (re.compile(r"^sampling\."), ""),
        (re.compile(r"^attention\.options"), "options"),
        (re.compile(r"^attention(\.name)?"), "method"),
        (re.compile(r"^constraint\.json_schema$"), "output_config.format.schema"),
        (re.compile(r"^prompt\.messages\.(chat_template_kwargs|tools)"), r"\1"),
    ),
)
_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    TOO_LARGE: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_PING = {"type": "ping"}
_NO_STOP: Json = {"stop_details": None, "container": None}
_NO_USAGE = dict.fromkeys(
    ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
)
"""Fields that Anthropic's API requires, of things that this server does not have."""


def error_body(error: DeltafrontError) -> Json:
    """Make Anthropic's error object. Clients recognise a too long prompt by the message's wording."""
    status, (_param, message) = status_of(error), NAMES.say(error)
    if isinstance(error, TooLong):
        message = f"prompt is too long: {message}"
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesEdge:
    """The endpoint `/v1/messages`."""

    splits = True
    named_events = True
    ends_with = b""

    def read(self, body: bytes, model: str, _owner: str) -> Asked:
        request, stream = read_message(body, model)
        return Asked(request, MessageReply, stream)

    def error(self, error: DeltafrontError, _positions: int, request_id: str) -> Json:
        return error_body(error) | {"request_id": request_id}


MESSAGES = MessagesEdge()


async def count_tokens(requests: RequestHandler, accepted: Accepted, body: bytes) -> Json:
    """Answer `/v1/messages/count_tokens`. Raises DeltafrontError."""
    request = await requests.text_budget.work(len(body), lambda _: read_count(body, requests.model))
    return {"input_tokens": len(await requests.token_ids(accepted, request)) // ID_BYTES}


class MessageReply:
    """Makes the objects of one answer."""

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._blocks = Blocks()

    def answer(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> Json:
        self._blocks.push(parts)
        content = [_content(block) for block in self._blocks.blocks]
        return self._message(content, finish.usage) | self._stop(finish) | report(finish)

    def begin(self, usage: Usage) -> list[Json]:
        nothing = {"stop_reason": None, "stop_sequence": None, **_NO_STOP}
        return [{"type": "message_start", "message": self._message([], usage) | nothing}, _PING]

    def token(self, token: Token) -> None:
        pass

    def grow(self, parts: Iterable[AnswerPart], _usage: Usage) -> list[Json]:
        return [_event(change) for change in self._blocks.push(parts)]

    def end(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> list[Json]:
        changes = [*self._blocks.push(parts), *self._blocks.close()]
        stop = {"delta": self._stop(finish), "usage": _usage(finish.usage), **report(finish)}
        return [*map(_event, changes), {"type": "message_delta", **stop}, {"type": "message_stop"}]

    def fail(self, error: DeltafrontError) -> list[Json]:
        return [error_body(error)]

    def _message(self, content: list[Json], usage: Usage) -> Json:
        return {
            "id": f"msg_{self._context.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": content,
            "usage": _usage(usage),
        }

    def _stop(self, finish: GenerateFinished) -> Json:
        reason = "tool_use" if self._context.splitter.called else "end_turn"
        if finish.reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif finish.reason is FinishReason.STOP_STRING:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": finish.stop_string or None, **_NO_STOP}


def _content(block: Block) -> Json:
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text, "citations": None}
    called = {"id": block.call_id, "name": block.name, "input": _arguments(block.text)}
    return {"type": "tool_use", **called, "caller": {"type": "direct"}}


def _arguments(text: str) -> Json:
    """Parse a tool call's arguments, which max_tokens may truncate. Returns {} if the arguments do not parse
    as an object: half a surrogate pair, for example, or too deep nesting."""
    with contextlib.suppress(ValueError):
        found = from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
        return found if isinstance(found, dict) else {}
    return {}


def _event(change: Change) -> dict[str, Any]:
    step, block, text = change
    if step is Step.CLOSE:
        return {"type": "content_block_stop", "index": block.index}
    if step is Step.OPEN:
        begun = _content(Block(block.kind, block.index, block.call_id, block.name))
        return {"type": "content_block_start", "index": block.index, "content_block": begun}
    delta = {
        BlockKind.REASONING: {"type": "thinking_delta", "thinking": text},
        BlockKind.TEXT: {"type": "text_delta", "text": text},
        BlockKind.CALL: {"type": "input_json_delta", "partial_json": text},
    }[block.kind]
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **_NO_USAGE,
    }
