"""OpenAI's answers: objects, and chunks of a stream.

Session, timings and density are under `deltafront`, named as in the gRPC contract.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deltafront.service.door.edges.answering import OneAnswer
from deltafront.service.door.edges.edge import Asked, Json, ReplyContext
from deltafront.service.door.edges.errors import FieldNames
from deltafront.service.door.openai.choices import Choices
from deltafront.service.door.openai.errors import RENAMED, error_body
from deltafront.service.door.openai.logprobs import ChatLogprobs, Logprobs, TextLogprobs
from deltafront.service.door.openai.requests import StreamOptions, read_chat, read_text
from deltafront.service.errors import DeltafrontError
from deltafront.service.request.answers import AnswerPart, GenerateFinished, ServerInfo
from deltafront.service.request.calls import CompletionRequest
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.workers.messages.events import FinishReason, Token, Usage


@dataclass(frozen=True)
class Endpoint:
    """The object names in an endpoint's answers. `source` is the request field that holds the prompt."""

    prefix: str
    object_type: str
    chunk_type: str
    source: str
    reads: Callable[[bytes, str], tuple[CompletionRequest, StreamOptions | None]]
    first_delta: Json | None
    message: Callable[[AnswerPart], Json]
    delta: Callable[[AnswerPart], Json]
    logprobs: Callable[[TokenBytes, int], Logprobs]
    splits: bool
    named_events: bool = False
    ends_with: bytes = b"data: [DONE]\n\n"

    @property
    def names(self) -> FieldNames:
        return FieldNames(self.source, RENAMED)

    def read(self, body: bytes, model: str, _owner: str) -> Asked:
        request, options = self.reads(body, model)
        said, top = options or StreamOptions(), request.sampling.top_logprobs
        alone = request.answers == 1
        of_one = said if alone else said.model_copy(update={"include_usage": False})

        def reply(context: ReplyContext) -> Reply:
            logprobs = None if top is None else self.logprobs(context.token_bytes(), top)
            return Reply(self, context, of_one, logprobs)

        def several(answers: Sequence[OneAnswer]) -> Choices:
            replies = [answer.reply for answer in answers if isinstance(answer.reply, Reply)]
            return Choices(answers, replies, request.shown, request.choices, said.include_usage)

        return Asked(
            request,
            reply,
            stream=options is not None,
            include_progress=said.include_progress,
            several=None if alone else several,
        )

    def error(self, error: DeltafrontError, positions: int, _request_id: str) -> Json:
        return error_body(error, self.names, positions)


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
    reads=read_chat,
    first_delta={"delta": {"role": "assistant", "content": ""}},
    message=lambda part: {"message": _message(part)},
    delta=lambda part: {
        "delta": ({"content": part.content} if part.content else {}) | _reasoning(part) | _call_deltas(part)
    },
    logprobs=ChatLogprobs,
    splits=True,
)
TEXT = Endpoint(
    prefix="cmpl-",
    object_type="text_completion",
    chunk_type="text_completion",
    source="prompt",
    reads=read_text,
    first_delta=None,
    message=lambda part: {"text": part.content},
    delta=lambda part: {"text": part.content},
    logprobs=TextLogprobs,
    splits=False,
)


@dataclass(frozen=True)
class Reply:
    """Makes the response objects of one request. logprobs: None: the request asks for none."""

    endpoint: Endpoint
    context: ReplyContext
    options: StreamOptions
    logprobs: Logprobs | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> Json:
        """Make the response object of a complete answer."""
        reasoned = self.context.splitter.reasoning_tokens
        return self.together([self.choice(parts, finish)], finish.usage, reasoned, finish)

    def together(
        self, choices: list[Json], usage: Usage, reasoned: int | None, finish: GenerateFinished
    ) -> Json:
        """Make one response object of several complete choices."""
        shown = _usage(usage, reasoned)
        return self._object(self.endpoint.object_type, choices, usage=shown, **report(finish))

    def choice(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> Json:
        parts = list(parts)
        whole = AnswerPart(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            tuple(call for part in parts for call in part.calls),
        )
        return self._choice(self.endpoint.message(whole), self._reason(finish))

    def begin(self, usage: Usage) -> list[Json]:
        delta = self.endpoint.first_delta
        return [] if delta is None else [self._chunk(self._choice(delta), usage)]

    def token(self, token: Token) -> None:
        """Take a token. Its log-probability is sent with the next part, which may belong to a later token."""
        if self.logprobs is not None:
            self.logprobs.add(token)

    def grow(self, parts: Iterable[AnswerPart], usage: Usage) -> list[Json]:
        return [self._chunk(self._choice(self.endpoint.delta(part)), usage) for part in parts]

    def end(self, parts: Iterable[AnswerPart], finish: GenerateFinished) -> list[Json]:
        """Make a stream's last chunks: the held-back text, the finish reason with the `deltafront` report,
        and usage if requested.
        """
        usage = finish.usage
        chunks = [self._chunk(self._choice(self.endpoint.delta(part)), usage) for part in parts]
        empty = self._choice(self.endpoint.delta(AnswerPart()), self._reason(finish))
        chunks += [self._chunk(empty, usage, **report(finish))]
        if self.options.include_usage:
            chunks += [self.usage_chunk(usage, self.context.splitter.reasoning_tokens)]
        return chunks

    def usage_chunk(self, usage: Usage, reasoned: int | None) -> Json:
        return self._object(self.endpoint.chunk_type, [], usage=_usage(usage, reasoned))

    def fail(self, error: DeltafrontError) -> list[Json]:
        return [error_body(error, self.endpoint.names, self.context.positions)]

    def _reason(self, finish: GenerateFinished) -> str:
        if finish.reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.context.splitter.called else "stop"

    def _chunk(self, choice: Json, usage: Usage, **more: Any) -> Json:
        shown: Json = {"usage": None} if self.options.include_usage else {}
        if shown and self.options.continuous_usage_stats:
            shown = {"usage": _usage(usage, self.context.splitter.reasoning_tokens)}
        return self._object(self.endpoint.chunk_type, [choice], **shown, **more)

    def _choice(self, content: Json, reason: str | None = None) -> Json:
        logprobs = None if self.logprobs is None else self.logprobs.take()
        return {"index": self.context.index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _object(self, object_type: str, choices: list[Json], **more: Any) -> Json:
        context, endpoint = self.context, self.endpoint
        head = {"id": endpoint.prefix + context.request_id, "object": object_type, "created": self.created}
        return {**head, "model": context.model, "choices": choices, **more}


def _usage(usage: Usage, reasoned: int | None) -> Json:
    told = {} if reasoned is None else {"reasoning_tokens": reasoned}
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


_REPORTED = ("session", "timings", "density", "page_share", "recomputed_tokens", "trace_id")


def report(finish: GenerateFinished) -> Json:
    fields = asdict(finish)
    return {"deltafront": {name: fields[name] for name in _REPORTED}}


def model_card(info: ServerInfo, created: int) -> Json:
    """Make the model's object for /v1/models. `max_model_len` counts tokens of prompt and answer together."""
    card = {"id": info.model, "object": "model", "created": created, "owned_by": "deltafront"}
    return {**card, "display_name": info.display_name, "max_model_len": info.max_positions}
