"""What is asked, in two forms: requests as an edge reads them, and calls, which have been checked.

Plain data, free of protobuf and Ray. The Python client makes the same requests that the door reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ...workers.messages.methods import MethodSpec
from ...workers.messages.requests import PageSelection, Sampling

Messages = tuple[Mapping[str, str], ...]
"""role and content of each."""


class SpecialTokens(StrEnum):
    """How a prompt's text that spells control tokens is read: as these, or as what it spells."""

    TEXT = "text"
    PARSE = "parse"


@dataclass(frozen=True)
class Prompt:
    """Exactly one of the three forms. token_ids: little-endian uint32. special_tokens: of text; what messages
    spell is always text."""

    text: str | None = field(default=None, repr=False)
    messages: Messages | None = field(default=None, repr=False)
    token_ids: bytes | None = field(default=None, repr=False)
    special_tokens: SpecialTokens = SpecialTokens.TEXT
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Variables of the chat template beside messages, as JSON."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, unchecked. None: the server's default."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class PrefillRequest:
    """Unchecked. method: empty for the server's default. deadline: seconds since the epoch. request_id: for
    the client's own use; empty: the server makes one. cache_salt: only prompts and sessions of the same one
    share what was read."""

    prompt: Prompt | None = None
    method: str = ""
    options: Mapping[str, float] = field(default_factory=dict)
    session_ttl_s: float | None = None
    deadline: float | None = None
    request_id: str = ""
    cache_salt: str = ""


@dataclass(frozen=True)
class GenerateRequest(PrefillRequest):
    """Unchecked: a prompt or a session_id. append: follows either. answered_ids: little-endian uint32, what
    of this answer arrived before a connection was lost; the rest is asked for. recompute_blocks: None for the
    server's default."""

    session_id: str | None = None
    append: Prompt | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    page_selection: PageSelection = PageSelection.DEFAULT
    recompute_blocks: int | None = None
    answered_ids: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked request; `check.py` makes it.

    Args:
        owner: whose prompt and session it is.
        prompt: what is read first; None for a request that continues a session.
        append: what follows prompt or session.
        sampling: `max_tokens` is 0 for a Prefill, which keeps the prompt and answers nothing.
        cut: `max_tokens` is a default, and cut to what the model's positions leave.
        keep_ttl_s: how long the prompt stays as a session; 0: no session is made.
        deadline: seconds since the epoch.
        answered: the part of the answer that the client has.
        trace: as in `PrefillJob`.
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
    cut: bool = False
    cache_salt: str = ""
    trace: str = ""

    @property
    def prefill_only(self) -> bool:
        return self.sampling.max_tokens == 0


def packed(ids: Sequence[int]) -> bytes:
    """Ids as little-endian uint32 (array's I is 4 bytes on every platform that Ray runs on)."""
    return array("I", ids).tobytes()
