"""Kinds of documents by name: those with questions, which calibration reads too, and prose without.

Each is a function of a seeded generator, the tokens wanted, the number of things hidden and the text they are
hidden in. `copies` and `names` hide nothing: the text itself goes on with what it has said before.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from deltafront.benchmarks.accuracy import ruler
from deltafront.benchmarks.reader import SpelledText
from deltafront.workers.calibration.probes import (
    Document,
    Question,
    chains,
    haystack,
    joined,
    needles,
    values,
)

CONTINUED, NAMES_CONTINUED = 384, 768
"""Tokens behind a document in which copies are sought, and names, which are rarer."""
CUE, COPIED = 2, 3
"""Tokens of a copy that are given, and those that are asked for."""
NEAR = 1024
"""Last tokens of a document that no copy may be from: a window would know it."""

NAME = re.compile(r"(?<![A-Za-z])[A-Z][a-z]{2,}(?![A-Za-z])")

Task = Callable[[random.Random, int, int, SpelledText], Document]


def prose(rng: random.Random, tokens: int, count: int, text: SpelledText) -> Document:
    """Nothing hidden and nothing asked: for the perplexity of the document's tail."""
    del count
    return Document(joined(text.take(rng, tokens)), [])


def copies(rng: random.Random, tokens: int, count: int, text: SpelledText) -> Document:
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


def names(rng: random.Random, tokens: int, count: int, text: SpelledText) -> Document:
    """Names of several tokens: the text goes on behind the document, up to the first token of a name that
    stands in the document, and nowhere within its last NEAR tokens or behind them. The rest is asked for."""
    ids = joined(text.take(rng, tokens + NAMES_CONTINUED))
    found = list(named(text.spell(ids), tokens))
    chosen = sorted(rng.sample(found, min(count, len(found))))
    questions = [
        Question(f"token {first}", tuple(ids[tokens : first + 1]), tuple(ids[first + 1 : stop]))
        for first, stop in chosen
    ]
    return Document(ids[:tokens], questions)


def named(spelled: Sequence[str], tokens: int) -> Iterator[tuple[int, int]]:
    """First token of a name behind the first `tokens`, and the one behind it. A name is a capitalised word
    that the text does not have in lower case."""
    starts = list(accumulate(map(len, spelled), initial=0))
    whole = "".join(spelled)
    token_at = {starts[i] + (spelled[i][:1] == " "): i for i in range(len(spelled))}
    stop_at = {start: i for i, start in enumerate(starts)}
    far, document = whole[: starts[max(0, tokens - NEAR)]], starts[tokens]
    ordinary = set(re.findall(r"[a-z]+", whole))
    known, said = set(NAME.findall(far)), set(NAME.findall(whole[len(far) : document]))
    for match in NAME.finditer(whole, document):
        first, stop = token_at.get(match.start()), stop_at.get(match.end())
        fresh = match[0] in known - said and match[0].lower() not in ordinary
        said.add(match[0])
        if fresh and first is not None and stop is not None and stop - first > 1:
            yield first, stop


TASKS: Mapping[str, Task] = {
    "needles": needles,
    "haystack": haystack,
    "values": values,
    "chains": chains,
    "prose": prose,
    "copies": copies,
    "names": names,
    **ruler.TASKS,
}


def parse_task(given: str) -> tuple[str, int]:
    """`TASK` or `TASK:COUNT`, 16 by default. Raises ValueError."""
    name, _, count = given.partition(":")
    if name not in TASKS or not (count or "16").isdecimal():
        raise ValueError(f"no task {given!r}: TASK or TASK:COUNT, of {', '.join(TASKS)}")
    return name, int(count or 16)
