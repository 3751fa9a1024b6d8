"""What one attempt at a request has to read and may answer; pure.

A prompt and what is appended to it are read as one sequence; of it the first `keep_tokens` become a session
if the client wants one. Tokens that were already streamed before a worker died follow it, so that a replay
goes on where the answer stopped. They are a decode worker's to read: a sparse method of prefill would make
other K/V of them than decoding did.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ...workers.messages.methods import PAGE_TOKENS, MethodSpec, is_exact
from ...workers.messages.requests import ID_BYTES, recompute_pages
from ..errors import TooLong


@dataclass(frozen=True)
class Plan:
    """read_ids: little-endian uint32, what has to be read (appended tokens alone, for a session).
    max_tokens: what may still be generated. keep_tokens: 0 when no session is to be made. answered_ids: of
    the answer, what has been streamed; they follow a prompt's read_ids (a session's have them).
    recompute_blocks: to be computed again before the first token."""

    read_ids: bytes
    max_tokens: int
    keep_tokens: int = 0
    answered_ids: bytes = b""
    recompute_blocks: int = 0

    @property
    def read_tokens(self) -> int:
        return len(self.read_ids) // ID_BYTES

    @property
    def answered_tokens(self) -> int:
        return len(self.answered_ids) // ID_BYTES

    @property
    def all_ids(self) -> bytes:
        """What precedes the next token."""
        return self.read_ids + self.answered_ids

    @property
    def answer_tokens(self) -> int:
        """Of the answer, at most."""
        return self.answered_tokens + self.max_tokens

    @property
    def recompute_tokens(self) -> int:
        """Of a prompt: room for what is computed again, which is not written over what was there."""
        return PAGE_TOKENS * recompute_pages(self.recompute_blocks, self.read_tokens, appended=False)

    def inexact_ids(self, method: MethodSpec) -> bytes:
        """The prompt, where the method makes other K/V of it than exact attention would."""
        return b"" if is_exact(method, self.read_tokens) else self.read_ids


def plan_answer(
    prompt: bytes,
    append: bytes,
    max_tokens: int,
    positions: int,
    streamed: Sequence[int],
    keep: bool,
    cut: bool = True,
) -> Plan:
    """A Generate request. cut: max_tokens is nobody's wish, and cut to what the model's positions leave.

    Raises TooLong if the answer does not fit, or, where it is cut, not even a token of it. For a session
    `prompt` is empty and the session's own length is checked by the worker that knows it.
    """
    read = prompt + append
    tokens = len(read) // ID_BYTES
    if tokens + (1 if cut else max_tokens) > positions:
        answer = "an answer" if cut else f"max_tokens of {max_tokens}"
        what = f"{tokens} tokens and {answer} do not fit the model's {positions} positions: shorten it"
        less = "" if cut or tokens >= positions else ", or ask for less"
        raise TooLong("prompt" if prompt else "append", what + less)
    left = min(max_tokens, positions - tokens) - len(streamed)
    if not prompt:
        return Plan(read + packed(streamed), left)
    return Plan(read, left, len(prompt) // ID_BYTES if keep else 0, packed(streamed))


def plan_session(prompt: bytes, positions: int) -> Plan:
    """A Prefill request: no answer."""
    tokens = len(prompt) // ID_BYTES
    if tokens > positions:
        raise TooLong("prompt", f"{tokens} tokens exceed the model's {positions} positions: shorten it")
    return Plan(prompt, 0, tokens)


def packed(ids: Sequence[int]) -> bytes:
    """Ids as little-endian uint32 (array's I is 4 bytes on every platform that Ray runs on)."""
    return array("I", ids).tobytes()
