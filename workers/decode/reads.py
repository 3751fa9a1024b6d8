"""Plans the prefill that a decode worker does itself before a request's first token. Pure.

The worker prefills appended text in chunks. After a sparse prefill, it may also recompute blocks: the last
tokens of the question select the blocks that they attend to most, these blocks are recomputed with dense
attention, and the last tokens are prefilled again. Without appended text, the prompt's last tokens are the
question.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deltafront.kernels.constants import BLOCK
from deltafront.workers.messages.requests import TAIL_TOKENS, GenerateJob, Reservation, recompute_pages


@dataclass(frozen=True)
class Read:
    """Prefills token ids that begin at position `start`.

    Attributes:
        select_blocks: Number of blocks to select for `Recompute`; 0: none.
        select_among: Only blocks within the request's first `select_among` tokens can be selected.
        targets: The next token after each of `ids`. Their log-probabilities are returned (prompt_logprobs);
            empty: none are.
        top: Number of likeliest tokens that are returned with each target.
    """

    start: int
    ids: Sequence[int]
    select_blocks: int = 0
    select_among: int = 0
    targets: Sequence[int] = ()
    top: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Recompute:
    """Recomputes the blocks that the previous `Read` selected, with dense attention, and prefills `question`
    again in the same pass."""

    question: Read

    @property
    def end(self) -> int:
        return self.question.end


Step = Read | Recompute


def plan_reads(
    kv_tokens: int,
    known_ids: Sequence[int],
    extend_ids: array[int],
    *,
    answered: int,
    chunk: int,
    blocks: int,
    keep_tokens: int = 0,
) -> list[Step]:
    """Plan the steps by which the decode worker prefills the rest of one request.

    Args:
        kv_tokens: Number of tokens whose KV is already in the pages.
        known_ids: The ids of these tokens; empty: no block is recomputed.
        extend_ids: Ids of the tokens to prefill. The last `answered` belong to the answer.
        chunk: Maximum number of tokens of one `Read`.
        blocks: Number of blocks to recompute. None is recomputed if a session keeps all of the appended text.
        keep_tokens: Number of first tokens that become a session. They are never recomputed, since a
            session must not depend on a question.
    """
    asked = len(extend_ids) - answered
    answer = _chunks(kv_tokens + asked, extend_ids[asked:], chunk)
    before, tail = max(asked - min(asked, chunk), keep_tokens - kv_tokens), tail_start(kv_tokens)
    all_kept = 0 < asked <= before
    if not known_ids or all_kept or not recompute_pages(blocks, kv_tokens, appended=asked > 0):
        return [*_chunks(kv_tokens, extend_ids[:asked], chunk), *answer]
    end = Read(kv_tokens + before, extend_ids[before:asked]) if asked else Read(tail, known_ids[tail:])
    first = _chunks(kv_tokens, extend_ids[:before], chunk)
    looking = replace(
        end, select_blocks=blocks, select_among=min(kv_tokens, end.start)
    )  # the decode worker prefilled later tokens densely
    return [*first, looking, Recompute(end), *answer]


def scored(steps: Iterable[Step], prompt: Sequence[int], top: int, since: int = 0) -> Iterator[Step]:
    """Return the steps, changed to also return the prompt tokens' log-probabilities (`prompt_logprobs`), each
    with the `top` likeliest tokens. The steps must prefill the whole prompt. Steps that end before position
    `since` return none."""
    for step in steps:
        assert isinstance(step, Read), "nothing is recomputed where a worker prefills the whole prompt"
        targets = prompt[step.start + 1 : step.end + 1] if step.end >= since else ()
        yield replace(step, targets=targets, top=top)


def next_layers(read: int, here: int, layers: int) -> range:
    """Choose the layers that a `Read` computes next, while KV arrives layer by layer; empty: wait for more
    KV.

    A part takes at least half of the remaining layers, and at least two unless only one remains. Each part
    delays other requests' tokens, so a `Read` has few parts. It ends soon after the last layer's KV arrives.

    Args:
        read: Number of layers computed so far.
        here: Number of layers whose KV has arrived.
        layers: Number of layers of the model.
    """
    left = layers - read
    return range(read, here) if here - read >= max(min(left, 2), left / 2) else range(0)


def tail_start(tokens: int) -> int:
    return max(0, tokens - TAIL_TOKENS) // BLOCK * BLOCK


def _chunks(start: int, ids: array[int], chunk: int) -> Iterator[Read]:
    for at in range(0, len(ids), chunk):
        yield Read(start + at, ids[at : at + chunk])


def prompt_ids(reservation: Reservation, packed: bytes, vocab: int) -> bytes:
    """Check and return `packed`: the ids (little-endian uint32) of the tokens before the appended text.

    Raises:
        ValueError: The number of ids is wrong, or one is outside the vocabulary.
    """
    ids = np.frombuffer(packed, dtype="<u4")
    before = reservation.prefix_tokens + (0 if reservation.reads else reservation.new_tokens)
    if len(ids) not in (0, before) or (len(ids) and reservation.session_id is not None):
        raise ValueError(f"the ids of {len(ids)} tokens came with a prompt of {before}")
    _check_ids(ids, vocab)
    return packed


def appended_ids(reservation: Reservation, job: GenerateJob, vocab: int) -> array[int]:
    """Check a job against its reservation, and return the ids to prefill. Raises ValueError if they
    differ."""
    new_tokens, least = job.sampling.max_tokens, int(reservation.options.prompt_logprobs is None)
    if not least <= new_tokens <= reservation.max_tokens:
        bounds = f"{least} .. {reservation.max_tokens}"
        raise ValueError(f"max_tokens {new_tokens} must be {bounds}, which was reserved")
    ids = np.frombuffer(job.extend_ids, dtype="<u4")
    expected = reservation.new_tokens if reservation.reads else reservation.resume_tokens
    if len(ids) == 0 and reservation.reads:
        raise ValueError("a session or prefix can only be continued with at least one appended token")
    if len(ids) != expected:
        raise ValueError(f"{len(ids)} appended tokens, but {expected} were reserved")
    _check_ids(ids, vocab)
    _check_ids(np.frombuffer(job.distinct_ids, dtype="<u4"), vocab)
    return array("I", ids.tolist())


def _check_ids(ids: np.ndarray[Any, Any], vocab: int) -> None:
    if len(ids) and int(ids.max()) >= vocab:
        raise ValueError(f"token id {int(ids.max())} is outside the vocabulary of {vocab}")
