"""Kinds of documents with questions whose answers stand in them, as token ids; and prose without questions.

Needles and haystacks come from `workers.calibration.probes`, which calibration reads too.

Each task is a function of a seeded generator, the tokens wanted, the number of things hidden and the text
they are hidden in. The kinds are RULER's (Hsieh et al. 2024): single and multi-key needles, several values
for one key, variable chains; in forms that a small model answers, so that dense attention does not fail by
itself: SmolLM2-135M does not list all values of a key or all variables of a chain, so any one value is
right, and a chain is asked for link by link.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from deltafront.workers.calibration import needles as hay
from deltafront.workers.calibration.probes import (
    Document,
    Text,
    haystack,
    hidden_in,
    joined,
    needles,
    questions_of,
)

Item = TypeVar("Item")
VALUES = 4
"""Numbers of one key in `values`, assignments from variable to variable of one chain in `chains`."""


Task = Callable[[random.Random, int, int, Text], Document]


def prose(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Nothing hidden and nothing asked: for the perplexity of the document's tail."""
    del count
    return Document(joined(text.take(rng, tokens)), [])


def values(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """`count` keys of several numbers each, in text. Any of a key's numbers is a right answer."""
    found = hay.make_needles(count, rng.getrandbits(32))
    keyed = [[(n.key, str(rng.randint(1_000_000, 9_999_999))) for _ in range(VALUES)] for n in found]
    hidden = [hay.Needle(key, number, "number") for key, number in _mixed(rng, keyed)]
    ids, facts = hidden_in(rng, tokens, [needle.sentence for needle in hidden], text)
    return Document(ids, questions_of([(n.key, n.question, f" {n.value}") for n in hidden], text), facts)


def chains(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """`count` chains of assignments from variable to variable; each assignment is asked for."""
    names = set[str]()
    while len(names) < count * (VALUES + 1):
        names.add("".join(rng.choices(string.ascii_uppercase, k=5)))
    order, facts, asked = rng.sample(sorted(names), len(names)), [], []
    for first, value in enumerate(rng.sample(range(10_000, 100_000), count)):
        chain = order[first * (VALUES + 1) : (first + 1) * (VALUES + 1)]
        links = list(itertools.pairwise(chain))
        facts.append([f"VAR {chain[0]} = {value}.", *(f"VAR {new} = VAR {old}." for old, new in links)])
        asked += [(new, f"\nVAR {new} = VAR", f" {old}") for old, new in links]
    ids, places = hidden_in(rng, tokens, _mixed(rng, facts), text)
    return Document(ids, questions_of(asked, text), places)


TASKS: Mapping[str, Task] = {
    "needles": needles,
    "haystack": haystack,
    "values": values,
    "chains": chains,
    "prose": prose,
}


def _mixed(rng: random.Random, lists: Sequence[Sequence[Item]]) -> list[Item]:
    """The lists' items in random order, those of one list in theirs."""
    turns = [which for which, items in enumerate(lists) for _ in items]
    rng.shuffle(turns)
    left = [iter(items) for items in lists]
    return [next(left[which]) for which in turns]
