"""Plans a load: which caller sends which prompt at which time. Nothing here does I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Tokens of a block, as in the public traces."""


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        session: The conversation. Only turns of one session share tokens.
        blocks: Ids of the prompt's blocks. Within a session the same id has the same tokens. The prompt ends
            after `tokens` tokens, inside the last block or at its end.
        answer: Tokens of the answer.
        think_s: Seconds from the end of the caller's last answer to this request.
        part: The part of the load to which this request belongs. Reports show each part separately.
    """

    session: int
    blocks: Sequence[int]
    tokens: int
    answer: int
    think_s: float = 0.0
    part: str = ""


Session = Sequence[Turn]


@dataclass(frozen=True)
class Caller:
    """Sends turns one after the other. start_s: when it sends the first, in seconds since the load began."""

    start_s: float
    turns: Iterable[Turn]


def prompt(session: int, tokens: int, answer: int, part: str = "") -> Turn:
    """Plan a prompt that shares no tokens with any other."""
    return Turn(session, range(-(-tokens // BLOCK)), tokens, answer, part=part)


def together(prompts: int, tokens: int, answer: int) -> list[Caller]:
    """Plan prompts that are all sent at once."""
    return [Caller(0.0, [prompt(n, tokens, answer)]) for n in range(prompts)]


def beside_a_long_prompt() -> list[Caller]:
    """Plan eight chats, a long prompt after 3 s and a short one after 4 s."""
    chats = [Caller(0.0, [prompt(n, 1024, 600, "chat")]) for n in range(8)]
    return [
        *chats,
        Caller(3.0, [prompt(8, 131_072, 16, "long")]),
        Caller(4.0, [prompt(9, 1024, 16, "late")]),
    ]


def mixed() -> Mapping[str, list[Caller]]:
    """Plan the mixed loads by name."""
    return {
        "1x32768": together(1, 32_768, 16),
        "1x131072": together(1, 131_072, 16),
        "10x32768": together(10, 32_768, 128),
        "64x512": together(64, 512, 128),
        "64x2048": together(64, 2048, 128),
        "16x8192": together(16, 8192, 256),
        "32x8192": together(32, 8192, 512),
        "beside_131072": beside_a_long_prompt(),
    }


def agents(sessions: Sequence[Session], callers: int) -> list[Caller]:
    """Plan callers that hold one session after the other, without end.

    Caller i holds sessions i, i + callers, and so on. When all sessions were held, they come again with other
    tokens, so that the prefix cache does not know them.
    """

    def turns(caller: int) -> Iterator[Turn]:
        for number in itertools.count(caller, callers):
            yield from _numbered(sessions[number % len(sessions)], number)

    return [Caller(0.0, turns(caller)) for caller in range(callers)]


def arriving(sessions: Sequence[Session], rate: float, seconds: float, seed: int) -> list[Caller]:
    """Plan a Poisson process: `rate` sessions per second begin on average, for `seconds` seconds."""
    times = poisson(rate, seconds, seed)
    return [
        Caller(at, _numbered(sessions[number % len(sessions)], number)) for number, at in enumerate(times)
    ]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process, in order and below `seconds`."""
    random, now = np.random.default_rng(seed), 0.0
    times: list[float] = []
    while (now := now + float(random.exponential(1 / rate))) < seconds:
        times.append(now)
    return times


def short_prompts(count: int, seed: int) -> list[Session]:
    """Plan single prompts of 512 to 32,768 tokens and answers of 16 to 256, both log-uniform."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.uniform(math.log(512), math.log(32_768), count)).astype(int).tolist()
    answers = np.exp(random.uniform(math.log(16), math.log(256), count)).astype(int).tolist()
    return [[prompt(n, *both)] for n, both in enumerate(zip(lengths, answers, strict=True))]


def shrunk(callers: Iterable[Caller], by: int) -> list[Caller]:
    """Divide the lengths of prompts and answers, for small machines."""

    def small(turn: Turn) -> Turn:
        return replace(turn, tokens=max(1, turn.tokens // by), answer=max(2, turn.answer // by))

    return [Caller(caller.start_s, map(small, caller.turns)) for caller in callers]


def token_ids(turn: Turn, seed: int, vocabulary: int) -> NDArray[np.uint64]:
    """Return a prompt's token ids, below `vocabulary`. They look random, but depend only on the arguments."""
    blocks = np.asarray(turn.blocks, np.int64)
    positions = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()[: turn.tokens].astype(np.uint64)
    origin = np.random.SeedSequence([seed, turn.session]).generate_state(1, np.uint64)
    return _mixed(positions ^ origin) % np.uint64(vocabulary)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit integers as SplitMix64 does."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _numbered(session: Session, number: int) -> list[Turn]:
    return [replace(turn, session=number) for turn in session]
