"""Makes long prompts of MTRAG's conversations (Katsis et al. 2025), as JSONL for `lab --prompts`.

    python -m deltafront.benchmarks.lab.mtrag --file reference_subset_with_human_evaluations.json \
        --tokenizer MODEL/tokenizer.json --tokens 31000 --out prompts.jsonl

The file is in IBM's repository mt-rag-benchmark, folder mtrag-human/evaluations. A prompt has the passages
that people judged relevant to a conversation, shuffled among passages of others, then the turns up to a
question. There are no exact answers: `lab` reports the agreement with dense attention's.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deltafront.benchmarks.arguments import parser_of

ASKED = "Answer the last question of this conversation from the passages above."
PASSAGE = 8
"""Tokens around a passage: its number and the empty line before it."""


def conversations(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return each conversation's turns. A task's id is `conversation<::>turn`."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for task in tasks:
        found.setdefault(task["task_id"].partition("<::>")[0], []).append(task)
    return found


def prompts(found: Mapping[str, Any], count: Callable[[str], int], tokens: int) -> Iterator[dict[str, str]]:
    """Yield a line for each turn. All turns of a conversation have the same passages, as many as fit."""
    texts = {one["document_id"]: one["text"] for one in found["documents"]}
    sizes = {name: count(text) + PASSAGE for name, text in texts.items()}
    for name, turns in conversations(found["tasks"]).items():
        questions = [asked(turn["input"]) for turn in turns]
        rng, left = random.Random(name), tokens - max(map(count, questions))
        needed = dict.fromkeys(one["document_id"] for turn in turns for one in turn["contexts"])
        others = sorted(texts.keys() - needed)
        rng.shuffle(others)
        taken = []
        for passage in [*needed, *others]:
            if sizes[passage] <= left:
                taken.append(texts[passage])
                left -= sizes[passage]
        rng.shuffle(taken)
        document = "\n\n".join(f"Passage {number}: {text}" for number, text in enumerate(taken, 1))
        for question in questions:
            yield {"task": "conversation", "document": document, "question": question}


def asked(turns: Sequence[Mapping[str, str]]) -> str:
    return "\n\n" + "\n".join(f"{turn['speaker']}: {turn['text']}" for turn in turns) + f"\n\n{ASKED}"


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--file", type=Path, required=True)
    add("--tokenizer", type=Path, required=True, help="tokenizer.json of the model")
    add("--tokens", type=int, default=31_000, help="the longest prompt, without the chat template")
    add("--out", type=Path, required=True)
    arguments: argparse.Namespace = parser.parse_args(given)
    found = json.loads(arguments.file.read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    lines = prompts(found, lambda text: len(tokenizer.encode(text).ids), arguments.tokens)
    text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
