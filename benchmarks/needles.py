"""Needle-in-a-haystack prompts in the bare form that the 128K adapter was trained to answer.

Needles are sentences such as `One of the special magic uuids for amber-falcon is: 1f0c….`, spread over a
text at seeded places; questions ask for them by key. Same form as RULER's NIAH tasks (Hsieh et al. 2024).
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEMO_TEXT = Path(__file__).resolve().parent.parent / "deploy" / "demo" / "moby-dick.txt"

_ADJECTIVES = ("amber", "brisk", "calm", "dusky", "eager", "faded", "gentle", "hollow", "ivory", "jolly")
_NOUNS = ("falcon", "harbor", "lantern", "meadow", "orchard", "pebble", "quarry", "ribbon", "valley", "reef")


@dataclass(frozen=True)
class Needle:
    """One hidden fact. kind: `uuid` or `number`."""

    key: str
    value: str
    kind: str

    @property
    def sentence(self) -> str:
        return f"One of the special magic {self.kind}s for {self.key} is: {self.value}."

    @property
    def question(self) -> str:
        return (
            f"\nWhat is the special magic {self.kind} for {self.key} mentioned in the provided text?"
            f" The special magic {self.kind} for {self.key} mentioned in the provided text is"
        )

    def answered_by(self, answer: str) -> bool:
        """Whether the answer starts with exactly the value."""
        return answer.strip().startswith(self.value)


def make_needles(count: int, seed: int) -> list[Needle]:
    """`count` needles with distinct keys, uuids and numbers in turn."""
    rng = random.Random(seed)
    keys = [f"{a}-{n}" for a in _ADJECTIVES for n in _NOUNS]
    chosen = rng.sample(keys, count)
    return [
        Needle(key, str(uuid.UUID(int=rng.getrandbits(128), version=4)), "uuid")
        if i % 2 == 0
        else Needle(key, str(rng.randint(1_000_000, 9_999_999)), "number")
        for i, key in enumerate(chosen)
    ]


def hide(text: str, needles: list[Needle], seed: int) -> str:
    """The text with each needle after a sentence, evenly spread with seeded jitter."""
    rng = random.Random(seed)
    sentences = text.replace("\n", " ").split(". ")
    share = len(sentences) / max(1, len(needles))
    places = sorted(int((i + rng.random()) * share) for i in range(len(needles)))
    order = rng.sample(needles, len(needles))
    parts, taken = [], 0
    for i, sentence in enumerate(sentences):
        parts.append(sentence.strip())
        while taken < len(places) and places[taken] <= i:
            parts.append(order[taken].sentence.removesuffix("."))
            taken += 1
    return ". ".join(parts) + "."


def document(
    text: str, needles: list[Needle], tokens: int, count_tokens: Callable[[str], int], seed: int
) -> str:
    """A document of at most `tokens` tokens, as long as whole words allow, with all needles in it.

    Raises ValueError if the text is too short.
    """
    if count_tokens(hide(text, needles, seed)) < tokens:
        raise ValueError(f"the text is too short for {tokens} tokens")
    words = text.split(" ")
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(hide(" ".join(words[:middle]), needles, seed)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return hide(" ".join(words[:low]), needles, seed)
