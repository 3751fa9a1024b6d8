"""What one attempt at a request has to read and may answer; pure.

A prompt and what is appended to it are read as one sequence; of it the first `keep_tokens` become a session
if the client wants one. Tokens that were already streamed before a worker died follow it, so that a replay
goes on where the answer stopped. They are a decode worker's to read: a sparse method of prefill would make
other K/V of them than decoding did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....workers.messages.methods import PAGE_TOKENS, MethodSpec, is_exact
from ....workers.messages.requests import ID_BYTES, recompute_pages
from ...errors import TooLong
from ..calls import packed


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
    *,
    max_tokens: int,
    positions: int,
    answered: Sequence[int] = (),
    keep: bool = False,
    cut: bool = False,
) -> Plan:
    """Plan an attempt.

    Args:
        prompt: little-endian uint32; empty for a session, whose length its worker knows and checks.
        append: what follows prompt or session.
        max_tokens: of the whole answer; 0: the prompt is read, and nothing is answered.
        answered: the part of the answer that the client has.
        keep: make the prompt a session.
        cut: max_tokens is a default, and cut to what the model's positions leave.
    Raises: TooLong if the answer does not fit, or, where it is cut, not even a token of it.
    """
    read = prompt + append
    tokens = len(read) // ID_BYTES
    if tokens + (1 if cut else max_tokens) > positions:
        answer = "an answer" if cut else f"max_tokens of {max_tokens}"
        both = f"{tokens} tokens and {answer} do not fit"
        what = both if cut or max_tokens else f"{tokens} tokens exceed"
        less = "" if cut or tokens >= positions else ", or ask for less"
        raise TooLong(
            "prompt" if prompt else "append", f"{what} the model's {positions} positions: shorten it{less}"
        )
    left = min(max_tokens, positions - tokens) - len(answered)
    if not prompt:
        return Plan(read + packed(answered), left)
    return Plan(read, left, len(prompt) // ID_BYTES if keep else 0, packed(answered))
