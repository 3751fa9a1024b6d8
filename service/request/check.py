"""Checks that turn requests into calls. A refusal names the field as the gRPC contract does."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...workers.messages.methods import MethodError, MethodSpec, reads_whole_prompts
from ...workers.messages.requests import PageSelection, Sampling
from ...workers.model.calibrated.levels import thresholds_for
from ...workers.model.calibrated.profile import Profile
from ...workers.settings import MAX_RECOMPUTE_BLOCKS, PrefillConfig
from ..errors import DeadlineExceeded, InvalidArgument, TooLong
from .calls import Call, GenerateRequest, Messages, PrefillRequest, Prompt, SamplingParams

_MAX_STOPS = 16
_MAX_STOP_BYTES = 256
_MAX_REQUEST_ID = 128
_MAX_SHOWN = 64
_MAX_TOP_K = 1 << 20
MAX_MESSAGES = 4096
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""A message's role → its name in chat templates."""
_MAX_SALT = 128
_OVERRIDDEN_OPTIONS = {"density": ("outside", "tau"), "share": ("outside", "tau")}
"""An option above 0 → the options that it overrides (`kernels.options.ScoredOptions`)."""


@dataclass(frozen=True)
class Limits:
    """Bounds and defaults from the model and the configuration.

    Args:
        longest_token: bytes of text that one token can stand for.
        delta_layers: whether there are any, so that decode can select pages.
    """

    vocabulary: int
    positions: int
    prefill: PrefillConfig
    profile: Profile | None
    default_method: str
    default_max_tokens: int
    default_ttl_s: float
    max_ttl_s: float
    longest_token: int
    delta_layers: bool
    default_recompute_blocks: int

    @property
    def max_characters(self) -> int:
        """Bound the text that fits the model. A character has at least one byte."""
        return self.positions * self.longest_token


def prefill_call(request: PrefillRequest, owner: str, limits: Limits) -> Call:
    """Raises InvalidArgument or DeadlineExceeded."""
    if request.prompt is None:
        raise InvalidArgument("prompt", "is missing: give text, messages or token_ids")
    ttl_s = limits.default_ttl_s if request.session_ttl_s is None else request.session_ttl_s
    return Call(
        request_id=_request_id(request.request_id),
        owner=owner,
        prompt=_prompt("prompt", request.prompt, limits),
        method=_method(request.method, request.options, limits),
        sampling=Sampling(max_tokens=0),
        keep_ttl_s=_ttl(ttl_s, limits),
        deadline=_deadline(request.deadline),
        cache_salt=_cache_salt(request.cache_salt),
    )


def generate_call(request: GenerateRequest, owner: str, limits: Limits) -> Call:
    """Raises InvalidArgument or DeadlineExceeded."""
    _check_source(request)
    return Call(
        request_id=_request_id(request.request_id),
        owner=owner,
        prompt=None if request.prompt is None else _prompt("prompt", request.prompt, limits),
        session_id=request.session_id,
        append=None if request.append is None else _prompt("append", request.append, limits),
        method=_method(request.method, request.options, limits),
        sampling=_sampling(request.sampling, limits),
        stop=_stop(request.sampling.stop),
        page_selection=_page_selection(request.page_selection, limits),
        recompute_blocks=_recompute_blocks(request.recompute_blocks, limits),
        keep_ttl_s=0.0 if request.session_ttl_s is None else _ttl(request.session_ttl_s, limits),
        deadline=_deadline(request.deadline),
        answered=_answered(request, limits),
        fit_max_tokens=request.sampling.max_tokens is None,
        cache_salt=_cache_salt(request.cache_salt),
    )


def _check_source(request: GenerateRequest) -> None:
    if request.session_id is None:
        if request.prompt is None:
            raise InvalidArgument("source", "is missing: give a prompt or a session_id")
        return
    if request.prompt is not None:
        raise InvalidArgument("source", "is both a prompt and a session_id: give one of them")
    if request.append is None:
        raise InvalidArgument("append", "is missing: a session needs something to answer")
    if request.session_ttl_s is not None:
        raise InvalidArgument(
            "session_ttl", "makes a session of a prompt; this request already has a session"
        )
    if request.method or request.options:
        raise InvalidArgument(
            "attention", "applies to a prompt; what is appended to a session is read densely"
        )


def _prompt(name: str, prompt: Prompt, limits: Limits) -> Prompt:
    forms = (prompt.text, prompt.messages, prompt.token_ids)
    given = sum(form is not None for form in forms)
    if given != 1:
        trouble = "is several things at once" if given else "is empty"
        raise InvalidArgument(name, f"{trouble}: give text, messages or token_ids")
    if prompt.text == "":
        raise InvalidArgument(f"{name}.text", "is empty")
    if prompt.text is not None:
        _check_length(name, len(prompt.text), limits)
    if prompt.messages is not None:
        prompt = replace(prompt, messages=_messages(name, prompt.messages))
        _check_length(name, sum(len(message["content"]) for message in prompt.messages or ()), limits)
    if prompt.token_ids is not None:
        _check_token_ids(f"{name}.token_ids", prompt.token_ids, limits)
    return prompt


def _messages(name: str, messages: Messages) -> Messages:
    if not messages:
        raise InvalidArgument(f"{name}.messages", "is empty")
    check_count(f"{name}.messages", len(messages))
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            shown = role if len(role) <= _MAX_SHOWN else role[:_MAX_SHOWN] + "…"
            raise InvalidArgument(
                f"{name}.messages[{index}].role", f"{shown!r} must be one of {', '.join(ROLES)}"
            )
    return tuple({**message, "role": ROLES[message["role"]]} for message in messages)


def _check_length(name: str, characters: int, limits: Limits) -> None:
    if characters > limits.max_characters:
        raise TooLong(
            name,
            f"{characters} characters cannot fit the model's {limits.positions} positions, which hold "
            f"{limits.longest_token} each at most: shorten it",
        )


def check_count(name: str, messages: int) -> None:
    """Raise InvalidArgument for too many messages. Edges call it before they read them."""
    if messages > MAX_MESSAGES:
        raise InvalidArgument(name, f"{messages} are too many: at most {MAX_MESSAGES}")


def _answered(request: GenerateRequest, limits: Limits) -> tuple[int, ...]:
    if not request.answered_ids:
        return ()
    _check_token_ids("answered_ids", request.answered_ids, limits)
    ids = tuple(np.frombuffer(request.answered_ids, dtype="<u4").tolist())
    max_tokens = _sampling(request.sampling, limits).max_tokens
    if len(ids) > max_tokens:
        raise InvalidArgument("answered_ids", f"{len(ids)} tokens are more than max_tokens, {max_tokens}")
    return ids


def _check_token_ids(name: str, packed: bytes, limits: Limits) -> None:
    if not packed:
        raise InvalidArgument(name, "is empty")
    if len(packed) % 4:
        raise InvalidArgument(name, f"{len(packed)} bytes are no multiple of 4: pack little-endian uint32")
    ids = np.frombuffer(packed, dtype="<u4")
    largest = int(ids.max())
    if largest >= limits.vocabulary:
        index = int(ids.argmax())
        raise InvalidArgument(
            name, f"id {largest} at {index} is not below the vocabulary's {limits.vocabulary}"
        )


def _method(name: str, options: Mapping[str, float], limits: Limits) -> MethodSpec:
    try:
        spec = limits.prefill.method(name or limits.default_method, options)
        thresholds_for(limits.profile, spec)
    except MethodError as error:
        field = "attention.name" if error.field == "method" else error.field.replace("method_", "attention.")
        raise InvalidArgument(field, str(error)) from None
    if reads_whole_prompts(spec.name):
        raise InvalidArgument(
            "attention.name", f"{spec.name} needs the whole prompt at once and is not served"
        )
    for option, overridden in _OVERRIDDEN_OPTIONS.items():
        value = spec.values.get(option)
        if value and (useless := [name for name in overridden if name in options]):
            raise InvalidArgument(
                f"attention.options.{useless[0]}",
                f"counts for nothing at {option} = {value}: give {option} = 0 too",
            )
    return spec


def _page_selection(selection: PageSelection, limits: Limits) -> PageSelection:
    if selection is PageSelection.DELTA and not limits.delta_layers:
        raise InvalidArgument("page_selection", "this server has no delta layers configured: use full")
    return selection


def _recompute_blocks(blocks: int | None, limits: Limits) -> int:
    if blocks is None:
        return limits.default_recompute_blocks
    if not 0 <= blocks <= MAX_RECOMPUTE_BLOCKS:
        raise InvalidArgument(
            "recompute_blocks", f"{blocks} must be between 0 (none) and {MAX_RECOMPUTE_BLOCKS}"
        )
    return blocks


def _sampling(params: SamplingParams, limits: Limits) -> Sampling:
    top_p = 1.0 if params.top_p is None else params.top_p
    default = min(limits.default_max_tokens, limits.positions)
    max_tokens = default if params.max_tokens is None else params.max_tokens
    if not math.isfinite(params.temperature) or params.temperature < 0:
        raise InvalidArgument("sampling.temperature", f"{params.temperature} must be a number of at least 0")
    if not (math.isfinite(top_p) and 0 < top_p <= 1):
        raise InvalidArgument("sampling.top_p", f"{top_p} must be above 0 and at most 1")
    if not 0 <= params.top_k <= _MAX_TOP_K:
        raise InvalidArgument("sampling.top_k", f"{params.top_k} must be between 0 (off) and {_MAX_TOP_K}")
    if not 1 <= max_tokens <= limits.positions:
        bounds = f"between 1 and the model's {limits.positions} positions"
        raise InvalidArgument(
            "sampling.max_tokens", f"{max_tokens} must be {bounds}; for no answer use Prefill"
        )
    return Sampling(
        temperature=params.temperature,
        top_p=top_p,
        top_k=params.top_k,
        seed=params.seed,
        max_tokens=max_tokens,
        ignore_eos=params.ignore_eos,
    )


def _stop(stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > _MAX_STOPS:
        raise InvalidArgument("sampling.stop", f"{len(stops)} strings; at most {_MAX_STOPS} are possible")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop.encode()) <= _MAX_STOP_BYTES:
            raise InvalidArgument(f"sampling.stop[{index}]", f"must be 1 to {_MAX_STOP_BYTES} bytes long")
    return stops


def _ttl(seconds: float, limits: Limits) -> float:
    if not 0 < seconds <= limits.max_ttl_s:
        raise InvalidArgument(
            "session_ttl", f"{seconds:g} s must be above 0 and at most the server's {limits.max_ttl_s:g} s"
        )
    return seconds


def _deadline(deadline: float | None) -> float | None:
    if deadline is not None and not deadline > time.time():
        raise DeadlineExceeded("the deadline had passed when the request arrived; compare the clocks")
    return deadline


def _cache_salt(salt: str) -> str:
    if len(salt) > _MAX_SALT:
        raise InvalidArgument("cache_salt", f"must be at most {_MAX_SALT} characters")
    return salt


def _request_id(request_id: str) -> str:
    if not request_id:
        return uuid.uuid4().hex
    if not is_request_id(request_id):
        raise InvalidArgument("request_id", f"must be at most {_MAX_REQUEST_ID} printable characters")
    return request_id


def is_request_id(text: str) -> bool:
    return len(text) <= _MAX_REQUEST_ID and text.isprintable()
