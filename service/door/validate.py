"""Protobuf requests to checked plain ones. Every refusal is an InvalidArgument that names the field."""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ...protos.v1 import deltafront_pb2 as pb
from ...workers.messages import (
    MethodError,
    MethodSpec,
    PageSelection,
    Sampling,
    method_spec,
    reads_whole_prompts,
)
from ..errors import DeadlineExceeded, InvalidArgument
from ..request.calls import GenerateCall, PrefillCall, PromptInput

_MAX_STOPS = 16
_MAX_STOP_BYTES = 256
_MAX_REQUEST_ID = 128
_MAX_TOP_K = 1 << 20
_ROLES = 64
_SELECTIONS: dict[int, PageSelection] = {
    pb.PAGE_SELECTION_UNSPECIFIED: PageSelection.DEFAULT,
    pb.PAGE_SELECTION_FULL: PageSelection.FULL,
    pb.PAGE_SELECTION_DELTA: PageSelection.DELTA,
}


@dataclass(frozen=True)
class Limits:
    """What the model and the configuration allow."""

    vocabulary: int
    positions: int
    default_method: str
    default_max_tokens: int
    default_ttl_s: float
    max_ttl_s: float
    delta_decode: bool
    """Whether decode's Δ-layers are configured."""


def prefill_call(request: pb.PrefillRequest, owner: str, limits: Limits) -> PrefillCall:
    """Check a PrefillRequest. Raises InvalidArgument or DeadlineExceeded."""
    if not request.HasField("prompt"):
        raise InvalidArgument("prompt", "is missing: give text, messages or token_ids")
    ttl = _ttl(request.session_ttl, limits) if request.HasField("session_ttl") else limits.default_ttl_s
    return PrefillCall(
        request_id=_request_id(request.request_id),
        owner=owner,
        prompt=_prompt("prompt", request.prompt, limits),
        method=_method(request.attention, limits),
        ttl_s=ttl,
        deadline=_deadline(request.deadline) if request.HasField("deadline") else None,
    )


def generate_call(request: pb.GenerateRequest, owner: str, limits: Limits) -> GenerateCall:
    """Check a GenerateRequest. Raises InvalidArgument or DeadlineExceeded."""
    source = request.WhichOneof("source")
    if source is None:
        raise InvalidArgument("source", "is missing: give a prompt or a session_id")
    if source == "session_id":
        _check_session_request(request)
    return GenerateCall(
        request_id=_request_id(request.request_id),
        owner=owner,
        prompt=_prompt("prompt", request.prompt, limits) if source == "prompt" else None,
        session_id=request.session_id if source == "session_id" else None,
        append=_prompt("append", request.append, limits) if request.HasField("append") else None,
        method=_method(request.attention, limits),
        sampling=_sampling(request.sampling, limits),
        stop=_stop(request.sampling),
        page_selection=_page_selection(request.page_selection, limits),
        keep_ttl_s=_ttl(request.session_ttl, limits) if request.HasField("session_ttl") else 0.0,
        deadline=_deadline(request.deadline) if request.HasField("deadline") else None,
    )


def _check_session_request(request: pb.GenerateRequest) -> None:
    if not request.HasField("append"):
        raise InvalidArgument("append", "is missing: a session needs something to answer")
    if request.HasField("session_ttl"):
        raise InvalidArgument(
            "session_ttl", "makes a session of a prompt; this request already has a session"
        )
    if request.attention.name or request.attention.options:
        raise InvalidArgument(
            "attention", "applies to a prompt; what is appended to a session is read densely"
        )


def _prompt(name: str, prompt: pb.Prompt, limits: Limits) -> PromptInput:
    kind = prompt.WhichOneof("content")
    if kind == "text":
        if not prompt.text:
            raise InvalidArgument(f"{name}.text", "is empty")
        return PromptInput(name, text=prompt.text)
    if kind == "messages":
        return PromptInput(name, messages=_messages(name, prompt.messages))
    if kind == "token_ids":
        return PromptInput(name, token_ids=_token_ids(f"{name}.token_ids", prompt.token_ids, limits))
    raise InvalidArgument(name, "is empty: give text, messages or token_ids")


def _messages(name: str, chat: pb.ChatMessages) -> tuple[dict[str, str], ...]:
    if not chat.messages:
        raise InvalidArgument(f"{name}.messages", "is empty")
    for place, message in enumerate(chat.messages):
        if not message.role or len(message.role) > _ROLES:
            raise InvalidArgument(
                f"{name}.messages[{place}].role", "is empty or too long: user, assistant, …"
            )
    return tuple({"role": message.role, "content": message.content} for message in chat.messages)


def _token_ids(name: str, packed: bytes, limits: Limits) -> bytes:
    if not packed:
        raise InvalidArgument(name, "is empty")
    if len(packed) % 4:
        raise InvalidArgument(name, f"{len(packed)} bytes are no multiple of 4: pack little-endian uint32")
    ids = np.frombuffer(packed, dtype="<u4")
    largest = int(ids.max())
    if largest >= limits.vocabulary:
        place = int(ids.argmax())
        raise InvalidArgument(
            name, f"id {largest} at {place} is not below the vocabulary's {limits.vocabulary}"
        )
    return packed


def _method(attention: pb.AttentionMethod, limits: Limits) -> MethodSpec:
    name = attention.name or limits.default_method
    try:
        spec = method_spec(name, dict(attention.options))
    except MethodError as error:
        field = "attention.name" if error.field == "method" else error.field.replace("method_", "attention.")
        raise InvalidArgument(field, str(error)) from None
    if reads_whole_prompts(spec.name):
        raise InvalidArgument("attention.name", f"{name} needs the whole prompt at once and is not served")
    return spec


def _page_selection(value: int, limits: Limits) -> PageSelection:
    selection = _SELECTIONS.get(value)
    if selection is None:
        raise InvalidArgument("page_selection", f"{value} is not a known value")
    if selection is PageSelection.DELTA and not limits.delta_decode:
        raise InvalidArgument("page_selection", "this server has no delta layers configured: use full")
    return selection


def _sampling(options: pb.SamplingOptions, limits: Limits) -> Sampling:
    top_p = options.top_p if options.HasField("top_p") else 1.0
    wanted = min(limits.default_max_tokens, limits.positions)
    max_tokens = options.max_tokens if options.HasField("max_tokens") else wanted
    if not math.isfinite(options.temperature) or options.temperature < 0:
        raise InvalidArgument("sampling.temperature", f"{options.temperature} must be a number of at least 0")
    if not (math.isfinite(top_p) and 0 < top_p <= 1):
        raise InvalidArgument("sampling.top_p", f"{top_p} must be above 0 and at most 1")
    if not 0 <= options.top_k <= _MAX_TOP_K:
        raise InvalidArgument("sampling.top_k", f"{options.top_k} must be between 0 (off) and {_MAX_TOP_K}")
    if not 1 <= max_tokens <= limits.positions:
        bounds = f"between 1 and the model's {limits.positions} positions"
        raise InvalidArgument(
            "sampling.max_tokens", f"{max_tokens} must be {bounds}; for no answer use Prefill"
        )
    return Sampling(
        options.temperature,
        top_p,
        options.top_k,
        options.seed,
        max_tokens,
        options.ignore_eos,
    )


def _stop(options: pb.SamplingOptions) -> tuple[str, ...]:
    if len(options.stop) > _MAX_STOPS:
        raise InvalidArgument(
            "sampling.stop", f"{len(options.stop)} strings; at most {_MAX_STOPS} are possible"
        )
    for place, stop in enumerate(options.stop):
        if not 1 <= len(stop.encode()) <= _MAX_STOP_BYTES:
            raise InvalidArgument(f"sampling.stop[{place}]", f"must be 1 to {_MAX_STOP_BYTES} bytes long")
    return tuple(options.stop)


def _ttl(ttl: Duration, limits: Limits) -> float:
    seconds = ttl.seconds + ttl.nanos * 1e-9
    if not 0 < seconds <= limits.max_ttl_s:
        raise InvalidArgument(
            "session_ttl", f"{seconds:g} s must be above 0 and at most the server's {limits.max_ttl_s:g} s"
        )
    return seconds


def _deadline(deadline: Timestamp) -> float:
    """Seconds since the epoch. A deadline in the past is not malformed: it is exceeded."""
    if not 0 <= deadline.nanos < 1_000_000_000:
        raise InvalidArgument("deadline", f"nanos {deadline.nanos} must be between 0 and 999999999")
    seconds = deadline.seconds + deadline.nanos * 1e-9
    if seconds <= time.time():
        raise DeadlineExceeded("deadline: has already passed when the request arrived; compare the clocks")
    return seconds


def _request_id(given: str) -> str:
    if not given:
        return uuid.uuid4().hex
    if len(given) > _MAX_REQUEST_ID or not given.isprintable():
        raise InvalidArgument("request_id", f"must be at most {_MAX_REQUEST_ID} printable characters")
    return given
