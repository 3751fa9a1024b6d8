"""Makes documents for each task: with questions, which calibration also uses, or prose without questions.

A task is a function of a seeded generator, the number of tokens, the number of facts and the text that hides
them. `copies` and `names` hide no facts: they ask for repetitions in the text itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

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
"""Tokens after a document that are searched for copies, and for names, which are rarer."""
CUE, COPIED = 2, 3
"""Tokens of a copy that the prompt contains, and tokens that it asks for."""
NEAR = 1024
"""A copy must not occur in a document's last NEAR tokens, where a sliding window would see it."""

NAME = re.compile(r"(?<![A-Za-z])[A-Z][a-z]{2,}(?![A-Za-z])")

Task = Callable[[random.Random, int, int, SpelledText], Document]


def prose(rng: random.Random, tokens: int, count: int, text: SpelledText) -> Document:
    """Make a document without questions, to measure perplexity at its end."""
    del count
    return Document(joined(text.take(rng, tokens)), [])


def copies(rng: random.Random, tokens: int, count: int, text: SpelledText) -> Document:
    """Ask for tokens of natural text that repeat tokens of the document after the same cue.

    A prompt continues the text after the document up to such a repetition. The repeated tokens are neither in
    the document's last NEAR tokens nor in the continuation.
    """
    ids = joined(text.take(rng, tokens + CONTINUED))
    found = list(copied(ids, tokens))
    chosen = sorted(rng.sample(found, min(count, len(found))))
    questions = [
        Question(f"token {at}", tuple(ids[tokens:at]), tuple(ids[at : at + COPIED])) for at in chosen
    ]
    return Document(ids[:tokens], questions)


def copied(ids: Sequence[int], tokens: int) -> Iterator[int]:
    """Yield the indices, from `tokens` on, at which a copy begins. Copies do not overlap."""
    width = CUE + COPIED
    far = {tuple(ids[a : a + width]) for a in range(max(0, tokens - NEAR) - width + 1)}
    near = {tuple(ids[a : a + width]) for a in range(max(0, tokens - NEAR), tokens - width + 1)}
    after, seen = tokens + CUE, tokens - width + 1
    for at in range(tokens + CUE, len(ids) - COPIED + 1):
        while seen < at - CUE:  # tokens up to the cue count as near
            near.add(tuple(ids[seen : seen + width]))
            seen += 1
        said = tuple(ids[at - CUE : at + COPIED])
        if at >= after and said in far and said not in near:
            after = at + COPIED
            yield at


def names(rng: random.Random, tokens: int, count: int, text: SpelledText) -> Document:
    """Ask for the rest of a name of several tokens.

    A prompt continues the text after the document up to the name's first token. The name is in the document,
    but not in its last NEAR tokens nor in the continuation.
    """
    ids = joined(text.take(rng, tokens + NAMES_CONTINUED))
    found = list(named(text.spell(ids), tokens))
    chosen = sorted(rng.sample(found, min(count, len(found))))
    questions = [
        Question(f"token {first}", tuple(ids[tokens : first + 1]), tuple(ids[first + 1 : stop]))
        for first, stop in chosen
    ]
    return Document(ids[:tokens], questions)


def named(spelled: Sequence[str], tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the token ranges (first, stop) of proper nouns at or after index `tokens` that a model must
    remember: they occur in the distant context and not since, and have at least two tokens.

    A proper noun is a capitalised word that the text never has in lower case.
    """
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
}


def parse_task(given: str) -> tuple[str, int]:
    """Parse `TASK` or `TASK:COUNT`. The default count is 16. Raises ValueError."""
    name, _, count = given.partition(":")
    if name not in TASKS or not (count or "16").isdecimal():
        raise ValueError(f"no task {given!r}: TASK or TASK:COUNT, of {', '.join(TASKS)}")
    return name, int(count or 16)
