"""Converts between protobuf messages and dataclasses, by the names of their fields.

A newer peer may send unknown values: an unknown event becomes None, an unknown finish reason
FinishReason.OTHER, an unknown page selection or service tier raises InvalidArgument.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.errors import InvalidArgument
from deltafront.service.request import answers, calls
from deltafront.service.request.answers import (
    AnswerPart,
    CallPart,
    Density,
    GenerateFinished,
    ParsedToken,
    PrefillFinished,
    RequestEvent,
    ToolCall,
)
from deltafront.service.request.calls import check_count
from deltafront.workers.messages.events import (
    FinishReason,
    LayerDensity,
    Progress,
    Session,
    Token,
    TokenLogprob,
    Usage,
)
from deltafront.workers.messages.requests import PageSelection
from deltafront.workers.messages.service_tiers import ServiceTier

_Message = TypeVar("_Message", bound=Message)
_MICRO = 1_000_000
_NANO = 1_000_000_000
_PAGE_SELECTIONS = {
    PageSelection.DEFAULT: pb.PAGE_SELECTION_UNSPECIFIED,
    PageSelection.FULL: pb.PAGE_SELECTION_FULL,
    PageSelection.DELTA: pb.PAGE_SELECTION_DELTA,
}
_READ_PAGE_SELECTIONS = {number: selection for selection, number in _PAGE_SELECTIONS.items()}
_SPECIAL_TOKENS = {
    calls.SpecialTokens.TEXT: pb.SPECIAL_TOKENS_TEXT,
    calls.SpecialTokens.PARSE: pb.SPECIAL_TOKENS_PARSE,
}
_READ_SPECIAL_TOKENS = {
    pb.SPECIAL_TOKENS_UNSPECIFIED: calls.SpecialTokens.TEXT,
    **{number: rule for rule, number in _SPECIAL_TOKENS.items()},
}
_TIERS = {
    ServiceTier.DEFAULT: pb.SERVICE_TIER_DEFAULT,
    ServiceTier.FLEX: pb.SERVICE_TIER_FLEX,
    ServiceTier.PRIORITY: pb.SERVICE_TIER_PRIORITY,
}
_READ_TIERS: Mapping[int, ServiceTier | None] = {
    pb.SERVICE_TIER_UNSPECIFIED: None,
    **{number: tier for tier, number in _TIERS.items()},
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.OTHER: pb.FINISH_REASON_UNSPECIFIED,
}
_READ_REASONS = {number: reason for reason, number in _REASONS.items()}
_EVENTS = {
    Progress: "progress",
    Token: "token",
    ParsedToken: "token",
    PrefillFinished: "result",
    GenerateFinished: "finish",
}
_KINDS: Mapping[type[Message], type[Any]] = {
    pb.PrefillRequest: calls.PrefillRequest,
    pb.GenerateRequest: calls.GenerateRequest,
    pb.AttentionMethod: calls.AttentionMethod,
    pb.SamplingOptions: calls.SamplingParams,
    pb.Constraint: calls.Constraint,
    pb.Progress: Progress,
    pb.Token: ParsedToken,
    pb.TokenLogprob: TokenLogprob,
    pb.PrefillResult: PrefillFinished,
    pb.Finish: GenerateFinished,
    pb.Session: Session,
    pb.Usage: Usage,
    pb.Timings: answers.Timings,
    pb.DensityReport: Density,
    pb.GetServerInfoResponse: answers.ServerInfo,
    pb.MethodInfo: answers.MethodInfo,
    pb.Profile: answers.ProfileInfo,
    pb.ProfileLevel: answers.ProfileLevel,
    pb.Measured: answers.MeasuredInfo,
}
"""The dataclass of each message."""
_ALWAYS_READ = ("attention", "sampling", "usage", "timings", "density", "expires")
"""Messages that are read as their defaults if they are missing. Other missing messages become None."""


def generate_request(request: calls.GenerateRequest) -> pb.GenerateRequest:
    """Make the message of a generate request. Raises InvalidArgument, also for two prompt sources: a
    message holds only one.
    """
    if request.prompt is not None and request.session_id is not None:
        raise InvalidArgument("source", "is both a prompt and a session_id: give one of them")
    return write(pb.GenerateRequest, request)


def response(kind: type[_Message], event: RequestEvent) -> _Message:
    """Make the response message of an event. Raises ValueError for an event that this rpc does not send."""
    name = _EVENTS[type(event)]
    plain = isinstance(event, Progress) and not event.tiles
    frequent = plain or (type(event) is Token and not event.top)  # none of _FORMS
    return kind(**{name: vars(event) if frequent else _to_wire(kind, name, event, name)})


def read_response(message: pb.PrefillResponse | pb.GenerateResponse) -> Any:
    kind = message.WhichOneof("event")
    event = None if kind is None else read(getattr(message, kind))
    if isinstance(event, ParsedToken) and not event.answer_parts:
        return Token(**{name: value for name, value in vars(event).items() if name != "answer_parts"})
    return event


def write(kind: type[_Message], value: Any, prefix: str = "") -> _Message:
    """Make a protobuf message of type `kind` from a dataclass. Raises InvalidArgument as `fill_message`
    does."""
    return fill_message(kind, prefix, **vars(value))


def fill_message(kind: type[_Message], prefix: str = "", **fields: Any) -> _Message:
    """Make a protobuf message of type `kind`. Raises InvalidArgument for a wrong value, with `prefix`
    before the field's name.
    """
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: _to_wire(kind, name, value, prefix + name)}))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(prefix + name, str(error)) from None
    return message


def read(message: Message) -> Any:
    """Convert a protobuf message to its dataclass. Raises InvalidArgument."""
    fields = message.DESCRIPTOR.fields
    return _KINDS[type(message)](**{field.name: _from_wire(message, field) for field in fields})


def _to_wire(kind: type[Message], name: str, value: Any, path: str) -> Any:
    if value is None or (isinstance(value, Density) and not value.method):
        return None
    if name in _FORMS:
        return _FORMS[name][0](value)
    if isinstance(value, calls.Prompt):
        return _prompt(path, value)
    inner: Any = kind.DESCRIPTOR.fields_by_name[name].message_type
    if is_dataclass(value):
        return write(inner._concrete_class, value, path + ".")
    if isinstance(value, list):
        return [write(inner._concrete_class, item) if is_dataclass(item) else item for item in value]
    return value


def _from_wire(message: Message, field: Any) -> Any:
    name, value = field.name, getattr(message, field.name)
    if field.has_presence and name not in _ALWAYS_READ and not message.HasField(name):
        return None
    if name in _FORMS:
        return _FORMS[name][1](value)
    if isinstance(value, pb.Prompt):
        return _read_prompt(name, value)
    if isinstance(value, Message):
        return read(value)
    if isinstance(value, Mapping):
        return dict(value)
    return [read(item) if field.message_type else item for item in value] if field.is_repeated else value


def _prompt(name: str, prompt: calls.Prompt) -> pb.Prompt:
    messages = None
    if prompt.messages is not None:
        messages = fill_message(
            pb.ChatMessages,
            f"{name}.messages.",
            messages=[_message(f"{name}.messages[{i}].", sent) for i, sent in enumerate(prompt.messages)],
            chat_template_kwargs=prompt.chat_template_kwargs or None,
            **({} if prompt.tools is None else _tools(f"{name}.messages.", prompt.tools)),
        )
    return fill_message(
        pb.Prompt,
        f"{name}.",
        text=prompt.text,
        messages=messages,
        token_ids=prompt.token_ids,
        special_tokens=None if prompt.text is None else _SPECIAL_TOKENS[prompt.special_tokens],
    )


def _message(prefix: str, sent: Mapping[str, Any]) -> pb.ChatMessage:
    message = fill_message(pb.ChatMessage, prefix, role=sent["role"], content=sent["content"])
    for index, call in enumerate(sent.get("tool_calls") or ()):
        path, function = f"{prefix}tool_calls[{index}].", call["function"]
        arguments = _json(f"{path}arguments", function["arguments"])
        fields = {"call_id": call["id"], "name": function["name"], "arguments": arguments}
        message.tool_calls.append(fill_message(pb.ToolCall, path, **fields))
    message.MergeFrom(fill_message(pb.ChatMessage, prefix, tool_call_id=sent.get("tool_call_id")))
    return message


def _tools(prefix: str, tools: calls.Tools) -> dict[str, Any]:
    functions = list[pb.Tool]()
    for index, function in enumerate(tools.functions):
        path, given = f"{prefix}tools[{index}].", function.get("parameters")
        parameters = None if given is None else _json(f"{path}parameters", given)
        fields = {"name": function.get("name"), "description": function.get("description")}
        functions.append(fill_message(pb.Tool, path, **fields, parameters=parameters))
    choice = None if tools.choice == "auto" else tools.choice
    return {
        "tools": functions,
        "tool_choice": choice,
        "parallel_tool_calls": None if tools.parallel is True else tools.parallel,
    }


def _json(path: str, value: object) -> str:
    """Return a value as JSON. A text is JSON already. Raises InvalidArgument."""
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(path, f"is not JSON: {error}") from None


def _read_prompt(name: str, message: pb.Prompt) -> calls.Prompt:
    form = message.WhichOneof("content")
    if form == "text":
        rule = _READ_SPECIAL_TOKENS.get(message.special_tokens)
        if rule is None:
            raise InvalidArgument(f"{name}.special_tokens", f"{message.special_tokens} is not a known value")
        return calls.Prompt(text=message.text, special_tokens=rule)
    if form == "messages":
        chat = message.messages.messages
        check_count(f"{name}.messages", len(chat))
        return calls.Prompt(
            messages=tuple({"role": message.role, "content": message.content} for message in chat),
            chat_template_kwargs=_read_json(message.messages.chat_template_kwargs),
        )
    return calls.Prompt(token_ids=message.token_ids) if form == "token_ids" else calls.Prompt()


def _read_json(message: Struct) -> dict[str, Any]:
    try:
        return {key: _restore_integers(value) for key, value in MessageToDict(message).items()}
    except ValueError as error:
        raise InvalidArgument("chat_template_kwargs", f"is not JSON: {error}") from None


def _restore_integers(value: Any) -> Any:
    """Make whole numbers integers again. A Struct holds every number as a float."""
    if isinstance(value, list):
        return [_restore_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _restore_integers(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _moment(kind: type[Duration | Timestamp], seconds: float) -> Duration | Timestamp:
    message = kind()
    try:
        message.FromMicroseconds(round(seconds * _MICRO))
    except (TypeError, ValueError, OverflowError):
        raise ValueError("must be finite, and not thousands of years") from None
    return message


def _read_deadline(message: Timestamp) -> float:
    if not 0 <= message.nanos < _NANO:
        raise InvalidArgument("deadline", f"nanos {message.nanos} must be between 0 and {_NANO - 1}")
    return message.seconds + message.nanos / _NANO


def _read_selection(number: pb.PageSelection) -> PageSelection:
    if number not in _READ_PAGE_SELECTIONS:
        raise InvalidArgument("page_selection", f"{number} is not a known value")
    return _READ_PAGE_SELECTIONS[number]


def _read_tier(number: pb.ServiceTier) -> ServiceTier | None:
    if number not in _READ_TIERS:
        raise InvalidArgument("service_tier", f"{number} is not a known value")
    return _READ_TIERS[number]


def _parts(parts: Mapping[str, float]) -> list[pb.TimingPart]:
    return [pb.TimingPart(name=name, seconds=seconds) for name, seconds in parts.items()]


def _read_parts(parts: Iterable[pb.TimingPart]) -> dict[str, float]:
    return {part.name: part.seconds for part in parts}


def _answer_part(part: AnswerPart) -> pb.AnswerPart:
    pieces = [pb.ToolCallPart(**vars(call)) for call in part.calls]
    return pb.AnswerPart(reasoning=part.reasoning, content=part.content, calls=pieces)


def _read_answer_part(part: pb.AnswerPart) -> AnswerPart:
    pieces = (CallPart(call.index, call.call_id, call.name, call.arguments) for call in part.calls)
    return AnswerPart(part.reasoning, part.content, tuple(pieces))


_FORMS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "session_ttl": (partial(_moment, Duration), lambda ttl: ttl.seconds + ttl.nanos / _NANO),
    "deadline": (partial(_moment, Timestamp), _read_deadline),
    "expires": (partial(_moment, Timestamp), lambda expires: expires.ToMicroseconds() / _MICRO),
    "stop": (tuple, tuple),
    "stop_token_ids": (tuple, tuple),
    "top": (
        lambda tops: [pb.TokenLogprob(**vars(one)) for one in tops],
        lambda tops: tuple(map(read, tops)),
    ),
    "choice": (
        lambda texts: pb.Choice(texts=texts),
        lambda choice: tuple(choice.texts),
    ),
    "answer_parts": (
        lambda parts: [*map(_answer_part, parts)],
        lambda parts: tuple(map(_read_answer_part, parts)),
    ),
    "tiles": (
        lambda tiles: [pb.LayerTiles(layer=t.layer, computed=t.computed, causal=t.causal) for t in tiles],
        lambda tiles: tuple(LayerDensity(layer=t.layer, computed=t.computed, causal=t.causal) for t in tiles),
    ),
    "tool_calls": (
        lambda made: [pb.ToolCall(**vars(call)) for call in made],
        lambda made: tuple(ToolCall(call.call_id, call.name, call.arguments) for call in made),
    ),
    "page_selection": (_PAGE_SELECTIONS.__getitem__, _read_selection),
    "service_tier": (_TIERS.__getitem__, _read_tier),
    "reason": (_REASONS.__getitem__, lambda number: _READ_REASONS.get(number, FinishReason.OTHER)),
    "parts": (_parts, _read_parts),
    "stages": (
        lambda stages: [pb.StageTimings(stage=i, phases=_parts(phases)) for i, phases in enumerate(stages)],
        lambda stages: [_read_parts(stage.phases) for stage in stages],
    ),
    "layers": (
        lambda layers: [pb.LayerDensity(layer=layer, density=share) for layer, share in layers.items()],
        lambda layers: {layer.layer: layer.density for layer in layers},
    ),
}
"""Functions that write and read the fields whose types differ between message and dataclass."""
