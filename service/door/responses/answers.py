"""Formats answers of OpenAI's Responses API: items, and numbered events."""

from __future__ import annotations

import re
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from deltafront.service.door.edges.blocks import Block, BlockKind, Blocks, Change, Step
from deltafront.service.door.edges.edge import Asked, Json, ReplyContext
from deltafront.service.door.edges.errors import FieldNames
from deltafront.service.door.openai.answers import report
from deltafront.service.door.openai.errors import RENAMED, error_body
from deltafront.service.door.openai.logprobs import ChatLogprobs
from deltafront.service.door.openai.tools import ArgumentReader
from deltafront.service.door.responses.logprobs import ContentLogprobs
from deltafront.service.door.responses.requests import ResponseFields, read_response
from deltafront.service.door.responses.store import ResponseStore, StoredResponse
from deltafront.service.errors import DeltafrontError, InvalidArgument
from deltafront.service.request.answers import AnswerPart, GenerateFinished
from deltafront.workers.messages.events import FinishReason, Token, Usage

NAMES = FieldNames(
    "input",
    (
        (re.compile(r"^sampling\.max_tokens"), "max_output_tokens"),
        (re.compile(r"^constraint\.json_schema$"), "text.format.schema"),
        *RENAMED,
    ),
)
_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_DELTAS = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponsesEdge:
    """The endpoint `/v1/responses`. It stores responses on request."""

    splits = True
    named_events = True
    ends_with = b""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    def read(self, body: bytes, model: str, owner: str, found: StoredResponse | None = None) -> Asked:
        """Parse a request body. found: The response that `previous_response_id` names, if another door has
        it."""
        asked = read_response(body, model, self.store, owner, found)
        fields, number = asked.fields, uuid.uuid4().hex
        keeps = fields.store and self.store.begin(f"resp_{number}", owner, asked.messages)
        return Asked(
            asked.request,
            lambda context: ResponseReply(fields, context, number, self.store if keeps else None),
            fields.stream,
            fields.stream_options.include_progress,
        )

    def error(self, error: DeltafrontError, positions: int, _request_id: str) -> Json:
        return error_body(error, NAMES, positions)


class ResponseReply:
    """Makes the objects of one response, and stores it once it is complete.

    Args:
        number: The random part of the ids of the response and its items.
        store: The store that holds this response's conversation; None: the response is not stored.
    """

    def __init__(
        self, fields: ResponseFields, context: ReplyContext, number: str, store: ResponseStore | None
    ) -> None:
        self._context, self._number, self._store = context, number, store
        self._blocks = Blocks()
        self._events = 0
        self._logprobs: ContentLogprobs | None = None
        if fields.logprobs is not None:
            chat = ChatLogprobs(context.token_bytes(), fields.logprobs)
            self._logprobs = ContentLogprobs(chat, context.splitter.note_places())
        self._block_logprobs = defaultdict[int, list[Json]](list)
        self._new_logprobs = list[Json]()
        self._head: Json = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": context.model,
            "background": False,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **fields.reasoning},
            "store": store is not None,
            "temperature": fields.temperature,
            "text": {"format": {"type": "text"}, **fields.text},
            "tool_choice": fields.tool_choice,
            "tools": fields.tools,
            "top_logprobs": fields.top_logprobs,
            "top_p": fields.top_p,
            "truncation": "disabled",
        }

    def answer(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> Json:
        self._finish_logprobs(finish)
        for _ in self._changes(parts):
            pass
        return self._finished(finish)

    def begin(self, _usage: Usage) -> list[Json]:
        return self._begin()

    def _begin(self) -> list[Json]:
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def token(self, token: Token) -> None:
        if self._logprobs is not None:
            self._logprobs.add(token)

    def grow(self, parts: Iterable[AnswerPart], _usage: Usage) -> list[Json]:
        return self._push(parts)

    def end(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> list[Json]:
        self._finish_logprobs(finish)
        events = self._push(parts)
        for change in self._blocks.close():
            events += self._changed(change, self._last_status(finish))
        response = self._finished(finish)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: DeltafrontError) -> list[Json]:
        if self._store is not None:
            self._store.drop(self._head["id"])
        begun = [] if self._events else self._begin()
        said = error_body(error, NAMES, self._context.positions)["error"]
        problem = {"code": said["code"] or "server_error", "message": said["message"]}
        output = [self._item(block, "incomplete") for block in self._blocks.blocks]
        response = self._response("failed", output, error=problem)
        return [*begun, self._event("response.failed", response=response)]

    def _push(self, parts: Iterable[AnswerPart]) -> list[Json]:
        return [event for change in self._changes(parts) for event in self._changed(change)]

    def _changes(self, parts: Iterable[AnswerPart]) -> Iterator[Change]:
        for part in parts:
            if self._logprobs is not None and part.content:
                self._logprobs.content(part.content)
            for change in self._blocks.push([part]):
                self._move_logprobs(*change)
                yield change

    def _finish_logprobs(self, finish: GenerateFinished) -> None:
        if self._logprobs is not None:
            self._logprobs.finish(finish)

    def _move_logprobs(self, step: Step, block: Block, _text: str) -> None:
        """Give a block the log-probabilities of its new text. Those of white space before a block of another
        kind are dropped."""
        if self._logprobs is None:
            return
        if block.kind is BlockKind.TEXT and step is Step.GROW:
            self._new_logprobs = self._logprobs.take()
            self._block_logprobs[block.index] += self._new_logprobs
        elif block.kind is not BlockKind.TEXT and step is Step.OPEN:
            self._logprobs.take()

    def _finished(self, finish: GenerateFinished) -> Json:
        cut, blocks = finish.reason is FinishReason.LENGTH, self._blocks.blocks
        status = "incomplete" if cut else "completed"
        output = [self._item(block, "completed") for block in blocks[:-1]]
        output += [self._item(block, self._last_status(finish)) for block in blocks[-1:]]
        details = {"reason": "max_output_tokens"} if cut else None
        response = self._response(status, output, incomplete_details=details, usage=self._usage(finish.usage))
        response |= report(finish)
        if self._store is not None:
            self._store.complete(response["id"], response, [self._message()])
        return response

    def _last_status(self, finish: GenerateFinished) -> str:
        """Return the status of the last item, which max_output_tokens or a stop string may cut off."""
        cut = finish.reason is FinishReason.LENGTH or self._context.splitter.cut_off
        return "incomplete" if cut else "completed"

    def _message(self) -> Json:
        """Return the answer as a message, which may be empty. A truncated tool call is left out."""
        text = "\n".join(block.text for block in self._blocks.blocks if block.kind is BlockKind.TEXT)
        calls = [call for block in self._blocks.blocks for call in _calls_of(block)]
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}

    def _response(self, status: str, output: list[Json], **more: Any) -> Json:
        end = {"error": None, "incomplete_details": None, "usage": None, **more}
        return {**self._head, "status": status, "output": output, **end}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _changed(self, change: Change, status: str = "completed") -> list[Json]:
        step, block, text = change
        if step is Step.OPEN:  # the block may have grown since
            block = Block(block.kind, block.index, block.call_id, block.name)
        item = {"output_index": block.index}
        part = {"item_id": self._id(block), **item, "content_index": 0}
        told = {"item_id": self._id(block), **item} if block.kind is BlockKind.CALL else part
        if step is Step.GROW:
            logprobs = {"logprobs": self._new_logprobs} if block.kind is BlockKind.TEXT else {}
            return [self._event(f"{_DELTAS[block.kind]}.delta", **told, delta=text, **logprobs)]
        whole = {"item": self._item(block, "in_progress" if step is Step.OPEN else status)}
        content = [] if block.kind is BlockKind.CALL else [self._part(block)]
        if step is Step.OPEN:
            if content:
                whole["item"]["content"] = []
            added = [self._event("response.output_item.added", **item, **whole)]
            return added + [self._event("response.content_part.added", **part, part=one) for one in content]
        done: Json = {"text": block.text}
        if block.kind is BlockKind.CALL:
            done = {"arguments": block.text, "name": block.name}
        if block.kind is BlockKind.TEXT:
            done["logprobs"] = self._block_logprobs[block.index]
        ended = [self._event(f"{_DELTAS[block.kind]}.done", **told, **done)]
        ended += [self._event("response.content_part.done", **part, part=one) for one in content]
        return [*ended, self._event("response.output_item.done", **item, **whole)]

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._number}{block.index}"

    def _item(self, block: Block, status: str) -> Json:
        head: Json = {"id": self._id(block), "status": status}
        if block.kind is BlockKind.CALL:
            called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **called}
        if block.kind is BlockKind.REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": [self._part(block)]}
        return {**head, "type": "message", "role": "assistant", "content": [self._part(block)]}

    def _part(self, block: Block) -> Json:
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": block.text}
        logprobs = [*self._block_logprobs[block.index]]
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._context.splitter.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _calls_of(block: Block) -> list[Json]:
    """Return a block's tool call for the chat template; empty for other blocks and a truncated call."""
    if block.kind is not BlockKind.CALL:
        return []
    try:
        arguments = ArgumentReader().read("", block.text)
    except InvalidArgument:
        return []
    function = {"name": block.name, "arguments": arguments}
    return [{"id": block.call_id, "type": "function", "function": function}]
