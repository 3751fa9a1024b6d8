"""Compares methods with dense attention on RULER's tasks with the question in the prompt, for any model.

    python -m deltafront.benchmarks.lab.fetch qwen2.5-coder-0.5b FOLDER
    python -m deltafront.benchmarks.lab --model FOLDER/qwen2.5-coder-0.5b.gguf --text FILE [FILE …] \
        --tokens 31000 --samples 20 --settings dpxa:share=0.2 dpxa+delta:share=0.2,gamma=16@8 --result FILE

A setting is METHOD:OPTIONS@BLOCKS. With @BLOCKS, BLOCKS blocks are recomputed and the prompt's last 128 to
255 tokens are then prefilled again densely, as in the service with `recompute_blocks`. Answers are decoded
greedily over all keys. All runs in one process without Ray, with a prefill worker's layers and kernels.
--prompts takes prompts from a JSONL file (`lab.ruler` makes one) in place of --text. The script prints a
table after every setting and writes --result as JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deltafront.benchmarks.arguments import parser_of, told
from deltafront.benchmarks.harness import commit_of, write_json
from deltafront.benchmarks.lab.samples import ruler_prompts, tokenised
from deltafront.benchmarks.reader import ROOT, load_tokenizer
from deltafront.workers.evaluation.answering import Decode, Together
from deltafront.workers.evaluation.comparison import ComparedRow, MeasuredAnswer, compare, markdown
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt, read_prompts
from deltafront.workers.evaluation.ruler import TASKS
from deltafront.workers.evaluation.setting import Setting
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.settings import ModelSpec

NINE = (
    "single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery",
    "variables",
)  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    arguments = _arguments(given)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(arguments.model)
    samples = tokenised(_prompts(arguments, tokenizer), tokenizer)
    stack = load_model(ModelSpec(path=arguments.model, dtype=arguments.dtype), arguments.device)
    room = max(sample.tokens for sample in samples) + arguments.answer_tokens
    together = Together(stack, min(arguments.together, len(samples)), room)
    rows, dense = list[ComparedRow](), list[MeasuredAnswer]()
    for method, blocks in by_method([Setting("dense"), *arguments.settings]).items():
        begun = time.monotonic()
        answers = all_answers(together, method, blocks, samples, dense, arguments, tokenizer.decode)
        dense = dense or answers[0]
        for count in blocks:
            prompts = [sample.prompt for sample in samples]
            rows.append(compare(str(Setting(method, count)), prompts, answers[count], dense))
        print(f"\n{markdown(rows)}\n{method}: {time.monotonic() - begun:.0f} s", flush=True)
        if arguments.result:
            write_json(arguments.result, _record(arguments, rows))
    return 0


def _prompts(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[TaskPrompt]:
    if arguments.prompts:
        return read_prompts(arguments.prompts)
    tasks, texts = arguments.tasks, arguments.text
    return ruler_prompts(tasks, arguments.samples, arguments.tokens, texts, tokenizer, arguments.seed)


def by_method(settings: Sequence[Setting]) -> dict[str, list[int]]:
    """Return, for each method, the ascending numbers of blocks to recompute that its settings name. So each
    sample is prefilled once per method."""
    blocks: dict[str, set[int]] = {}
    for setting in settings:
        blocks.setdefault(setting.method, set()).add(setting.blocks)
    return {method: sorted(counts) for method, counts in blocks.items()}


def all_answers(
    together: Together,
    method: str,
    blocks: Sequence[int],
    samples: Sequence[Sample],
    dense: Sequence[MeasuredAnswer],
    arguments: argparse.Namespace,
    decode: Decode,
) -> dict[int, list[MeasuredAnswer]]:
    """Answer all samples with a method, once for each number of blocks to recompute. Return the answers by
    that number."""
    answers: dict[int, list[MeasuredAnswer]] = {count: [] for count in blocks}
    for first in range(0, len(samples), arguments.together):
        group = slice(first, first + arguments.together)
        told = [answer.ids for answer in dense[group]] or None
        got = together.answers(
            method, blocks, samples[group], arguments.chunk, arguments.answer_tokens, decode, told
        )
        for count, some in zip(blocks, got, strict=True):
            answers[count] += some
    return answers


def _record(arguments: argparse.Namespace, rows: Sequence[ComparedRow]) -> dict[str, object]:
    cuda = arguments.device.startswith("cuda")
    return {
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "commit": arguments.commit or commit_of(ROOT),
        "torch": torch.__version__,
        "model": Path(arguments.model).stem,
        "dtype": arguments.dtype,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "texts": [path.stem for path in arguments.text or [arguments.prompts]],
        "rows": [asdict(row) for row in rows],
    }


def _task(given: str) -> str:
    if given not in TASKS:
        raise ValueError(f"no task {given!r}: {', '.join(TASKS)}")
    return given


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a directory, hub id or GGUF file, as for `serve`")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, nargs="+", default=[], help="what facts are hidden in")
    source.add_argument("--prompts", type=Path, help="JSONL of prompt and answers")
    add("--tokens", type=int, default=31_000, help="the longest prompt")
    add("--samples", type=int, default=20, help="of each task")
    add("--tasks", type=told(_task), nargs="+", default=list(NINE))
    form = "METHOD:OPTIONS@BLOCKS"
    add("--settings", type=told(Setting.parse), nargs="+", default=[Setting("dpxa")], metavar=form)
    add("--answer-tokens", type=int, default=64)
    add("--together", type=int, default=20, help="samples that are answered at once; memory bounds it")
    add("--chunk", type=int, default=16_384)
    add("--seed", type=int, default=11)
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16" if cuda else "float32")
    add("--device", default="cuda" if cuda else "cpu")
    add("--result", type=Path)
    add("--commit", help="recorded instead of git's answer, where there is no git")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
