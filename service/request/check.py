"""Requests to calls: bounds, what excludes what, defaults, method options, deadlines.

The same checks for every edge. Every refusal is an InvalidArgument that names the field as the contract
calls it.
"""

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
_UNREAD = {"density": ("outside", "tau"), "share": ("outside", "tau")}
"""Options that another one, above 0, takes the place of (`kernels.options.ScoredOptions`)."""


@dataclass(frozen=True)
class Limits:
    """What the model and the configuration allow."""

    vocabulary: int
    positions: int
    prefill: PrefillConfig
    """For the defaults of methods' options."""
    profile: Profile | None
    """The model's: the densities that can be asked for."""
    default_method: str
    default_max_tokens: int
    default_ttl_s: float
    max_ttl_s: float
    longest_token: int
    """Bytes of text that the tokenizer makes one of at most."""
    delta_layers: bool
    """Whether any are configured, so that decode can select pages."""
    default_recompute_blocks: int

    @property
    def most_characters(self) -> int:
        """That can fit the model."""
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
        cut=request.sampling.max_tokens is None,
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
    for place, message in enumerate(messages):
        if message["role"] not in ROLES:
            shown = shortened(message["role"])
            raise InvalidArgument(
                f"{name}.messages[{place}].role", f"{shown!r} must be one of {', '.join(ROLES)}"
            )
    return tuple({**message, "role": ROLES[message["role"]]} for message in messages)


def _check_length(name: str, characters: int, limits: Limits) -> None:
    """A character is at least a byte. Raises TooLong."""
    if characters > limits.most_characters:
        raise TooLong(
            name,
            f"{characters} characters cannot fit the model's {limits.positions} positions, which hold "
            f"{limits.longest_token} each at most: shorten it",
        )


def check_count(name: str, messages: int) -> None:
    """Edges ask before they read so many. Raises InvalidArgument."""
    if messages > MAX_MESSAGES:
        raise InvalidArgument(name, f"{messages} are too many: at most {MAX_MESSAGES}")


def shortened(text: str) -> str:
    """For showing what somebody sent."""
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _answered(request: GenerateRequest, limits: Limits) -> tuple[int, ...]:
    if not request.answered_ids:
        return ()
    _check_token_ids("answered_ids", request.answered_ids, limits)
    ids = tuple(np.frombuffer(request.answered_ids, dtype="<u4").tolist())
    most = _sampling(request.sampling, limits).max_tokens
    if len(ids) > most:
        raise InvalidArgument("answered_ids", f"{len(ids)} tokens are more than max_tokens, {most}")
    return ids


def _check_token_ids(name: str, packed: bytes, limits: Limits) -> None:
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
    for rule, unread in _UNREAD.items():
        amount = spec.values.get(rule)
        if amount and (idle := [name for name in unread if name in options]):
            raise InvalidArgument(
                f"attention.options.{idle[0]}",
                f"counts for nothing at {rule} = {amount}: give {rule} = 0 too",
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
    for place, stop in enumerate(stops):
        if not 1 <= len(stop.encode()) <= _MAX_STOP_BYTES:
            raise InvalidArgument(f"sampling.stop[{place}]", f"must be 1 to {_MAX_STOP_BYTES} bytes long")
    return stops


def _ttl(seconds: float, limits: Limits) -> float:
    if not 0 < seconds <= limits.max_ttl_s:
        raise InvalidArgument(
            "session_ttl", f"{seconds:g} s must be above 0 and at most the server's {limits.max_ttl_s:g} s"
        )
    return seconds


def _deadline(deadline: float | None) -> float | None:
    """A deadline in the past is not malformed: it is exceeded."""
    if deadline is not None and not deadline > time.time():
        raise DeadlineExceeded("the deadline had passed when the request arrived; compare the clocks")
    return deadline


def _cache_salt(given: str) -> str:
    if len(given) > _MAX_SALT:
        raise InvalidArgument("cache_salt", f"must be at most {_MAX_SALT} characters")
    return given


def _request_id(given: str) -> str:
    if not given:
        return uuid.uuid4().hex
    if not fit_id(given):
        raise InvalidArgument("request_id", f"must be at most {_MAX_REQUEST_ID} printable characters")
    return given


def fit_id(given: str) -> bool:
    """Whether it can be a request's id."""
    return len(given) <= _MAX_REQUEST_ID and given.isprintable()
