"""Requests as clients send them, and `Call`, a checked request."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deltafront.kernels.methods import MethodSpec
from deltafront.service.errors import InvalidArgument
from deltafront.workers.messages.requests import PageSelection, RequestOptions, Sampling
from deltafront.workers.messages.service_tiers import ServiceTier

MAX_MESSAGES = 4096
Messages = tuple[Mapping[str, Any], ...]
"""Messages with a role and a content. An assistant's message may have `tool_calls`, a tool's message a
`tool_call_id`."""


class SpecialTokens(StrEnum):
    """Treatment of control tokens that are spelled in a text prompt."""

    TEXT = "text"
    PARSE = "parse"


class Ending(StrEnum):
    """The end of a rendered conversation, before its answer."""

    ANSWER = "answer"
    """After the generation prompt, the template's beginning of an assistant's message."""
    CLOSED = "closed"
    """After the last message, without a generation prompt."""
    OPEN = "open"
    """Inside the last message, which the answer continues (vLLM's `continue_final_message`)."""


@dataclass(frozen=True)
class Tools:
    """Functions that an answer may call.

    Args:
        functions: Each has a `name`, and perhaps a `description` and `parameters`, a JSON schema.
        choice: `auto`, `required`, or the name of the one to call.
        parallel: True if an answer may call several functions.
    """

    functions: tuple[Mapping[str, Any], ...]
    choice: str = "auto"
    parallel: bool = True


@dataclass(frozen=True)
class Prompt:
    """A prompt in exactly one of three forms: text, messages or token ids.

    Args:
        token_ids: Little-endian uint32.
        special_tokens: For `text`. In messages, control tokens are never parsed.
        add_special_tokens: True to add the tokenizer's leading tokens, such as BOS. None: for text but not
            for messages, whose template writes them.
        reasons: True if the answer may reason before it follows a constraint or calls a tool.
        ending: The end of rendered messages, before the answer.
    """

    text: str | None = field(default=None, repr=False)
    messages: Messages | None = field(default=None, repr=False)
    token_ids: bytes | None = field(default=None, repr=False)
    special_tokens: SpecialTokens = SpecialTokens.TEXT
    add_special_tokens: bool | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    tools: Tools | None = field(default=None, repr=False)
    reasons: bool = False
    ending: Ending = Ending.ANSWER


@dataclass(frozen=True)
class SamplingParams:
    """Unchecked sampling parameters. None: the server's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True)
class AttentionMethod:
    """An unchecked attention method with options. No name: the server's default."""

    name: str = ""
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillRequest:
    """A request to prefill a prompt and keep it as a session.

    Args:
        session_ttl: Seconds.
        deadline: Seconds since the epoch.
        retain_s: Seconds to retain the prompt in the prefix cache; 0: do not cache it; None: cache it,
            evictable at once.
        service_tier: None: the default of `Caller.tier`.
    """

    prompt: Prompt | None = None
    attention: AttentionMethod = AttentionMethod()
    session_ttl: float | None = None
    deadline: float | None = None
    request_id: str = ""
    cache_salt: str = ""
    retain_s: float | None = None
    skip_cache: bool = False
    service_tier: ServiceTier | None = None


@dataclass(frozen=True)
class Constraint:
    """A constraint on an answer, in exactly one form.

    Args:
        json_schema: JSON.
        grammar: llguidance's Lark, or GBNF.
        choice: Texts of which the answer is one.
    """

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None


@dataclass(frozen=True)
class GenerateRequest(PrefillRequest):
    """A request for an answer.

    Args:
        answered_ids: Little-endian uint32 of tokens that the client received before it lost its connection.
        parse_answer: For gRPC: split the answer into reasoning, content and tool calls, too.
    """

    session_id: str | None = None
    append: Prompt | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    page_selection: PageSelection = PageSelection.DEFAULT
    recompute_blocks: int | None = None
    answered_ids: bytes = field(default=b"", repr=False)
    constraint: Constraint | None = field(default=None, repr=False)
    parse_answer: bool = False

    @property
    def tools(self) -> Tools | None:
        return tools_of(self.prompt, self.append)

    @property
    def has_form(self) -> bool:
        """True if the answer must follow a constraint, or a tool choice other than `auto`."""
        return self.constraint is not None or (self.tools is not None and self.tools.choice != "auto")


@dataclass(frozen=True)
class CompletionRequest(GenerateRequest):
    """A request of OpenAI's API, for one or several answers.

    Args:
        choices: Number of answers of each prompt.
        shown: Number of each prompt's answers that the client gets, the likeliest.
        more_prompts: Prompts to answer beside `prompt`, with the same options.
        echo: True if the prompt comes before its answer, with log-probabilities if the answer has them.
    """

    echo: bool = False
    choices: int = 1
    shown: int = 1
    more_prompts: tuple[Prompt, ...] = field(default=(), repr=False)

    @property
    def answers(self) -> int:
        return self.choices * (1 + len(self.more_prompts))


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked request.

    Args:
        sampling: A Prefill has `max_tokens` 0.
        constraint: The run compiles this constraint into a grammar in `options`.
        fit_max_tokens: True to reduce `max_tokens` to the positions that are left.
        options: With a `keep_ttl_s` of 0 the prompt makes no session.
        remembers: True if the prompt enters the prefix cache when the request ends.
        retain_s: Seconds during which other cached blocks are evicted first.
        skip_cache: Prefill the whole prompt, even if the prefix cache has a part of it.
        echo: True if the prompt comes before its answer, which may have no token then.
    """

    request_id: str
    owner: str
    prompt: Prompt | None = None
    session_id: str | None = None
    append: Prompt | None = None
    method: MethodSpec
    sampling: Sampling
    options: RequestOptions
    stop: tuple[str, ...] = ()
    answered: tuple[int, ...] = ()
    constraint: Constraint | None = field(default=None, repr=False)
    fit_max_tokens: bool = False
    cache_salt: str = ""
    remembers: bool = True
    retain_s: float = 0.0
    skip_cache: bool = False
    echo: bool = False

    @property
    def prefill_only(self) -> bool:
        return self.sampling.max_tokens == 0 and not self.echo


def tools_of(prompt: Prompt | None, append: Prompt | None) -> Tools | None:
    """Return the tools that an answer may call: those of the last prompt or appended text."""
    last = append or prompt
    return None if last is None else last.tools


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32."""
    return array("I", ids).tobytes()


def check_count(name: str, messages: int) -> None:
    """Check the number of messages, before they are parsed. Raises InvalidArgument."""
    if messages > MAX_MESSAGES:
        raise InvalidArgument(name, f"{messages} are too many: at most {MAX_MESSAGES}")
