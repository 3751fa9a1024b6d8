"""Measures needle recall of recomputation: the share of the asked facts' blocks that two rules choose.

    python -m deltafront.benchmarks.lab.recall --model MODEL --text FILE --tokens 8000 --samples 3

Prefills RULER's prompts densely. The prompt's end then chooses blocks, as in the service: by the mean over
layers of each layer's largest share (the service's rule), or by the maximum over layers. A fact's blocks are
those that hold the answer's characters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from tokenizers import Tokenizer

from deltafront.benchmarks.harness import write_json
from deltafront.benchmarks.lab.arguments import lab_parser, model_of, prompts_of, recorded
from deltafront.benchmarks.markdown import markdown
from deltafront.benchmarks.reader import load_tokenizer
from deltafront.kernels.constants import BLOCK
from deltafront.workers.decode.reads import tail_start
from deltafront.workers.evaluation.prompts import TaskPrompt
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.ruler import TASKS
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.recompute import BlockAttention

COUNTS = (8, 32)
RULES = ("mean", "max")
Recalled = dict[tuple[str, int], float]
"""By rule and number of blocks."""


def fact_blocks(prompt: TaskPrompt, tokenizer: Tokenizer) -> tuple[list[int], set[int]]:
    """Return the prompt's token ids, and the blocks that contain the first occurrence of each answer."""
    encoded, blocks = tokenizer.encode(prompt.text), set[int]()
    for answer in prompt.answers:
        first = prompt.text.find(answer)
        for character in range(first, first + len(answer)) if first >= 0 else ():
            token = encoded.char_to_token(character)
            blocks |= set() if token is None else {token // BLOCK}
    return encoded.ids, blocks


def chosen(mass_LM: torch.Tensor, tokens: int, rule: str, count: int) -> set[int]:
    """Choose the `count` complete blocks of the first `tokens` tokens with the largest attention mass, by
    mean or maximum over layers. As in `BlockAttention.most_attended`, block 0 is never chosen and the last
    block ranks last."""
    mass_M = mass_LM[:, : tokens // BLOCK].clone()
    mass_M = mass_M.mean(0) if rule == "mean" else mass_M.amax(0)
    mass_M[0], mass_M[-1] = -2.0, -1.0
    return set(mass_M.topk(min(count, len(mass_M) - 1)).indices.tolist())


@torch.inference_mode()
def recalled(reader: Reader, ids: Sequence[int], facts: set[int], chunk: int) -> Recalled | None:
    """Return the share of the facts' blocks that each rule chooses, by rule and number of blocks. None: no
    fact lies in a block that can be chosen, after block 0 and before the prompt's end."""
    start = tail_start(len(ids))
    facts = {block for block in facts if 0 < block < start // BLOCK}
    if not facts:
        return None
    looks = BlockAttention(start)
    reader.read(ids[:start], "dense", chunk)
    reader.append(ids[start:], look=lambda layer, q_THD: looks.add(q_THD, reader.document(layer)[0]))
    mass_LM = looks.mass()
    return {
        (rule, count): len(facts & chosen(mass_LM, start, rule, count)) / len(facts)
        for rule in RULES
        for count in COUNTS
    }


def main(given: Sequence[str] | None = None) -> int:
    arguments = lab_parser(__doc__, list(TASKS)[1:8], 4096).parse_args(given)
    tokenizer = load_tokenizer(arguments.model)
    stack = load_model(model_of(arguments), arguments.device)
    found: dict[str, list[Recalled]] = {}
    begun = time.monotonic()
    for prompt in prompts_of(arguments, tokenizer):
        ids, facts = fact_blocks(prompt, tokenizer)
        got = recalled(Reader(stack, len(ids)), ids, facts, arguments.chunk)
        if got is not None:
            found.setdefault(prompt.task, []).append(got)
        print(f"{prompt.task} {len(ids)} {got} {time.monotonic() - begun:.0f} s", flush=True)
        if arguments.result and found:
            write_json(arguments.result, {**recorded(arguments), "rows": _rows(found)})
    print(f"\n{_table(_rows(found))}")
    return 0


def _rows(found: Mapping[str, Sequence[Recalled]]) -> list[dict[str, object]]:
    every = [one for some in found.values() for one in some]
    return [*(_row(task, some) for task, some in found.items()), *([_row("all", every)] if every else [])]


def _row(task: str, some: Sequence[Recalled]) -> dict[str, object]:
    shares = {f"{rule}_{count}": fmean(one[rule, count] for one in some) for rule, count in some[0]}
    return {"task": task, "prompts": len(some), **shares}


def _table(rows: Sequence[dict[str, object]]) -> str:
    header = ("task", "prompts", *(f"{rule}, first {count}" for rule in RULES for count in COUNTS))
    cells = [[f"{x:.2f}" if isinstance(x, float) else x for x in row.values()] for row in rows]
    return markdown(header, cells)


if __name__ == "__main__":
    sys.exit(main())
