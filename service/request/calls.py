"""Requests, and calls, which are checked requests."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ...workers.messages.methods import MethodSpec
from ...workers.messages.requests import PageSelection, Sampling

Messages = tuple[Mapping[str, str], ...]
"""Each has a role and a content."""


class SpecialTokens(StrEnum):
    """How a text that spells control tokens is read."""

    TEXT = "text"
    PARSE = "parse"


@dataclass(frozen=True)
class Prompt:
    """Exactly one of three forms.

    Args:
        token_ids: little-endian uint32.
        special_tokens: for `text`. Messages never spell control tokens.
    """

    text: str | None = field(default=None, repr=False)
    messages: Messages | None = field(default=None, repr=False)
    token_ids: bytes | None = field(default=None, repr=False)
    special_tokens: SpecialTokens = SpecialTokens.TEXT
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class SamplingParams:
    """Unchecked. None takes the server's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class AttentionMethod:
    """Unchecked. Without a name the server's default."""

    name: str = ""
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillRequest:
    """`session_ttl` is in seconds, `deadline` in seconds since the epoch. With `retain_s` 0 the prompt is not
    remembered."""

    prompt: Prompt | None = None
    attention: AttentionMethod = AttentionMethod()
    session_ttl: float | None = None
    deadline: float | None = None
    request_id: str = ""
    cache_salt: str = ""
    retain_s: float | None = None
    skip_cache: bool = False


@dataclass(frozen=True)
class GenerateRequest(PrefillRequest):
    """`answered_ids` are little-endian uint32. They arrived before a connection was lost."""

    session_id: str | None = None
    append: Prompt | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    page_selection: PageSelection = PageSelection.DEFAULT
    recompute_blocks: int | None = None
    answered_ids: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked request.

    Args:
        sampling: a Prefill has `max_tokens` 0.
        fit_max_tokens: shrink the default `max_tokens` to the positions that are left.
        keep_ttl_s: how long the prompt stays as a session; 0 makes none.
        retain_s: how long to remember it rather than others; None: not at all.
        skip_cache: read all of it, whatever is remembered.
        trace: the W3C `traceparent` above this request.
    """

    request_id: str
    owner: str
    prompt: Prompt | None = None
    session_id: str | None = None
    append: Prompt | None = None
    method: MethodSpec
    sampling: Sampling
    stop: tuple[str, ...] = ()
    page_selection: PageSelection = PageSelection.DEFAULT
    recompute_blocks: int = 0
    keep_ttl_s: float = 0.0
    deadline: float | None = None
    answered: tuple[int, ...] = ()
    fit_max_tokens: bool = False
    cache_salt: str = ""
    retain_s: float | None = 0.0
    skip_cache: bool = False
    trace: str = ""

    @property
    def prefill_only(self) -> bool:
        return self.sampling.max_tokens == 0


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack as little-endian uint32. Ray's platforms all have an I of 4 bytes."""
    return array("I", ids).tobytes()
