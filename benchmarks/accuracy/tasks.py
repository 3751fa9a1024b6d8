"""Kinds of documents by name: those with questions, which calibration reads too, and prose without.

Each is a function of a seeded generator, the tokens wanted, the number of things hidden and the text they are
hidden in. `copies` hides nothing: the text itself goes on with what it has said before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from deltafront.workers.calibration.probes import (
    Document,
    Question,
    Text,
    chains,
    haystack,
    joined,
    needles,
    values,
)

CONTINUED = 384
"""Tokens behind a document in which copies are sought."""
CUE, COPIED = 2, 3
"""Tokens of a copy that are given, and those that are asked for."""
NEAR = 1024
"""Last tokens of a document that no copy may be from: a window would know it."""

Task = Callable[[random.Random, int, int, Text], Document]


def prose(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Nothing hidden and nothing asked: for the perplexity of the document's tail."""
    del count
    return Document(joined(text.take(rng, tokens)), [])


def copies(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Natural copying: the text goes on behind the document, up to tokens that stand in the document, behind
    the same cue, and nowhere within its last NEAR tokens or behind them. Nothing in them was generated."""
    ids = joined(text.take(rng, tokens + CONTINUED))
    found = list(copied(ids, tokens))
    chosen = sorted(rng.sample(found, min(count, len(found))))
    questions = [
        Question(f"token {at}", tuple(ids[tokens:at]), tuple(ids[at : at + COPIED])) for at in chosen
    ]
    return Document(ids[:tokens], questions)


def copied(ids: Sequence[int], tokens: int) -> Iterator[int]:
    """Places behind the first `tokens` ids where a copy begins; copies do not overlap."""
    width = CUE + COPIED
    far = {tuple(ids[a : a + width]) for a in range(max(0, tokens - NEAR) - width + 1)}
    near = {tuple(ids[a : a + width]) for a in range(max(0, tokens - NEAR), tokens - width + 1)}
    after, seen = tokens + CUE, tokens - width + 1
    for at in range(tokens + CUE, len(ids) - COPIED + 1):
        while seen < at - CUE:  # what has been said up to the cue is near
            near.add(tuple(ids[seen : seen + width]))
            seen += 1
        said = tuple(ids[at - CUE : at + COPIED])
        if at >= after and said in far and said not in near:
            after = at + COPIED
            yield at


TASKS: Mapping[str, Task] = {
    "needles": needles,
    "haystack": haystack,
    "values": values,
    "chains": chains,
    "prose": prose,
    "copies": copies,
}
