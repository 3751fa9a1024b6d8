"""Measures needle recall of recomputation: the share of the asked facts' blocks that two rules choose.

    python -m deltafront.benchmarks.lab.recall --model MODEL --text FILE --tokens 8000 --samples 3

Prefills RULER's prompts densely. The prompt's end then chooses blocks, as in the service: by the mean over
layers of each layer's largest share (the service's rule), or by the maximum over layers. A fact's blocks are
those that hold the answer's characters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.lab.samples import ruler_prompts
from deltafront.benchmarks.markdown import markdown
from deltafront.benchmarks.reader import ROOT, load_tokenizer
from deltafront.kernels.constants import BLOCK
from deltafront.workers.decode.reads import tail_start
from deltafront.workers.evaluation.prompts import TaskPrompt, read_prompts
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.ruler import TASKS
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.recompute import BlockAttention
from deltafront.workers.settings import ModelSpec

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
    arguments = _arguments(given)
    tokenizer = load_tokenizer(arguments.model)
    if arguments.prompts:
        prompts = read_prompts(arguments.prompts)
    else:
        prompts = ruler_prompts(
            arguments.tasks, arguments.samples, arguments.tokens, arguments.text, tokenizer, arguments.seed
        )
    stack = load_model(ModelSpec(path=arguments.model, dtype=arguments.dtype), arguments.device)
    found: dict[str, list[Recalled]] = {}
    begun = time.monotonic()
    for prompt in in_turn(prompts):
        ids, facts = fact_blocks(prompt, tokenizer)
        got = recalled(Reader(stack, len(ids)), ids, facts, arguments.chunk)
        if got is not None:
            found.setdefault(prompt.task, []).append(got)
        print(f"{prompt.task} {len(ids)} {got} {time.monotonic() - begun:.0f} s", flush=True)
        if arguments.result and found:
            write_json(arguments.result, _record(arguments, _rows(found)))
    print(f"\n{_table(_rows(found))}")
    return 0


def in_turn(prompts: Sequence[TaskPrompt]) -> list[TaskPrompt]:
    """Order prompts so that tasks take turns, and a stopped run has some of each."""
    seen: Counter[str] = Counter()
    turns = []
    for number, prompt in enumerate(prompts):
        turns.append((seen[prompt.task], number, prompt))
        seen[prompt.task] += 1
    return [prompt for *_, prompt in sorted(turns, key=lambda turn: turn[:2])]


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


def _record(arguments: argparse.Namespace, rows: Sequence[dict[str, object]]) -> dict[str, object]:
    cuda = arguments.device.startswith("cuda")
    return {
        "hardware": torch.cuda.get_device_name() if cuda else arguments.hardware,
        "commit": arguments.commit or commit_of(ROOT),
        "torch": torch.__version__,
        "model": Path(arguments.model).stem,
        "dtype": arguments.dtype,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "texts": [path.stem for path in arguments.text or [arguments.prompts]],
        "rows": list(rows),
    }


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a directory, hub id or GGUF file, as for `serve`")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, nargs="+", default=[], help="what facts are hidden in")
    source.add_argument("--prompts", type=Path, help="JSONL of prompt and answers")
    add("--tokens", type=int, default=31_000)
    add("--samples", type=int, default=20, help="of each task")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS)[1:8], metavar="TASK")
    add("--chunk", type=int, default=4096)
    add("--seed", type=int, default=11)
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16" if cuda else "float32")
    add("--device", default="cuda" if cuda else "cpu")
    add("--hardware", default="CPU", help="recorded where there is no GPU")
    add("--result", type=Path)
    add("--commit", help="recorded instead of git's answer, where there is no git")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
