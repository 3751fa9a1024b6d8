"""Makes prompts that end in their question, as in RULER and in practice: one question per document.

RULER (Hsieh et al. 2024) scores the share of right answers that the model's answer contains. The documents
are those of `benchmarks.accuracy.ruler`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deltafront.benchmarks.accuracy import ruler
from deltafront.workers.calibration.probes import Document, Text

ANSWER_ROOM = 128
"""Tokens of a prompt that are reserved for its question, so that prompts do not exceed --tokens."""
ASKED = 4
"""Questions per document, of which one is chosen: RULER's four keys."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Sample:
    """A prompt. answers: All strings that a complete answer contains."""

    task: str
    name: str
    ids: tuple[int, ...]
    answers: tuple[str, ...]

    def score(self, said: str) -> float:
        """Return the share of right answers that `said` contains (RULER's string_match_all)."""
        return sum(answer.lower() in said.lower() for answer in self.answers) / len(self.answers)


def samples(
    tasks: Sequence[str], count: int, tokens: int, texts: Mapping[str, Text], decode: Decode, seed: int
) -> list[Sample]:
    """Make `count` samples of each task, with at most `tokens` tokens, from one text after the other. The
    seed decides documents, keys, values and positions."""
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
    """Choose one of a document's questions. Its right answers are those of all questions with the same
    prompt.

    A question whose prompt begins with another question's prompt is not chosen: it asks for the remaining
    answers.
    """
    prompts = {one.prompt for one in document.questions}
    whole = [a for a in sorted(prompts) if not any(a != b and a[: len(b)] == b for b in prompts)]
    chosen = rng.choice(whole)
    return chosen, tuple(decode(one.gold).strip() for one in document.questions if one.prompt == chosen)
