"""The command-line arguments of `lab` and `lab.delta_forms`, and what every result records of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from deltafront.benchmarks.arguments import parser_of, told
from deltafront.benchmarks.harness import commit_of
from deltafront.benchmarks.lab.samples import in_turn, ruler_prompts
from deltafront.benchmarks.reader import ROOT
from deltafront.workers.evaluation.prompts import TaskPrompt, read_prompts
from deltafront.workers.evaluation.ruler import TASKS
from deltafront.workers.evaluation.setting import split_method
from deltafront.workers.settings import ModelSpec, RopeScaling


def lab_parser(description: str | None, tasks: Sequence[str], chunk: int) -> argparse.ArgumentParser:
    """Make a parser. tasks, chunk: Defaults of the arguments of these names."""
    cuda = torch.cuda.is_available()
    parser = parser_of(description)
    add = parser.add_argument
    add("--model", required=True, help="a directory, hub id or GGUF file, as for `serve`")
    scaling = "factor=4,original_max_position_embeddings=32768"
    add("--rope-scaling", type=told(rope_scaling_of), metavar=scaling, help="YaRN, as model.rope_scaling")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, nargs="+", default=[], help="what facts are hidden in")
    source.add_argument("--prompts", type=Path, help="JSONL of prompt and answers")
    add("--tokens", type=int, default=31_000, help="the longest prompt")
    add("--samples", type=int, default=20, help="of each task")
    add("--tasks", type=told(_task), nargs="+", default=list(tasks), metavar="TASK")
    add("--chunk", type=int, default=chunk)
    add("--seed", type=int, default=11)
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16" if cuda else "float32")
    add("--device", default="cuda" if cuda else "cpu")
    add("--hardware", default="CPU", help="recorded where there is no GPU")
    add("--result", type=Path)
    add("--commit", help="recorded instead of git's answer, where there is no git")
    return parser


def model_of(arguments: argparse.Namespace) -> ModelSpec:
    return ModelSpec(path=arguments.model, dtype=arguments.dtype, rope_scaling=arguments.rope_scaling)


def prompts_of(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[TaskPrompt]:
    """Return the prompts, tasks taking turns, so that a stopped run has some of each."""
    if arguments.prompts:
        return in_turn(read_prompts(arguments.prompts))
    tasks, texts = arguments.tasks, arguments.text
    return in_turn(
        ruler_prompts(tasks, arguments.samples, arguments.tokens, texts, tokenizer, arguments.seed)
    )


def recorded(arguments: argparse.Namespace) -> dict[str, object]:
    """Return what a result records of a run."""
    cuda = arguments.device.startswith("cuda")
    return {
        "hardware": torch.cuda.get_device_name() if cuda else arguments.hardware,
        "commit": arguments.commit or commit_of(ROOT),
        "torch": torch.__version__,
        "model": Path(arguments.model).stem,
        "dtype": arguments.dtype,
        **model_of(arguments).overrides,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "texts": [path.stem for path in arguments.text or [arguments.prompts]],
    }


def rope_scaling_of(given: str) -> RopeScaling:
    return TypeAdapter(RopeScaling).validate_python(split_method(f"yarn:{given}")[1])


def _task(given: str) -> str:
    if given not in TASKS:
        raise ValueError(f"no task {given!r}: {', '.join(TASKS)}")
    return given
