"""Prompts that end in their question, as RULER and users have it: one question a document.

RULER (Hsieh et al. 2024) gives a prompt and counts which of the right answers the model's own answer holds.
The documents are those of `benchmarks.accuracy.ruler`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deltafront.benchmarks.accuracy import ruler
from deltafront.workers.calibration.probes import Document, Text

ANSWER_ROOM = 128
"""Tokens of a prompt that its question may take, so that prompts are no longer than was asked for."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Sample:
    """answers: every string that the answer is to hold."""

    task: str
    name: str
    ids: tuple[int, ...]
    answers: tuple[str, ...]

    def score(self, said: str) -> float:
        """Return the share of the right answers that `said` holds (RULER's string_match_all)."""
        return sum(answer.lower() in said.lower() for answer in self.answers) / len(self.answers)


def samples(
    tasks: Sequence[str], count: int, tokens: int, texts: Mapping[str, Text], decode: Decode, seed: int
) -> list[Sample]:
    """Make `count` samples of each task, of at most `tokens` tokens, from the texts in turn.

    Another seed makes other documents, keys, values and places.
    """
    made = []
    for task in tasks:
        for number in range(count):
            text = list(texts)[number % len(texts)]
            rng = random.Random(f"{seed} {task} {tokens} {number}")
            document = ruler.TASKS[f"ruler_{task}"](rng, tokens - ANSWER_ROOM, 1, texts[text])
            made.append(_sample(task, f"{text}-{number}", document, decode))
    return made


def _sample(task: str, name: str, document: Document, decode: Decode) -> Sample:
    """Ask a document's first question. Its right answers are those of all questions with the same prompt."""
    first = document.questions[0].prompt
    answers = [decode(one.gold).strip() for one in document.questions if one.prompt == first]
    return Sample(task, name, (*document.ids, *first), tuple(answers))
