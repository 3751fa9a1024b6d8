"""Checks requests and turns each into a `Call`. A refusal names the field as in gRPC."""

import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafront.kernels.methods import MethodError, MethodSpec, reads_whole_prompts
from deltafront.service.errors import DeadlineExceeded, InvalidArgument, TooLong, shown
from deltafront.service.request.calls import (
    AttentionMethod,
    Call,
    CompletionRequest,
    Constraint,
    GenerateRequest,
    Messages,
    PrefillRequest,
    Prompt,
    SamplingParams,
    check_count,
)
from deltafront.workers.messages.requests import PageSelection, RequestOptions, Sampling
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.settings import MAX_RECOMPUTE_BLOCKS, PrefillConfig

_MAX_STOPS = 16
_MAX_STOP_BYTES = 256
_MAX_REQUEST_ID = 128
_MAX_NAME = 256
_MAX_OPTIONS = 256
_MAX_TOP_K = 1 << 20
_MAX_IDS = 1024
_MAX_BIAS = 100
MAX_TOP_LOGPROBS = 20
_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": lambda top_k: max(int(top_k), 0),  # some files have -1 for off
    "min_p": float,
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Names of the messages' roles in chat templates."""
_MAX_SALT = 128
_MAX_RETAIN_S = 7 * 86_400.0
_OVERRIDING_OPTIONS = ("density", "share")
"""If one of these options is above 0, `tau` and `outside` have no effect (`kernels.options.ScoredOptions`).
"""


@dataclass(frozen=True)
class Limits:
    vocabulary: int
    positions: int
    prefill: PrefillConfig
    profile: Profile | None
    default_method: str
    default_options: Mapping[str, float]
    default_ttl_s: float
    max_ttl_s: float
    longest_token: int
    delta_layers: bool
    default_recompute_blocks: int
    default_sampling: Sampling
    recomputes: bool = True
    """False for a model whose layers have states, which recomputes no blocks."""

    @property
    def max_characters(self) -> int:
        """The most characters of a text within the limits. A character has at least one byte."""
        return self.positions * self.longest_token


def checked_call(request: PrefillRequest, owner: str, limits: Limits) -> Call:
    """Check a request and turn it into a `Call`. Raises InvalidArgument or DeadlineExceeded."""
    if isinstance(request, GenerateRequest):
        return _generate_call(request, owner, limits)
    _require(request.prompt is not None, "prompt", "is missing: give text, messages or token_ids")
    if request.session_ttl is None:
        request = replace(request, session_ttl=limits.default_ttl_s)
    return _common(request, owner, limits, Sampling(max_tokens=0))


def _generate_call(request: GenerateRequest, owner: str, limits: Limits) -> Call:
    _check_source(request)
    possible = request.page_selection is not PageSelection.DELTA or limits.delta_layers
    _require(possible, "page_selection", "this server has no delta layers configured: use full")
    echo = isinstance(request, CompletionRequest) and request.echo
    call = _common(request, owner, limits, _sampling(request.sampling, limits, least=0 if echo else 1))
    blocks = _recompute_blocks(request.recompute_blocks, limits)
    return replace(
        call,
        session_id=request.session_id,
        append=_prompt("append", request.append, limits),
        stop=_stop(request.sampling.stop),
        options=replace(
            call.options,
            page_selection=request.page_selection,
            recompute_blocks=blocks,
            prompt_logprobs=_prompt_logprobs(request.sampling) if echo else None,
        ),
        echo=echo,
        constraint=_constraint(request.constraint),
        answered=_answered(request.answered_ids, call.sampling.max_tokens, limits),
        fit_max_tokens=request.sampling.max_tokens is None,
    )


def _common(request: PrefillRequest, owner: str, limits: Limits, sampling: Sampling) -> Call:
    salt_fits = len(request.cache_salt) <= _MAX_SALT
    _require(salt_fits, "cache_salt", f"must be at most {_MAX_SALT} characters")
    bounds = f"must be at most {_MAX_REQUEST_ID} printable characters"
    _require(is_request_id(request.request_id), "request_id", bounds)
    ttl_s = 0.0 if request.session_ttl is None else _ttl(request.session_ttl, limits)
    call = Call(
        request_id=request.request_id or uuid.uuid4().hex,
        owner=owner,
        prompt=_prompt("prompt", request.prompt, limits),
        method=_method(request.attention, limits),
        sampling=sampling,
        options=RequestOptions(
            keep_ttl_s=ttl_s,
            deadline=request.deadline,
            service_tier=request.service_tier or ServiceTier.DEFAULT,
        ),
        cache_salt=request.cache_salt,
        remembers=request.retain_s != 0,
        retain_s=_retain_s(request.retain_s),
        skip_cache=request.skip_cache,
    )
    if request.deadline is not None and not request.deadline > time.time():
        raise DeadlineExceeded("the deadline had passed when the request arrived; compare the clocks")
    return call


def _require(valid: bool, field: str, message: str) -> None:
    if not valid:
        raise InvalidArgument(field, message)


def _check_source(request: GenerateRequest) -> None:
    if request.session_id is None:
        _require(request.prompt is not None, "source", "is missing: give a prompt or a session_id")
        return
    _require(request.prompt is None, "source", "is both a prompt and a session_id: give one of them")
    _require(request.append is not None, "append", "is missing: a session needs something to answer")
    no_ttl = "makes a session of a prompt; this request already has a session"
    _require(request.session_ttl is None, "session_ttl", no_ttl)
    no_method = "applies to a prompt; what is appended to a session is read densely"
    _require(not (request.attention.name or request.attention.options), "attention", no_method)
    no_prompt = "needs the prompt's tokens, which a session does not keep: use presence_penalty"
    penalty = request.sampling.repetition_penalty
    _require(penalty in (None, 1), "sampling.repetition_penalty", no_prompt)


def _constraint(constraint: Constraint | None) -> Constraint | None:
    given = [] if constraint is None else [rule for rule in vars(constraint).values() if rule is not None]
    forms = "must be one schema, regex, grammar or choice"
    _require(constraint is None or len(given) == 1, "constraint", forms)
    choice = None if constraint is None else constraint.choice
    texts = "must be a list of texts, none of them empty"
    _require(choice is None or (len(choice) > 0 and all(choice)), "constraint.choice", texts)
    return constraint


def _prompt(name: str, prompt: Prompt | None, limits: Limits) -> Prompt | None:
    if prompt is None:
        return None
    given = sum(form is not None for form in (prompt.text, prompt.messages, prompt.token_ids))
    trouble = "is several things at once" if given else "is empty"
    _require(given == 1, name, f"{trouble}: give text, messages or token_ids")
    _require(prompt.text != "", f"{name}.text", "is empty")
    if prompt.text is not None:
        _check_length(name, len(prompt.text), limits)
    if prompt.messages is not None:
        prompt = replace(prompt, messages=_messages(name, prompt.messages))
        _check_length(name, sum(len(message["content"]) for message in prompt.messages or ()), limits)
    if prompt.token_ids is not None:
        _token_ids(f"{name}.token_ids", prompt.token_ids, limits)
    return prompt


def _messages(name: str, messages: Messages) -> Messages:
    _require(len(messages) > 0, f"{name}.messages", "is empty")
    check_count(f"{name}.messages", len(messages))
    for index, message in enumerate(messages):
        role = message["role"]
        message_name = f"{name}.messages[{index}].role"
        _require(role in ROLES, message_name, f"{shown(role)} must be one of {', '.join(ROLES)}")
    return tuple({**message, "role": ROLES[message["role"]]} for message in messages)


def _check_length(name: str, characters: int, limits: Limits) -> None:
    if characters > limits.max_characters:
        raise TooLong(
            name,
            f"{characters} characters cannot fit the model's {limits.positions} positions, which hold "
            f"{limits.longest_token} each at most: shorten it",
        )


def _answered(packed: bytes, limit: int, limits: Limits) -> tuple[int, ...]:
    if not packed:
        return ()
    count = len(packed) // 4
    _require(count <= limit, "answered_ids", f"{count} tokens are more than max_tokens, {limit}")
    return tuple(_token_ids("answered_ids", packed, limits).tolist())


def _token_ids(name: str, packed: bytes, limits: Limits) -> npt.NDArray[np.uint32]:
    size = len(packed)
    _require(size > 0, name, "is empty")
    _require(not size % 4, name, f"{size} bytes are no multiple of 4: pack little-endian uint32")
    ids = np.frombuffer(packed, dtype="<u4")
    largest, index = int(ids.max()), int(ids.argmax())
    outside = f"id {largest} at {index} is not below the vocabulary's {limits.vocabulary}"
    _require(largest < limits.vocabulary, name, outside)
    return ids


def _method(attention: AttentionMethod, limits: Limits) -> MethodSpec:
    named = len(attention.name) <= _MAX_NAME and all(len(name) <= _MAX_NAME for name in attention.options)
    _require(named, "attention", f"names of methods and options have at most {_MAX_NAME} characters")
    _require(len(attention.options) <= _MAX_OPTIONS, "attention.options", f"at most {_MAX_OPTIONS} are taken")
    named_one = attention.name or attention.options
    options = attention.options if named_one else limits.default_options
    try:
        spec = limits.prefill.method(attention.name or limits.default_method, options)
        thresholds_for(limits.profile, spec)
    except MethodError as error:
        field = "attention.name" if error.field == "method" else error.field.replace("method_", "attention.")
        raise InvalidArgument(field, str(error)) from None
    whole_prompts = f"{spec.name} needs the whole prompt at once and is not served"
    _require(not reads_whole_prompts(spec.name), "attention.name", whole_prompts)
    for option in _OVERRIDING_OPTIONS:
        value = spec.values.get(option)
        for useless in ("outside", "tau"):
            message = f"counts for nothing at {option} = {value}: give {option} = 0 too"
            _require(not value or useless not in attention.options, f"attention.options.{useless}", message)
    return spec


def _recompute_blocks(blocks: int | None, limits: Limits) -> int:
    if blocks is None:
        return limits.default_recompute_blocks
    bounds = f"{blocks} must be between 0 (none) and {MAX_RECOMPUTE_BLOCKS}"
    _require(0 <= blocks <= MAX_RECOMPUTE_BLOCKS, "recompute_blocks", bounds)
    _require(
        limits.recomputes or not blocks,
        "recompute_blocks",
        "must be 0 with linear attention or rolling buffers",
    )
    return blocks


def _prompt_logprobs(params: SamplingParams) -> int | None:
    """Return the number of likeliest tokens for each token of an echoed prompt; None: no log-probabilities. A
    request without an answer (max_tokens 0) always gets them, at least with 0."""
    return params.top_logprobs or 0 if params.max_tokens == 0 else params.top_logprobs


def _sampling(params: SamplingParams, limits: Limits, least: int = 1) -> Sampling:
    given = {name: value for name, value in vars(params).items() if value is not None and name != "stop"}
    sampling = replace(limits.default_sampling, **given)
    _check_sampling(sampling)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits)
    _check_ids("sampling.logit_bias", sampling.logit_bias, limits)
    for token, bias in sampling.logit_bias.items():
        bounds = f"{bias} of token {token} must be between -{_MAX_BIAS} and {_MAX_BIAS}"
        _require(abs(bias) <= _MAX_BIAS, "sampling.logit_bias", bounds)
    if sampling.max_tokens > limits.positions:
        more = f"{sampling.max_tokens} is more than the model's {limits.positions} positions"
        raise TooLong("sampling.max_tokens", f"{more}: ask for less")
    bounds = f"{sampling.max_tokens} must be at least {least}"
    _require(sampling.max_tokens >= least, "sampling.max_tokens", bounds)
    bounds = f"{sampling.min_tokens} must be between 0 and max_tokens, {sampling.max_tokens}"
    _require(0 <= sampling.min_tokens <= sampling.max_tokens, "sampling.min_tokens", bounds)
    return sampling if sampling.temperature else replace(sampling, seed=0)  # greedy answers draw nothing


def model_sampling(generation: Mapping[str, Any], neutral: Sampling) -> Sampling:
    """Read sampling parameters from generation_config.json. With `do_sample: false` they are greedy, whatever
    else it says.

    Raises:
        TypeError, ValueError: A value is wrong.
    """
    sampled = generation.get("do_sample")
    if sampled is False:
        return neutral
    assumed = {"temperature": 1.0} if sampled else {}  # like transformers, if the file enables sampling
    said = {**assumed, **generation}
    given = {name: kind(said[name]) for name, kind in _KINDS.items() if said.get(name) is not None}
    try:
        _check_sampling(found := replace(neutral, **given))
    except InvalidArgument as error:
        raise ValueError(error.message) from None
    return found


def _check_sampling(sampling: Sampling) -> None:
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    warm = math.isfinite(temperature) and temperature >= 0
    _require(warm, "sampling.temperature", f"{temperature} must be a number of at least 0")
    _require(0 < top_p <= 1, "sampling.top_p", f"{top_p} must be above 0 and at most 1")
    bounds = f"{top_k} must be between 0 (off) and {_MAX_TOP_K}"
    _require(0 <= top_k <= _MAX_TOP_K, "sampling.top_k", bounds)
    _require(0 <= sampling.min_p <= 1, "sampling.min_p", f"{sampling.min_p} must be between 0 (off) and 1")
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = getattr(sampling, name)
        _require(-2 <= penalty <= 2, f"sampling.{name}", f"{penalty} must be between -2 and 2")
    penalty = sampling.repetition_penalty
    above = math.isfinite(penalty) and penalty > 0
    _require(above, "sampling.repetition_penalty", f"{penalty} must be a number above 0")
    bounds = f"{sampling.top_logprobs} must be between 0 and {MAX_TOP_LOGPROBS}"
    _require(0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS, "sampling.top_logprobs", bounds)


def _check_ids(name: str, ids: Collection[int], limits: Limits) -> None:
    _require(len(ids) <= _MAX_IDS, name, f"has {len(ids)} tokens: at most {_MAX_IDS}")
    for token in ids:
        known = 0 <= token < limits.vocabulary
        _require(known, name, f"{token} is no token id: they go from 0 to {limits.vocabulary - 1}")


def _stop(stops: tuple[str, ...]) -> tuple[str, ...]:
    count = len(stops)
    _require(count <= _MAX_STOPS, "sampling.stop", f"{count} strings; at most {_MAX_STOPS} are possible")
    for index, stop in enumerate(stops):
        fits = 1 <= len(stop.encode()) <= _MAX_STOP_BYTES
        _require(fits, f"sampling.stop[{index}]", f"must be 1 to {_MAX_STOP_BYTES} bytes long")
    return stops


def _ttl(seconds: float, limits: Limits) -> float:
    bounds = f"{seconds:g} s must be above 0 and at most the server's {limits.max_ttl_s:g} s"
    _require(0 < seconds <= limits.max_ttl_s, "session_ttl", bounds)
    return seconds


def _retain_s(seconds: float | None) -> float:
    if seconds is None:
        return 0.0
    _require(0 <= seconds <= _MAX_RETAIN_S, "retain_s", f"{seconds:g} s must be 0 to {_MAX_RETAIN_S:g} s")
    return seconds


def is_request_id(text: str) -> bool:
    """Return whether a client may use this text as a request id. Empty means that it gives none."""
    return len(text) <= _MAX_REQUEST_ID and text.isprintable()
