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
ASKED = 4
"""Questions of a document that one is chosen from: RULER's four keys."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Sample:
    """A prompt. answers: all strings that a full answer contains."""

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
            document = ruler.TASKS[f"ruler_{task}"](rng, tokens - ANSWER_ROOM, ASKED, texts[text])
            prompt, answers = _question(document, rng, decode)
            made.append(Sample(task, f"{text}-{number}", (*document.ids, *prompt), answers))
    return made


def _question(
    document: Document, rng: random.Random, decode: Decode
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Choose one of a document's questions. Its right answers are those of all questions with its prompt.

    A question that asks for what is left, after some answers, has a prompt that begins with another's.
    """
    prompts = {one.prompt for one in document.questions}
    whole = [a for a in sorted(prompts) if not any(a != b and a[: len(b)] == b for b in prompts)]
    chosen = rng.choice(whole)
    return chosen, tuple(decode(one.gold).strip() for one in document.questions if one.prompt == chosen)
