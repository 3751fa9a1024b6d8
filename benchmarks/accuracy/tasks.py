"""Kinds of documents by name: those with questions, which calibration reads too, and prose without.

Each is a function of a seeded generator, the tokens wanted, the number of things hidden and the text they are
hidden in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from deltafront.workers.calibration.probes import Document, Text, chains, haystack, joined, needles, values

Task = Callable[[random.Random, int, int, Text], Document]


def prose(rng: random.Random, tokens: int, count: int, text: Text) -> Document:
    """Nothing hidden and nothing asked: for the perplexity of the document's tail."""
    del count
    return Document(joined(text.take(rng, tokens)), [])


TASKS: Mapping[str, Task] = {
    "needles": needles,
    "haystack": haystack,
    "values": values,
    "chains": chains,
    "prose": prose,
}
