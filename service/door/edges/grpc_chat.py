"""Chats over gRPC: tools and calls in requests, and answers parsed into reasoning, content and calls.

Checks and parsers are those of the HTTP edges.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.door import wire
from deltafront.service.door.edges.parts import AnswerSplitter, answer_splitters, reasoning_first
from deltafront.service.door.edges.tools import CHOICES, call_of, check_call_id, choose, function_of
from deltafront.service.door.openai.tools import ArgumentReader
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.answers import (
    AnswerPart,
    GenerateFinished,
    ParsedToken,
    RequestEvent,
    Resumed,
    ToolCall,
)
from deltafront.service.request.calls import GenerateRequest, PrefillRequest, Prompt, Tools
from deltafront.service.request.handler import RequestHandler
from deltafront.service.request.text.tool_calls import random_id, seeded_id
from deltafront.workers.messages.events import Token


def read_request(message: Any) -> PrefillRequest:
    """Convert a request with its tools and calls. Raises InvalidArgument."""
    request: PrefillRequest = wire.read(message)
    prompts: dict[str, Any] = {
        name: _with_tools(name, prompt, getattr(message, name).messages)
        for name in ("prompt", "append")
        if (prompt := getattr(request, name, None)) is not None and prompt.messages is not None
    }
    return replace(request, **prompts)


def _with_tools(name: str, prompt: Prompt, chat: pb.ChatMessages) -> Prompt:
    reader = ArgumentReader()
    messages = tuple(
        _message(f"{name}.messages[{index}]", message, sent, reader)
        for index, (message, sent) in enumerate(zip(prompt.messages or (), chat.messages, strict=True))
    )
    return replace(prompt, messages=messages, tools=_tools(f"{name}.messages.", chat, reader))


def _message(
    path: str, message: Mapping[str, Any], sent: pb.ChatMessage, reader: ArgumentReader
) -> Mapping[str, Any]:
    more: dict[str, Any] = {}
    if sent.tool_calls:
        _check_role(f"{path}.tool_calls", sent, "assistant")
        calls = enumerate(sent.tool_calls)
        more["tool_calls"] = [_call(f"{path}.tool_calls[{index}]", call, reader) for index, call in calls]
    if sent.tool_call_id:
        _check_role(f"{path}.tool_call_id", sent, "tool")
        more["tool_call_id"] = check_call_id(f"{path}.tool_call_id", sent.tool_call_id)
    return {**message, **more}


def _check_role(path: str, sent: pb.ChatMessage, role: str) -> None:
    if sent.role != role:
        raise InvalidArgument(path, f"needs the role {role}: leave it out")


def _call(path: str, call: pb.ToolCall, reader: ArgumentReader) -> dict[str, Any]:
    call_id = check_call_id(f"{path}.call_id", call.call_id)
    return call_of(path, call.name, reader.read(f"{path}.arguments", call.arguments), call_id)


def _tools(prefix: str, chat: pb.ChatMessages, reader: ArgumentReader) -> Tools | None:
    tools = enumerate(chat.tools)
    functions = [_function(f"{prefix}tools[{index}]", tool, reader) for index, tool in tools]
    choice = chat.tool_choice or "auto"
    parallel = chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls")
    return choose(functions, choice, parallel, named=choice not in CHOICES, prefix=prefix)


def _function(path: str, tool: pb.Tool, reader: ArgumentReader) -> Mapping[str, Any]:
    parameters = reader.read(f"{path}.parameters", tool.parameters) if tool.parameters else None
    given = {"name": tool.name, "description": tool.description or None, "parameters": parameters}
    return function_of(path, given)


async def parsing(
    requests: RequestHandler, request: GenerateRequest, size: int
) -> tuple[GenerateRequest, "AnswerParser"]:
    """Prepare a request whose answer is parsed, and make its parser. size: bytes of the request."""
    reasoning = requests.marks_reasoning
    request = reasoning_first(request) if reasoning else request
    new_id = partial(seeded_id, request.request_id) if request.request_id else random_id
    (splitter,) = await answer_splitters(requests, request, size, reasoning=reasoning, new_id=new_id)
    return request, AnswerParser(splitter)


class AnswerParser:
    """Adds the parts of a parsed answer to its events."""

    def __init__(self, splitter: AnswerSplitter) -> None:
        self._splitter = splitter
        self._calls: list[tuple[str, str, list[str]]] = []
        """The id, name and pieces of the arguments of each call."""

    def parsed(self, event: RequestEvent) -> RequestEvent:
        if isinstance(event, Resumed):
            for index, text in enumerate(event.texts):
                self._push(text, index + 1)
        if isinstance(event, Token):
            parts = self._push(event.text, event.index + 1)
            return ParsedToken(**vars(event), answer_parts=parts) if parts else event
        if isinstance(event, GenerateFinished):
            parts = self._push(event.text, event.usage.completion_tokens, last=True)
            reasoned = self._splitter.reasoning_tokens
            return replace(event, answer_parts=parts, tool_calls=self._complete(), reasoning_tokens=reasoned)
        return event

    def _push(self, text: str, tokens: int, last: bool = False) -> tuple[AnswerPart, ...]:
        parts = self._splitter.push(text, tokens, last)
        for call in (call for part in parts for call in part.calls):
            if call.call_id:
                self._calls.append((call.call_id, call.name, []))
            self._calls[call.index][2].append(call.arguments)
        return tuple(parts)

    def _complete(self) -> tuple[ToolCall, ...]:
        calls = self._calls[:-1] if self._splitter.cut_off else self._calls
        return tuple(ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in calls)
