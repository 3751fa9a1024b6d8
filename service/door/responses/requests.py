"""Parses requests of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from deltafront.service.door.edges.own_fields import TIERS, AskedTier, OwnFields, effort_variables
from deltafront.service.door.edges.tools import choose, function_of
from deltafront.service.door.json_body import BodyRules, Long, Whole, show
from deltafront.service.door.openai.requests import retention_s
from deltafront.service.door.openai.sampling import SamplingFields, Strict
from deltafront.service.door.responses.items import Message, joined, read_items, with_instructions
from deltafront.service.door.responses.store import ResponseStore, StoredResponse
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.calls import (
    Constraint,
    GenerateRequest,
    Prompt,
    Tools,
    check_count,
)
from deltafront.service.request.check import MAX_TOP_LOGPROBS

_RULES = BodyRules(
    labels=("user", "safety_identifier", "prompt_cache_key", "max_tool_calls", "client_metadata"),
    no_op_values={
        "background": (False,),
        "truncation": ("disabled",),
        "context_management": ([],),
        **dict.fromkeys(("conversation", "prompt", "moderation"), ()),
    },
    long_fields=("input", "tools", "chat_template_kwargs"),
)
_LOGPROBS = "message.output_text.logprobs"
_HINTS = ("effort", "summary", "generate_summary")


class _StreamOptions(Strict):
    include_obfuscation: bool = False
    include_progress: bool = False


class ResponseFields(OwnFields, SamplingFields):
    """The fields of a request for a response."""

    model: str | None = None
    input: Any = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_output_tokens: Whole | None = None
    tools: Long[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field(default_factory=dict)
    reasoning: dict[str, Any] = Field(default_factory=dict)
    include: list[str] = Field(default_factory=list)
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    metadata: dict[str, str] = Field(default_factory=dict)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] = "in_memory"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    service_tier: AskedTier = "auto"

    @property
    def logprobs(self) -> int | None:
        """The number of likeliest tokens in each entry; None: no log-probabilities."""
        return self.top_logprobs if _LOGPROBS in self.include else None


@dataclass(frozen=True)
class AskedResponse:
    """A parsed request. `messages`: the conversation so far, including previous responses, without
    instructions."""

    fields: ResponseFields
    request: GenerateRequest
    messages: list[Message]


def read_response(
    body: bytes, model: str, store: ResponseStore, owner: str, found: StoredResponse | None = None
) -> AskedResponse:
    """Parse a body. Raises InvalidArgument, UnknownModel or UnknownResponse.

    Args:
        found: The previous response, if it is not in the store.
    """
    fields = _RULES.read(ResponseFields, body, model)
    effort = _effort(fields)
    messages = list[Message]()
    if fields.previous_response_id is not None:
        messages += (found or store.get(fields.previous_response_id, owner)).messages
    messages = joined([*messages, *read_items(fields.input)])
    check_count("input", len(messages))
    own = fields.request_fields()
    own["retain_s"] = retention_s(fields.prompt_cache_retention, fields.retain_s)
    request = GenerateRequest(
        prompt=Prompt(
            messages=tuple(with_instructions(fields.instructions, messages)),
            chat_template_kwargs={**effort_variables(effort), **fields.chat_template_kwargs},
            tools=_tools(fields),
            add_special_tokens=False,
        ),
        sampling=replace(fields.params(fields.max_output_tokens), top_logprobs=fields.logprobs),
        constraint=_constraint(fields.text),
        service_tier=TIERS[fields.service_tier],
        **own,
    )
    return AskedResponse(fields, request, messages)


def _effort(fields: ResponseFields) -> str | None:
    """Return the amount of reasoning, and check the other hints. Raises InvalidArgument."""
    for name in fields.reasoning.keys() - {*_HINTS}:
        raise InvalidArgument(f"reasoning.{name}", "is not known")
    effort = fields.reasoning.get("effort")
    if not (effort is None or isinstance(effort, str)):
        raise InvalidArgument("reasoning.effort", "must be text")
    return effort


def _tools(fields: ResponseFields) -> Tools | None:
    functions = []
    for index, tool in enumerate(fields.tools):
        kind, path = tool.get("type"), f"tools[{index}]"
        if kind != "function":
            refusal = f"{show(kind)} is not run or constrained by this server: send tools of type function"
            raise InvalidArgument(f"{path}.type", refusal)
        functions.append(function_of(path, tool))
    choice = fields.tool_choice
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            refusal = f"{show(choice.get('type'))} must be function, or a text: none, auto or required"
            raise InvalidArgument("tool_choice.type", refusal)
        return choose(functions, choice.get("name"), False, named=True)
    if choice not in ("none", "auto", "required"):
        raise InvalidArgument("tool_choice", "must be none, auto, required or a function of tools")
    return choose(functions, choice, fields.parallel_tool_calls)


def _constraint(text: Mapping[str, Any]) -> Constraint | None:
    for name in text.keys() - {"format", "verbosity"}:
        raise InvalidArgument(f"text.{name}", "is not known")
    form = text.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(json_schema=json.dumps({"type": "object"}))
    if kind != "json_schema":
        raise InvalidArgument("text.format.type", f"{show(kind)} must be text, json_object or json_schema")
    if not isinstance(form.get("schema"), Mapping):
        raise InvalidArgument("text.format.schema", "must be a JSON schema")
    return Constraint(json_schema=json.dumps(form["schema"]))
