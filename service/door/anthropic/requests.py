"""Parses requests of Anthropic's Messages API.

As in OpenAI's API, a field is refused by name if it is unknown, or would change the answer in an unsupported
way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from deltafront.service.door.anthropic.blocks import BlockReader
from deltafront.service.door.edges.own_fields import OwnFields
from deltafront.service.door.edges.tools import choose, function_of
from deltafront.service.door.json_body import BodyRules, Long, Whole, pick, show
from deltafront.service.door.openai.sampling import Strict, new_seed
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.calls import (
    Constraint,
    GenerateRequest,
    Prompt,
    SamplingParams,
    Tools,
    check_count,
)
from deltafront.workers.messages.service_tiers import ServiceTier

_RULES = BodyRules(
    labels=("metadata", "betas", "anthropic_beta", "inference_geo"),
    no_op_values={
        "speed": ("standard",),
        "mcp_servers": ([],),
        "container": (),
    },
    long_fields=("messages", "system", "tools", "chat_template_kwargs"),
)
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_OWN_TOOLS = "custom"
_THINKING: Mapping[str, Mapping[str, bool]] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": {},
}
"""The chat template's variables for each type of `thinking`, named as in Qwen's and other templates."""


class _MessageFields(OwnFields, Strict):
    model: str | None = None
    messages: Long[dict[str, Any]]
    max_tokens: Whole | None = None
    system: Any = ""
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    tools: Long[dict[str, Any]] = Field(default_factory=list)
    tool_choice: dict[str, Any] = Field(default_factory=lambda: {"type": "auto"})
    thinking: dict[str, Any] = Field(default_factory=lambda: {"type": "adaptive"})
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] = Field(default_factory=dict)
    output_config: dict[str, Any] = Field(default_factory=dict)
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    service_tier: Literal["auto", "standard_only"] = "auto"


def read_message(body: bytes, model: str) -> tuple[GenerateRequest, bool]:
    """Return the request, and whether its answer is streamed. Raises InvalidArgument or UnknownModel."""
    fields = _RULES.read(_MessageFields, body, model)
    if fields.max_tokens is None:
        raise InvalidArgument("max_tokens", "is missing")
    return _request(fields, fields.max_tokens), fields.stream


def read_count(body: bytes, model: str) -> GenerateRequest:
    """Parse a request to count tokens. Raises InvalidArgument or UnknownModel."""
    return _request(_RULES.read(_MessageFields, body, model), 1)


def _request(fields: _MessageFields, max_tokens: int) -> GenerateRequest:
    check_count("messages", len(fields.messages))
    _check_context(fields.context_management)
    reader = BlockReader()
    reader.note_cache("cache_control", fields.cache_control)
    reader.add_system(fields.system)
    for index, message in enumerate(fields.messages):
        reader.add(f"messages[{index}]", message)
    if fields.messages and fields.messages[-1].get("role") == "assistant":
        last = f"messages[{len(fields.messages) - 1}]"
        raise InvalidArgument(last, "is the assistant's: this server continues no message; end with a user's")
    tools = _tools(fields, reader)
    own = fields.request_fields()
    if own["retain_s"] is None:
        own["retain_s"] = reader.retain_s
    return GenerateRequest(
        prompt=Prompt(
            messages=tuple(reader.messages),
            chat_template_kwargs={**_thinking(fields.thinking), **fields.chat_template_kwargs},
            tools=tools,
            add_special_tokens=False,
        ),
        sampling=SamplingParams(
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            seed=new_seed(),
            stop=tuple(fields.stop_sequences),
            max_tokens=max_tokens,
        ),
        constraint=_constraint(fields),
        service_tier=None if fields.service_tier == "auto" else ServiceTier.DEFAULT,
        **own,
    )


def _tools(fields: _MessageFields, reader: BlockReader) -> Tools | None:
    functions = []
    for index, tool in enumerate(fields.tools):
        path = f"tools[{index}]"
        if tool.get("type") not in (None, _OWN_TOOLS):
            said = f"{show(tool['type'])} is a tool that this server does not know"
            raise InvalidArgument(f"{path}.type", f"{said}: send its input_schema, without a type")
        reader.note_cache(f"{path}.cache_control", tool.get("cache_control"))
        functions.append(function_of(path, tool, "input_schema"))
    choice = fields.tool_choice
    parallel, kind = choice.get("disable_parallel_tool_use") is not True, choice.get("type")
    if kind == "tool":
        return choose(functions, choice.get("name"), parallel, named=True)
    wanted = pick(_CHOICES, kind)
    if wanted is None:
        raise InvalidArgument("tool_choice.type", f"{show(kind)} must be auto, any, tool or none")
    return choose(functions, wanted, parallel)


def _thinking(said: Mapping[str, Any]) -> Mapping[str, bool]:
    kind = said.get("type")
    variables = pick(_THINKING, kind)
    if variables is None:
        raise InvalidArgument("thinking.type", f"{show(kind)} must be one of {', '.join(_THINKING)}")
    return variables


def _check_context(said: Mapping[str, Any]) -> None:
    """Refuse edits in `context_management`, except `clear_thinking_…`: thinking is never prefilled again.
    Raises InvalidArgument."""
    edits = said.get("edits") or []
    if not isinstance(edits, list):
        raise InvalidArgument("context_management.edits", "must be a list")
    kinds = [edit.get("type") if isinstance(edit, Mapping) else edit for edit in edits]
    for kind in kinds:
        if not (isinstance(kind, str) and kind.startswith("clear_thinking_")):
            raise InvalidArgument("context_management", f"{show(kind)} is not done here: leave it out")


def _constraint(fields: _MessageFields) -> Constraint | None:
    old = fields.output_format is not None
    form = fields.output_format if old else fields.output_config.get("format")
    if form is None:
        return None
    schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
    if not isinstance(schema, Mapping):
        name = "output_format" if old else "output_config.format"
        raise InvalidArgument(name, "must be of type json_schema, with a schema")
    return Constraint(json_schema=json.dumps(schema))
