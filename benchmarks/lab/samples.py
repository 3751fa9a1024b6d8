"""Makes prompts that end in their question, as in RULER and in practice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deltafront.service.request.text.tokenizer import TextTokenizer
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


def in_chat(prompts: Sequence[TaskPrompt], text: TextTokenizer) -> list[Sample]:
    """Tokenise each prompt as a user's message in the model's chat template, like the service."""
    chats = [text.encode_chat([{"role": "user", "content": one.text}]) for one in prompts]
    return [
        Sample(one, tuple(np.frombuffer(chat, "<u4").tolist()))
        for one, chat in zip(prompts, chats, strict=True)
    ]


def write_prompts(path: Path, prompts: Sequence[TaskPrompt]) -> None:
    """Write prompts as JSONL for `--prompts`."""
    lines = [
        {"task": one.task, "document": one.document, "question": one.question, "answers": one.answers}
        for one in prompts
    ]
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8")


def in_turn(prompts: Sequence[TaskPrompt]) -> list[TaskPrompt]:
    """Order prompts so that tasks take turns, and a stopped run has some of each."""
    seen: Counter[str] = Counter()
    turns = []
    for number, prompt in enumerate(prompts):
        turns.append((seen[prompt.task], number, prompt))
        seen[prompt.task] += 1
    return [prompt for *_, prompt in sorted(turns, key=lambda turn: turn[:2])]
