"""The mapping between protobuf and plain data, in both directions.

`x` makes a message, `read_x` reads one. A newer peer may send unknown values: an event becomes None, a reason
FinishReason.OTHER, a page selection an InvalidArgument.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from ...protos.v1 import deltafront_pb2 as pb
from ...workers.messages.events import FinishReason, Progress, Session, Token, Usage
from ...workers.messages.requests import PageSelection
from ..errors import InvalidArgument
from ..request.answers import (
    Density,
    GenerateFinished,
    MethodInfo,
    PrefillFinished,
    ProfileInfo,
    ProfileLevel,
    RequestEvent,
    ServerInfo,
    Timings,
)
from ..request.calls import GenerateRequest, PrefillRequest, Prompt, SamplingParams, SpecialTokens
from ..request.check import check_count

_Message = TypeVar("_Message", bound=Message)
_M = TypeVar("_M", Duration, Timestamp)
_MICRO = 1_000_000
_NANO = 1_000_000_000
_PAGE_SELECTIONS = {
    PageSelection.DEFAULT: pb.PAGE_SELECTION_UNSPECIFIED,
    PageSelection.FULL: pb.PAGE_SELECTION_FULL,
    PageSelection.DELTA: pb.PAGE_SELECTION_DELTA,
}
_READ_PAGE_SELECTIONS = {number: selection for selection, number in _PAGE_SELECTIONS.items()}
_SPECIAL_TOKENS = {SpecialTokens.TEXT: pb.SPECIAL_TOKENS_TEXT, SpecialTokens.PARSE: pb.SPECIAL_TOKENS_PARSE}
_READ_SPECIAL_TOKENS = {
    pb.SPECIAL_TOKENS_UNSPECIFIED: SpecialTokens.TEXT,
    **{number: rule for rule, number in _SPECIAL_TOKENS.items()},
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.OTHER: pb.FINISH_REASON_UNSPECIFIED,
}
_READ_REASONS = {number: reason for reason, number in _REASONS.items()}

# --- requests ----------------------------------------------------------------------------------------------


def fill_message(kind: type[_Message], prefix: str = "", **fields: Any) -> _Message:
    """Raises InvalidArgument, with `prefix` before the field's name, for a value that does not fit."""
    message = kind()
    for name, value in fields.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(prefix + name, str(error)) from None
    return message


def prefill_request(request: PrefillRequest) -> pb.PrefillRequest:
    """Raises InvalidArgument."""
    return fill_message(pb.PrefillRequest, **_common(request))


def read_prefill_request(message: pb.PrefillRequest) -> PrefillRequest:
    return PrefillRequest(**_read_common(message))


def generate_request(request: GenerateRequest) -> pb.GenerateRequest:
    """Raises InvalidArgument, also for two sources, because a message can hold only one."""
    if request.prompt is not None and request.session_id is not None:
        raise InvalidArgument("source", "is both a prompt and a session_id: give one of them")
    return fill_message(
        pb.GenerateRequest,
        **_common(request),
        session_id=request.session_id,
        append=_prompt("append", request.append),
        sampling=fill_message(pb.SamplingOptions, "sampling.", **vars(request.sampling)),
        page_selection=_PAGE_SELECTIONS[request.page_selection],
        recompute_blocks=request.recompute_blocks,
        answered_ids=request.answered_ids,
    )


def read_generate_request(message: pb.GenerateRequest) -> GenerateRequest:
    selection = _READ_PAGE_SELECTIONS.get(message.page_selection)
    if selection is None:
        raise InvalidArgument("page_selection", f"{message.page_selection} is not a known value")
    return GenerateRequest(
        **_read_common(message),
        session_id=message.session_id if message.HasField("session_id") else None,
        append=_read_prompt("append", message.append) if message.HasField("append") else None,
        sampling=_read_sampling(message.sampling),
        page_selection=selection,
        recompute_blocks=message.recompute_blocks if message.HasField("recompute_blocks") else None,
        answered_ids=message.answered_ids,
    )


def _common(request: PrefillRequest) -> dict[str, Any]:
    return {
        "prompt": _prompt("prompt", request.prompt),
        "attention": fill_message(
            pb.AttentionMethod, "attention.", name=request.method, options=request.options
        ),
        "session_ttl": _time_message("session_ttl", Duration(), request.session_ttl_s),
        "deadline": _time_message("deadline", Timestamp(), request.deadline),
        "request_id": request.request_id,
        "cache_salt": request.cache_salt,
    }


def _read_common(message: pb.PrefillRequest | pb.GenerateRequest) -> dict[str, Any]:
    ttl = message.session_ttl
    return {
        "prompt": _read_prompt("prompt", message.prompt) if message.HasField("prompt") else None,
        "method": message.attention.name,
        "options": dict(message.attention.options),
        "session_ttl_s": ttl.seconds + ttl.nanos / _NANO if message.HasField("session_ttl") else None,
        "deadline": _read_deadline(message.deadline) if message.HasField("deadline") else None,
        "request_id": message.request_id,
        "cache_salt": message.cache_salt,
    }


def _prompt(name: str, prompt: Prompt | None) -> pb.Prompt | None:
    if prompt is None:
        return None
    messages = None
    if prompt.messages is not None:
        chat = [
            fill_message(
                pb.ChatMessage, f"{name}.messages[{index}].", role=message["role"], content=message["content"]
            )
            for index, message in enumerate(prompt.messages)
        ]
        messages = fill_message(
            pb.ChatMessages,
            f"{name}.messages.",
            messages=chat,
            chat_template_kwargs=prompt.chat_template_kwargs or None,
        )
    return fill_message(
        pb.Prompt,
        f"{name}.",
        text=prompt.text,
        messages=messages,
        token_ids=prompt.token_ids,
        special_tokens=None if prompt.text is None else _SPECIAL_TOKENS[prompt.special_tokens],
    )


def _read_prompt(name: str, message: pb.Prompt) -> Prompt:
    form = message.WhichOneof("content")
    if form == "text":
        rule = _READ_SPECIAL_TOKENS.get(message.special_tokens)
        if rule is None:
            raise InvalidArgument(f"{name}.special_tokens", f"{message.special_tokens} is not a known value")
        return Prompt(text=message.text, special_tokens=rule)
    if form == "messages":
        chat = message.messages.messages
        check_count(f"{name}.messages", len(chat))
        return Prompt(
            messages=tuple({"role": message.role, "content": message.content} for message in chat),
            chat_template_kwargs=_read_json(message.messages.chat_template_kwargs),
        )
    return Prompt(token_ids=message.token_ids) if form == "token_ids" else Prompt()


def _read_json(message: Struct) -> dict[str, Any]:
    try:
        return {key: _restore_integers(value) for key, value in MessageToDict(message).items()}
    except ValueError as error:
        raise InvalidArgument("chat_template_kwargs", f"is not JSON: {error}") from None


def _restore_integers(value: Any) -> Any:
    """A Struct holds every number as a float."""
    if isinstance(value, list):
        return [_restore_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _restore_integers(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_sampling(message: pb.SamplingOptions) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k,
        seed=message.seed,
        stop=tuple(message.stop),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        ignore_eos=message.ignore_eos,
    )


def _time_message(name: str, message: _M, seconds: float | None) -> _M | None:
    try:
        return None if seconds is None else _from_seconds(message, seconds)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(name, "must be finite, and not thousands of years") from None


def _from_seconds(message: _M, seconds: float) -> _M:
    """Fill in a Duration, or a Timestamp since the epoch."""
    message.FromMicroseconds(round(seconds * _MICRO))
    return message


def _read_deadline(message: Timestamp) -> float:
    if not 0 <= message.nanos < _NANO:
        raise InvalidArgument("deadline", f"nanos {message.nanos} must be between 0 and {_NANO - 1}")
    return message.seconds + message.nanos / _NANO


# --- answers -----------------------------------------------------------------------------------------------


def prefill_response(event: RequestEvent) -> pb.PrefillResponse:
    if isinstance(event, Progress):
        return pb.PrefillResponse(progress=pb.Progress(**vars(event)))
    if isinstance(event, PrefillFinished):
        result = pb.PrefillResult(
            session=_session(event.session),
            usage=pb.Usage(**vars(event.usage)),
            timings=_timings(event.timings),
            density=_density(event.density),
            request_id=event.request_id,
            trace_id=event.trace_id,
        )
        return pb.PrefillResponse(result=result)
    raise TypeError(f"{type(event).__name__} does not answer a Prefill")


def read_prefill_response(message: pb.PrefillResponse) -> Progress | PrefillFinished | None:
    kind = message.WhichOneof("event")
    if kind == "progress":
        return Progress(**_fields(message.progress))
    if kind != "result":
        return None
    result = message.result
    return PrefillFinished(
        session=_read_session(result.session),
        usage=Usage(**_fields(result.usage)),
        timings=_read_timings(result.timings),
        density=_read_density(result.density),
        request_id=result.request_id,
        trace_id=result.trace_id,
    )


def generate_response(event: RequestEvent) -> pb.GenerateResponse:
    if isinstance(event, Token):
        return pb.GenerateResponse(token=pb.Token(**vars(event)))
    if isinstance(event, Progress):
        return pb.GenerateResponse(progress=pb.Progress(**vars(event)))
    if isinstance(event, GenerateFinished):
        finish = pb.Finish(
            reason=_REASONS[event.reason],
            text=event.text,
            usage=pb.Usage(**vars(event.usage)),
            timings=_timings(event.timings),
            density=_density(event.density),
            session=None if event.session is None else _session(event.session),
            page_share=event.page_share,
            request_id=event.request_id,
            trace_id=event.trace_id,
            recomputed_tokens=event.recomputed_tokens,
        )
        return pb.GenerateResponse(finish=finish)
    raise TypeError(f"{type(event).__name__} does not answer a Generate")


def read_generate_response(message: pb.GenerateResponse) -> Progress | Token | GenerateFinished | None:
    kind = message.WhichOneof("event")
    if kind == "token":
        return Token(**_fields(message.token))
    if kind == "progress":
        return Progress(**_fields(message.progress))
    if kind != "finish":
        return None
    finish = message.finish
    return GenerateFinished(
        reason=_READ_REASONS.get(finish.reason, FinishReason.OTHER),
        text=finish.text,
        usage=Usage(**_fields(finish.usage)),
        timings=_read_timings(finish.timings),
        density=_read_density(finish.density),
        session=_read_session(finish.session) if finish.HasField("session") else None,
        page_share=finish.page_share,
        request_id=finish.request_id,
        trace_id=finish.trace_id,
        recomputed_tokens=finish.recomputed_tokens,
    )


def server_info(info: ServerInfo) -> pb.GetServerInfoResponse:
    methods = [pb.MethodInfo(**vars(method)) for method in info.methods]
    profile = None if info.profile is None else _profile(info.profile)
    return pb.GetServerInfoResponse(**{**vars(info), "methods": methods, "profile": profile})


def read_server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    methods = [MethodInfo(m.name, m.source, dict(m.defaults)) for m in message.methods]
    layers = {"full_layers": [*message.full_layers], "delta_layers": [*message.delta_layers]}
    profile = _read_profile(message.profile) if message.HasField("profile") else None
    return ServerInfo(**{**_fields(message), **layers, "methods": methods, "profile": profile})


def _profile(profile: ProfileInfo) -> pb.Profile:
    levels = [pb.ProfileLevel(**vars(level)) for level in profile.levels]
    return pb.Profile(model=profile.model, levels=levels, figures=profile.figures)


def _read_profile(message: pb.Profile) -> ProfileInfo:
    levels = [ProfileLevel(**_fields(level) | {"options": dict(level.options)}) for level in message.levels]
    return ProfileInfo(message.model, levels, message.figures)


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _session(session: Session) -> pb.Session:
    expires = _from_seconds(Timestamp(), session.expires)
    return pb.Session(session_id=session.session_id, expires=expires, tokens=session.tokens)


def _read_session(message: pb.Session) -> Session:
    return Session(
        session_id=message.session_id,
        expires=message.expires.ToMicroseconds() / _MICRO,
        tokens=message.tokens,
    )


def _parts(parts: dict[str, float]) -> list[pb.TimingPart]:
    return [pb.TimingPart(name=name, seconds=seconds) for name, seconds in parts.items()]


def _timings(timings: Timings) -> pb.Timings:
    return pb.Timings(
        ttft_seconds=timings.ttft_seconds,
        parts=_parts(timings.parts),
        stages=[
            pb.StageTimings(stage=stage, phases=_parts(phases)) for stage, phases in enumerate(timings.stages)
        ],
        total_seconds=timings.total_seconds,
    )


def _read_timings(message: pb.Timings) -> Timings:
    return Timings(
        message.ttft_seconds,
        {part.name: part.seconds for part in message.parts},
        [{phase.name: phase.seconds for phase in stage.phases} for stage in message.stages],
        message.total_seconds,
    )


def _density(density: Density) -> pb.DensityReport | None:
    if not density.method:
        return None
    return pb.DensityReport(
        method=density.method,
        mean=density.mean,
        layers=[pb.LayerDensity(layer=layer, density=share) for layer, share in density.layers.items()],
        scoring_overhead=density.scoring_overhead,
        sampled_share=density.sampled_share,
    )


def _read_density(message: pb.DensityReport) -> Density:
    layers = {layer.layer: layer.density for layer in message.layers}
    return Density(message.method, message.mean, layers, message.scoring_overhead, message.sampled_share)
