"""Turns the arguments of both clients into protobuf messages."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.client.prompts import PromptLike, check_tools, make_prompt
from deltafront.service.door import wire
from deltafront.service.errors import InvalidArgument
from deltafront.service.request import calls
from deltafront.workers.messages.requests import PageSelection
from deltafront.workers.messages.service_tiers import ServiceTier

_OPTIONAL = (
    *("min_p", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    "top_logprobs",
)


class PrefillOptions(TypedDict, total=False):
    """Arguments of `prefill` and `generate`.

    Attributes:
        method, options: Attention method, such as `dpxa` and {"share": 0.1}. By default the server's.
        session_ttl_s: Seconds for which the session is kept. `generate` keeps one only if this is given.
        timeout_s: Seconds until the request fails with DeadlineExceeded.
        request_id: For `cancel` and the server's audit log. By default random.
        cache_salt: Only requests with the same salt share cached prefixes.
        retain_s: A hint to keep the prompt in the prefix cache for this many seconds; 0: do not cache it.
        skip_cache: Prefill the whole prompt, even if a prefix is cached.
        service_tier: `priority`, `default` or `flex`. By default `default`, or `flex` if the token may ask
            for no better.
        chat_template_kwargs: Variables of the chat template.
        special_tokens: `parse`: control tokens spelled in a text prompt take effect (never in messages). By
            default `text`.
        tools: Functions that the model sees, and an answer may call, in OpenAI's form. They need messages.
        tool_choice: `auto`, `required`, `none`, or the name of the one to call.
        parallel_tool_calls: True if an answer may have several calls.
    """

    method: str
    options: Mapping[str, float] | None
    session_ttl_s: float | None
    timeout_s: float | None
    request_id: str
    cache_salt: str
    retain_s: float | None
    skip_cache: bool
    service_tier: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    special_tokens: str
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool


class GenerateOptions(PrefillOptions, total=False):
    """More arguments of `generate`.

    Attributes:
        session_id, append: A session from `prefill` and the text or messages after it, in place of a prompt.
        max_tokens, temperature, top_p, top_k, seed, stop, ignore_eos, min_p, min_tokens, stop_token_ids,
            logit_bias, frequency_penalty, presence_penalty, repetition_penalty: As in vLLM's SamplingParams.
        top_logprobs: Number of likeliest tokens in each `Token.top`.
        page_selection: `full` or `delta`. By default the server's.
        recompute_blocks: Number of blocks to recompute densely after sparse prefill. By default the server's.
        json_schema, regex, grammar, choice: At most one, which the answer follows. A grammar is llguidance's
            Lark, or GBNF. A choice is a list of texts.
        parse_answer: Yield ParsedToken, with the parts of the answer: reasoning, content and tool calls. With
            tools always.
    """

    session_id: str | None
    append: PromptLike | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    min_p: float | None
    min_tokens: int | None
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float] | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    top_logprobs: int | None
    page_selection: str
    recompute_blocks: int | None
    json_schema: Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    parse_answer: bool


def prefill_request(prompt: PromptLike, **given: Any) -> tuple[Any, float | None]:
    """Make the message of a prefill. Returns it and the deadline, in seconds since the epoch, if any. Raises
    InvalidArgument."""
    _check_names(given, PrefillOptions)
    request = calls.PrefillRequest(prompt=make_prompt(prompt, "prompt", given), **_common(given))
    check_tools(given, request.prompt)
    return wire.write(pb.PrefillRequest, request), request.deadline


def generate_request(prompt: PromptLike | None, **given: Any) -> tuple[Any, float | None]:
    """Make the message of a generate request. Same results and errors as `prefill_request`."""
    _check_names(given, GenerateOptions)
    selection = given.get("page_selection", "")
    if selection not in list(PageSelection):
        raise InvalidArgument("page_selection", f"{selection!r} is not full or delta")
    append = given.get("append")
    request = calls.GenerateRequest(
        prompt=None if prompt is None else make_prompt(prompt, "prompt", given),
        session_id=given.get("session_id"),
        append=None if append is None else make_prompt(append, "append", given),
        sampling=_sampling(given),
        page_selection=PageSelection(selection),
        recompute_blocks=given.get("recompute_blocks"),
        constraint=_constraint(given),
        parse_answer=given.get("parse_answer", False),
        **_common(given),
    )
    check_tools(given, request.append or request.prompt)
    return wire.generate_request(request), request.deadline


def _check_names(given: Mapping[str, Any], options: Any) -> None:
    known = options.__annotations__
    for name in given:
        if name not in known:
            raise TypeError(f"unexpected argument {name!r}; known: {', '.join(sorted(known))}")


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    timeout_s = given.get("timeout_s")
    return {
        "attention": calls.AttentionMethod(given.get("method", ""), given.get("options") or {}),
        "session_ttl": given.get("session_ttl_s"),
        "deadline": None if timeout_s is None else time.time() + timeout_s,
        "request_id": given.get("request_id") or uuid.uuid4().hex,
        "cache_salt": given.get("cache_salt", ""),
        "retain_s": given.get("retain_s"),
        "skip_cache": given.get("skip_cache", False),
        "service_tier": _service_tier(given.get("service_tier")),
    }


def _service_tier(name: str | None) -> ServiceTier | None:
    if name is not None and name not in list(ServiceTier):
        raise InvalidArgument("service_tier", f"{name!r} is not one of {', '.join(ServiceTier)}")
    return None if name is None else ServiceTier(name)


def _constraint(given: Mapping[str, Any]) -> calls.Constraint | None:
    names = ("json_schema", "regex", "grammar", "choice")
    rules = {name: rule for name in names if (rule := given.get(name)) is not None}
    if not rules:
        return None
    if len(rules) > 1:
        raise InvalidArgument("constraint", "must be one schema, regex, grammar or choice")
    ((name, rule),) = rules.items()
    if name == "choice" and isinstance(rule, str):
        raise InvalidArgument("constraint.choice", "must be a list of texts")
    schema = _schema(rule) if name == "json_schema" else None
    return calls.Constraint(schema, rules.get("regex"), rules.get("grammar"), rules.get("choice"))


def _schema(given: Any) -> str:
    try:
        return json.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument("constraint.json_schema", f"is not JSON: {error}") from None


def _sampling(given: Mapping[str, Any]) -> calls.SamplingParams:
    stop = given.get("stop", ())
    return calls.SamplingParams(
        given.get("temperature"),
        given.get("top_p"),
        given.get("top_k"),
        given.get("seed", 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        max_tokens=given.get("max_tokens"),
        ignore_eos=given.get("ignore_eos", False),
        stop_token_ids=tuple(given.get("stop_token_ids", ())),
        logit_bias=given.get("logit_bias") or {},
        **{name: given.get(name) for name in _OPTIONAL},
    )
