"""OpenAI's requests as plain data: chat completions and completions, as its API reference has them.

A field that asks for what this service does not do is refused by name, and so is one that nobody knows. Taken
are: null, a value that asks for nothing (`n: 1`), and what only labels a request (`user`). The service's own
fields stand beside OpenAI's (`extra_body` of its client).
"""

from __future__ import annotations

import difflib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ...workers.messages.requests import PageSelection
from ..errors import InvalidArgument, NotFound
from ..request.calls import GenerateRequest, Prompt, SamplingParams, SpecialTokens, pack_ids
from ..request.check import check_count

_ASK_FOR_NOTHING: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
"""What OpenAI has and this service has not → the values that do not ask for it."""
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""OpenAI's roles → those that chat templates know."""
_NOT_HERE = "is not supported by this server: leave it out"
_ONE = "asks for more than the limit: this server gives 1 answer a request"
_IN_WORDS = {"n": _ONE, "best_of": _ONE}
"""Refusals of fields that have words of their own instead of _NOT_HERE."""
_SEED_BITS = 64
_MAX_PARTS = 4096
_MAX_VALUES = 1 << 17
"""Values in a conversation's JSON, about. Each takes much more memory than its bytes."""
_MAX_TEXT_VALUES = 1 << 21
"""The same of a completion's, whose prompt may have one for each token."""
_BETWEEN_VALUES = (b",", b":", b"[", b"{")
_QUOTE = ord('"')
_STRING_OR_NOT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[^"]++', re.DOTALL)


class UnknownModel(NotFound):
    """The request names a model that is not served here."""

    def __init__(self, wanted: str, served: str) -> None:
        super().__init__(f"the model {wanted!r} is not served here, but {served!r} is")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _StreamOptions(_Strict):
    """continuous_usage_stats: vLLM's, usage on every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class _Fields(_Strict):
    """What both endpoints take; from `method` on the service's own, as the gRPC contract has them.

    session_id: what is sent follows this session. session_ttl_s: how long to keep what was read as a
    session. timeout_s: until the server gives up. cache_salt: vLLM's.
    """

    model: str
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << _SEED_BITS)] | None = None
    stop: str | list[str] = []
    method: str = ""
    options: dict[str, float] = {}
    session_id: str | None = None
    session_ttl_s: float | None = None
    page_selection: Literal["", "full", "delta"] = ""
    recompute_blocks: int | None = None
    top_k: int = 0
    ignore_eos: bool = False
    cache_salt: str = ""
    timeout_s: Annotated[float, Field(gt=0)] | None = None


class _ChatFields(_Fields):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}


class _TextFields(_Fields):
    prompt: Any
    special_tokens: Literal["parse", "text"] = "parse"


_F = TypeVar("_F", bound=_Fields)


@dataclass(frozen=True)
class Asked:
    """How an answer is wanted. usage: a streamed one ends with a chunk of usage. usage_so_far: every chunk
    has some."""

    stream: bool
    usage: bool
    usage_so_far: bool


def read_chat(body: bytes, model: str, request_id: str) -> tuple[GenerateRequest, Asked]:
    """model: the one that is served. Raises InvalidArgument or UnknownModel."""
    fields = _read(_ChatFields, body, model, _MAX_VALUES)
    check_count("messages", len(fields.messages))
    messages = tuple(_message(f"messages[{place}]", one) for place, one in enumerate(fields.messages))
    limits = {fields.max_tokens, fields.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidArgument("max_tokens", "contradicts max_completion_tokens: give one of them")
    held = len(messages) if fields.session_id is None else 0
    if held and fields.session_ttl_s is not None:
        held -= 1
        if not held:
            raise InvalidArgument("session_ttl_s", "keeps all messages but the last: give two or more")
    follows = messages[held:]
    chat = partial(Prompt, None, chat_template_kwargs=fields.chat_template_kwargs)
    return _asked(
        fields,
        request_id,
        next(iter(limits), None),
        chat(messages[:held]) if fields.session_id is None else None,
        chat(follows) if follows or fields.session_id is not None else None,
    )


def read_text(body: bytes, model: str, request_id: str) -> tuple[GenerateRequest, Asked]:
    """model: the one that is served. Raises InvalidArgument or UnknownModel."""
    fields = _read(_TextFields, body, model, _MAX_TEXT_VALUES)
    prompt = replace(_prompt(fields.prompt), special_tokens=SpecialTokens(fields.special_tokens))
    source, follows = (prompt, None) if fields.session_id is None else (None, prompt)
    return _asked(fields, request_id, fields.max_tokens, source, follows)


def _asked(
    fields: _Fields, request_id: str, max_tokens: int | None, prompt: Prompt | None, append: Prompt | None
) -> tuple[GenerateRequest, Asked]:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidArgument("stream_options", "needs stream: true")
    request = GenerateRequest(
        prompt=prompt,
        session_id=fields.session_id,
        append=append,
        method=fields.method,
        options=fields.options,
        sampling=SamplingParams(
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            seed=_seed(fields),
            stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
            max_tokens=max_tokens,
            ignore_eos=fields.ignore_eos,
        ),
        page_selection=PageSelection(fields.page_selection),
        recompute_blocks=fields.recompute_blocks,
        session_ttl_s=fields.session_ttl_s,
        deadline=None if fields.timeout_s is None else time.time() + fields.timeout_s,
        request_id=request_id,
        cache_salt=fields.cache_salt,
    )
    options = fields.stream_options or _StreamOptions()
    return request, Asked(fields.stream, options.include_usage, options.continuous_usage_stats)


def _seed(fields: _Fields) -> int:
    """As with OpenAI, who names none is answered differently each time; a greedy answer has no use for it."""
    if fields.seed is not None:
        return fields.seed
    return secrets.randbits(_SEED_BITS) if fields.temperature > 0 else 0


def _read(kind: type[_F], body: bytes, model: str, values: int) -> _F:
    _check_values(body, values)
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidArgument("", f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument("", "the body must be a JSON object")
    given = {name: value for name, value in content.items() if value is not None and name not in _LABELS}
    for name in [name for name in given if name in _ASK_FOR_NOTHING]:
        value = given.pop(name)
        if not any(value == one and type(value) is type(one) for one in _ASK_FOR_NOTHING[name]):
            raise InvalidArgument(name, _IN_WORDS.get(name, _NOT_HERE))
    try:
        fields = kind.model_validate(given)
    except ValidationError as error:
        raise _invalid(error, list(kind.model_fields)) from None
    if fields.model != model:
        raise UnknownModel(fields.model, model)
    return fields


def _check_values(body: bytes, most: int) -> None:
    """Before they are made. What stands in strings does not count. Raises InvalidArgument."""
    if sum(map(body.count, _BETWEEN_VALUES)) <= most:
        return
    values = 0
    for part in _STRING_OR_NOT.finditer(body):
        values += 1 if body[part.start()] == _QUOTE else sum(map(part.group().count, _BETWEEN_VALUES))
        if values > most:
            raise InvalidArgument("", f"the body holds too many values: at most about {most}")


def _invalid(error: ValidationError, known: list[str]) -> InvalidArgument:
    """The first thing that is wrong, with the field's name. Of a field that may be one thing or another,
    the branch that came furthest says what is wrong, or else all of them."""
    errors = error.errors(include_url=False)
    of_first = [one for one in errors if one["loc"][0] == errors[0]["loc"][0]]
    furthest = max(len(_place(one["loc"])) for one in of_first)
    first, *others = [one for one in of_first if len(_place(one["loc"])) == furthest]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _place(first["loc"]))
    name = name.lstrip(".")
    if first["type"] == "missing":
        return InvalidArgument(name, "is missing")
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1)
        return InvalidArgument(name, f"is not known; did you mean {near[0]!r}?" if near else _NOT_HERE)
    same = [one for one in (first, *others) if _place(one["loc"]) == _place(first["loc"])]
    wanted = " or ".join(one["msg"].removeprefix("Input should be ") for one in same)
    return InvalidArgument(name, f"must be {wanted}" if first["msg"] != wanted else wanted)


def _place(loc: tuple[int | str, ...]) -> list[int | str]:
    """Without the names of a union's branches."""
    return [part for part in loc if part not in ("str", "list[str]")]


def _message(where: str, message: Mapping[str, Any]) -> Mapping[str, str]:
    """An answer that OpenAI's client sends back holds nulls and empty lists that mean nothing."""
    given = {name: value for name, value in message.items() if value is not None and value != []}
    role, content = given.pop("role", None), given.pop("content", None)
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidArgument(f"{where}.role", f"{role!r} must be one of {', '.join(_ROLES)}")
    for name in given:
        raise InvalidArgument(f"{where}.{name}", _NOT_HERE)
    return {"role": _ROLES[role], "content": _text(f"{where}.content", content)}


def _text(where: str, content: object) -> str:
    """A message's text, given whole or in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(where, "must be text")
    if len(content) > _MAX_PARTS:
        raise InvalidArgument(where, f"has {len(content)} parts: at most {_MAX_PARTS}")
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise InvalidArgument(f"{where}[{place}]", "must be a part of type text: others are not read")
        if not isinstance(part["text"], str):
            raise InvalidArgument(f"{where}[{place}].text", "must be text")
    return "".join(part["text"] for part in content)


def _prompt(prompt: object) -> Prompt:
    """Text, token ids, or a list of one of these."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidArgument("prompt", f"holds {len(prompt)} prompts: send one a request")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if not isinstance(prompt, list):
        raise InvalidArgument("prompt", "must be text or token ids")
    if not all(type(one) is int and 0 <= one < 1 << 32 for one in prompt):
        raise InvalidArgument("prompt", "token ids must be whole numbers from 0 on")
    return Prompt(token_ids=pack_ids(prompt))
