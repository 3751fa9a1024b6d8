"""Parses OpenAI's chat completions and completions.

A field is refused by name if it is unknown or not supported. Null, values without effect (`n: 1`) and labels
(`user`) are accepted. Requests may also have Deltafront's own fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pydantic import Field

from deltafront.service.door.edges.own_fields import TIERS, AskedTier, OwnFields, effort_variables
from deltafront.service.door.edges.tools import check_call_id
from deltafront.service.door.json_body import UNSUPPORTED, BodyRules, Long, Whole, show
from deltafront.service.door.openai.formats import read_constraint
from deltafront.service.door.openai.logprobs import chat_top, text_top
from deltafront.service.door.openai.sampling import SamplingFields, Strict
from deltafront.service.door.openai.tools import ArgumentReader, read_calls, read_tools
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.calls import (
    CompletionRequest,
    Ending,
    Messages,
    Prompt,
    SpecialTokens,
    check_count,
    pack_ids,
)
from deltafront.workers.messages.service_tiers import ServiceTier

_NO_OP_VALUES: Mapping[str, Sequence[object]] = {
    # OpenAI's
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    **dict.fromkeys(("audio", "moderation", "prediction", "reasoning_effort", "web_search_options"), ()),
    # vLLM's
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "truncation_side": ("left", "right"),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "documents": ([],),
    "stream_interval": (1,),
    "watermarking": (False,),
    "routed_experts_prompt_start": (0,),
    "return_mm_kwargs": (True,),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), ({},)),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_token_ids", "return_token_offsets"), (False,)),
    **dict.fromkeys(("return_prompt_text", "request_id", "chat_template", "prompt_embeds"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_logprobs", "logprob_token_ids"), ()),
    "repetition_detection": (),
}
"""Fields that this service or one of its endpoints does not support, with the accepted values, which change
nothing."""
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "verbosity")
"""Fields that are accepted without effect."""
_PART_LABELS = {"cache_control", "prompt_cache_breakpoint"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OWN_MESSAGES = {
    "request_id": "is not read from the body: send the header x-request-id",
}
_DAY_S = 86_400.0
_MAX_PARTS = 4096
_MAX_ANSWERS = 128
_MAX_TEXT_VALUES = 1 << 21
"""A completion's prompt may have a value for each token."""
_RULES = BodyRules(_LABELS, _NO_OP_VALUES, _OWN_MESSAGES, ("messages", "prompt", "chat_template_kwargs"))


class StreamOptions(Strict):
    """OpenAI's options of a stream, vLLM's `continuous_usage_stats`, and `include_progress` of our own."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_progress: bool = False
    include_obfuscation: Literal[False] = False


class _CommonFields(OwnFields, SamplingFields):
    """Fields of both endpoints."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    session_id: str | None = None
    session_ttl_s: float | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] = "in_memory"
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    n: Whole | None = None
    best_of: Whole | None = None
    service_tier: AskedTier = "auto"
    priority: Whole = 0


class _ChatFields(_CommonFields):
    messages: Long[dict[str, Any]]
    max_completion_tokens: Whole | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = False
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    logprobs: Any = None
    top_logprobs: Whole | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class _TextFields(_CommonFields):
    prompt: Any
    special_tokens: Literal["parse", "text"] = "parse"
    add_special_tokens: bool = True
    logprobs: Any = None
    echo: bool = False


def read_chat(body: bytes, model: str) -> tuple[CompletionRequest, StreamOptions | None]:
    """Parse a chat completion request. Raises InvalidArgument or UnknownModel."""
    fields = _RULES.read(_ChatFields, body, model)
    messages = read_messages(fields.messages)
    limits = {fields.max_tokens, fields.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidArgument("max_tokens", "contradicts max_completion_tokens: give one of them")
    kept = len(messages) if fields.session_id is None else 0
    if kept and fields.session_ttl_s is not None:
        kept -= 1
        if not kept:
            raise InvalidArgument("session_ttl_s", "keeps all messages but the last: give two or more")
    appended = messages[kept:]
    chat = partial(
        Prompt,
        None,
        chat_template_kwargs={**effort_variables(fields.reasoning_effort), **fields.chat_template_kwargs},
        add_special_tokens=fields.add_special_tokens,
        tools=read_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls),
        ending=_ending(fields),
    )
    prompt = chat(messages[:kept]) if fields.session_id is None else None
    append = chat(appended) if appended or fields.session_id is not None else None
    top = chat_top(fields.logprobs, fields.top_logprobs)
    return _request(fields, next(iter(limits), None), top, prompt, append)


def read_text(body: bytes, model: str) -> tuple[CompletionRequest, StreamOptions | None]:
    """Parse a completion request. Raises InvalidArgument or UnknownModel."""
    fields = _RULES.read(_TextFields, body, model, _MAX_TEXT_VALUES)
    prompt, *more = (
        replace(
            one,
            special_tokens=SpecialTokens(fields.special_tokens),
            add_special_tokens=fields.add_special_tokens,
        )
        for one in _prompts(fields.prompt)
    )
    first, append = (prompt, None) if fields.session_id is None else (None, prompt)
    top = text_top(fields.logprobs)
    request, options = _request(fields, fields.max_tokens, top, first, append, more)
    if fields.echo:
        _check_echo(fields, scores=top is not None or fields.max_tokens == 0, answers=request.choices)
    return replace(request, echo=fields.echo), options


def _ending(fields: _ChatFields) -> Ending:
    if fields.continue_final_message and fields.add_generation_prompt:
        raise InvalidArgument("continue_final_message", "needs add_generation_prompt: false, as with vLLM")
    if fields.continue_final_message:
        return Ending.OPEN
    return Ending.ANSWER if fields.add_generation_prompt else Ending.CLOSED


def _check_echo(fields: _CommonFields, scores: bool, answers: int) -> None:
    if fields.session_id is not None:
        raise InvalidArgument("echo", "needs the whole prompt: leave session_id out")
    if scores and fields.session_ttl_s is not None:
        raise InvalidArgument("echo", "with log-probabilities keeps no session: leave session_ttl_s out")
    if scores and answers > 1:
        raise InvalidArgument("echo", "with log-probabilities gives one answer: leave n and best_of out")


def _request(
    fields: _CommonFields,
    max_tokens: int | None,
    top_logprobs: int | None,
    prompt: Prompt | None,
    append: Prompt | None,
    more_prompts: Sequence[Prompt] = (),
) -> tuple[CompletionRequest, StreamOptions | None]:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidArgument("stream_options", "needs stream: true")
    retain_s = retention_s(fields.prompt_cache_retention, fields.retain_s)
    shown, choices = _choices(fields, 1 + len(more_prompts))
    request = CompletionRequest(
        prompt=prompt,
        more_prompts=tuple(more_prompts),
        choices=choices,
        shown=shown,
        session_id=fields.session_id,
        append=append,
        sampling=replace(fields.params(max_tokens), top_logprobs=top_logprobs),
        session_ttl=fields.session_ttl_s,
        constraint=read_constraint(fields.response_format, fields.structured_outputs),
        service_tier=_tier(fields),
        **{**fields.request_fields(), "retain_s": retain_s},
    )
    return request, (fields.stream_options or StreamOptions()) if fields.stream else None


def _tier(fields: _CommonFields) -> ServiceTier | None:
    """Return the service tier that a request asks for, by name or by vLLM's `priority`, of which less is
    earlier. Raises InvalidArgument."""
    by_name = TIERS[fields.service_tier]
    if not fields.priority:
        return by_name
    by_number = ServiceTier.PRIORITY if fields.priority < 0 else ServiceTier.FLEX
    if by_name not in (None, by_number):
        raise InvalidArgument("priority", "contradicts service_tier: give one of them")
    return by_number


def _choices(fields: _CommonFields, prompts: int) -> tuple[int, int]:
    """Return how many answers of a prompt are shown, and how many are made. Raises InvalidArgument."""
    shown = 1 if fields.n is None else fields.n
    made = shown if fields.best_of is None else fields.best_of
    for name, count in (("n", shown), ("best_of", made)):
        if count < 1 or count * prompts > _MAX_ANSWERS:
            raise InvalidArgument(
                name, f"{count} must be at least 1, and at most {_MAX_ANSWERS} for all prompts"
            )
    if made < shown:
        raise InvalidArgument("best_of", f"{made} must be at least n, {shown}")
    if fields.stream and made > shown:
        raise InvalidArgument("best_of", "chooses among whole answers: leave stream out")
    if fields.session_ttl_s is not None and made * prompts > 1:
        raise InvalidArgument("session_ttl_s", "keeps the prompt of one answer: send one prompt, and n 1")
    if fields.session_id is not None and prompts > 1:
        raise InvalidArgument("prompt", "holds several: send one a request after a session")
    return shown, made


def retention_s(retention: str, retain_s: float | None) -> float | None:
    """Return how long to retain a prompt, by OpenAI's field or our own. Raises InvalidArgument."""
    if retention != "24h":
        return retain_s
    if retain_s not in (None, _DAY_S):
        raise InvalidArgument("retain_s", "contradicts prompt_cache_retention: give one of them")
    return _DAY_S


def read_messages(given: Sequence[Mapping[str, Any]]) -> Messages:
    """Read a chat's messages. Raises InvalidArgument."""
    check_count("messages", len(given))
    reader = ArgumentReader()
    return tuple(_message(f"messages[{index}]", message, reader) for index, message in enumerate(given))


def _message(name: str, message: Mapping[str, Any], reader: ArgumentReader) -> Mapping[str, Any]:
    """Parse a message. Nulls and empty lists are ignored, because OpenAI's client sends them with earlier
    answers."""
    given = {field: value for field, value in message.items() if value is not None and value != []}
    given.pop("name", None)  # names would tell users apart; chats here have one
    role, content = given.pop("role", None), given.pop("content", None)
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidArgument(f"{name}.role", f"{show(role)} must be one of {', '.join(_ROLES)}")
    more: dict[str, Any] = {}
    if role == "assistant":
        for field in ("reasoning", "reasoning_content"):  # earlier reasoning is not prefilled
            given.pop(field, None)
        if "tool_calls" in given:
            more["tool_calls"] = read_calls(f"{name}.tool_calls", given.pop("tool_calls"), reader)
            content = "" if content is None else content
    if role == "tool":
        more["tool_call_id"] = check_call_id(f"{name}.tool_call_id", given.pop("tool_call_id", None))
    for field in given:
        raise InvalidArgument(f"{name}.{field}", UNSUPPORTED)
    return {"role": role, "content": _text(f"{name}.content", content), **more}


def _text(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(name, "must be text")
    if len(content) > _MAX_PARTS:
        raise InvalidArgument(name, f"has {len(content)} parts: at most {_MAX_PARTS}")
    for index, part in enumerate(content):
        keys = part.keys() - _PART_LABELS if isinstance(part, dict) else ()
        if keys != {"type", "text"} or part["type"] != "text":
            raise InvalidArgument(f"{name}[{index}]", "must be a part of type text: others are not read")
        if not isinstance(part["text"], str):
            raise InvalidArgument(f"{name}[{index}].text", "must be text")
    return "".join(part["text"] for part in content)


def _prompts(given: object) -> list[Prompt]:
    several = isinstance(given, list) and given and isinstance(given[0], str | list)
    return [_prompt(one) for one in (given if isinstance(given, list) and several else [given])]


def _prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if not isinstance(prompt, list):
        raise InvalidArgument("prompt", "must be text or token ids")
    if not all(type(id) is int and 0 <= id < 1 << 32 for id in prompt):
        raise InvalidArgument("prompt", "token ids must be whole numbers from 0 on")
    return Prompt(token_ids=pack_ids(prompt))
