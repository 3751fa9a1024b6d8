"""Makes prompts that end in their question, as in RULER and in practice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from deltafront.workers.evaluation.prompts import Sample, TaskPrompt
from deltafront.workers.evaluation.ruler import Haystack, make_prompt


def ruler_prompts(
    tasks: Sequence[str], count: int, tokens: int, texts: Sequence[Path], tokenizer: Tokenizer, seed: int
) -> list[TaskPrompt]:
    """Make `count` prompts of each task, of at most `tokens` tokens, from the texts in turn."""
    hay = [Haystack(path.stem, path.read_text(encoding="utf-8")) for path in texts]

    def length(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    return [
        make_prompt(task, f"{seed}-{number}", tokens, hay[number % len(hay)], length)
        for task in tasks
        for number in range(count)
    ]


def tokenised(prompts: Sequence[TaskPrompt], tokenizer: Tokenizer) -> list[Sample]:
    return [Sample(one, tuple(tokenizer.encode(one.text).ids)) for one in prompts]
