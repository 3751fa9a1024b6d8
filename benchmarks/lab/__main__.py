"""Compares methods with dense attention on RULER's tasks with the question in the prompt, for any model.

    python -m deltafront.benchmarks.lab.fetch qwen2.5-coder-0.5b FOLDER
    python -m deltafront.benchmarks.lab --model FOLDER/qwen2.5-coder-0.5b.gguf --text FILE [FILE …] \
        --tokens 31000 --samples 20 --settings dpxa:share=0.2 dpxa+delta:share=0.2,gamma=16@8 --result FILE

A setting is METHOD:OPTIONS@BLOCKS/DELTA. With @BLOCKS, BLOCKS blocks are recomputed and the prompt's last
128 to 255 tokens are then prefilled again densely, as in the service with `recompute_blocks`. Answers are
decoded greedily over all keys. With /DELTA they are decoded over the pages that DELTA selects, as in a decode
worker: dense/delta_layers=2+14 or dpxa@8/delta_layers=2+14,page_budget=64,recency=8,full_layers=0+1. The
result has the share of all layers' pages that the longest prompt's decode steps read. With /kv_dtype=int8
prefill and decode round K and V as int8 pages do. dpxa+delta:density=0.1 takes its thresholds from --profile.
All runs in one process without Ray, with the layers and kernels of the service's workers.
--prompts takes prompts from a JSONL file (of --write-prompts or `lab.ruler`) in place of --text. --chat sends
each prompt as the user's message of the model's chat template. --rope-scaling extends the model's positions
by YaRN.

Every --together samples are answered with all settings before the next ones. After them the script prints a
table, writes --result as JSON, and all answers beside it in FILE.answers.jsonl. The same command continues a
stopped run, and with further --settings adds to a finished one.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deltafront.benchmarks.arguments import told
from deltafront.benchmarks.harness import write_json
from deltafront.benchmarks.lab.answer_file import AnswerFile, AnswerFileError
from deltafront.benchmarks.lab.arguments import lab_parser, model_of, prompts_of, recorded
from deltafront.benchmarks.lab.samples import in_chat, tokenised, write_prompts
from deltafront.benchmarks.reader import load_tokenizer
from deltafront.kernels.methods import MethodError
from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.workers.evaluation.answering import Decode, Together
from deltafront.workers.evaluation.comparison import ComparedRow, compare, markdown
from deltafront.workers.evaluation.paged import delta_plan, share_read
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt
from deltafront.workers.evaluation.setting import Setting, delta_config, parse_method
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import Profile, load_profile
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import model_directory

NINE = (
    "single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery",
    "variables",
)  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    arguments = _arguments(given)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(arguments.model)
    prompts = prompts_of(arguments, tokenizer)
    if arguments.write_prompts:
        write_prompts(arguments.write_prompts, prompts)
        return 0
    samples = _samples(arguments, prompts, tokenizer)
    longest = max(sample.tokens for sample in samples)
    run = {**recorded(arguments), "longest_prompt": longest, "chat": arguments.chat}
    try:
        profile = _profile(arguments)
        answers = _answer_file(arguments, run, samples)
    except (AnswerFileError, MethodError, ModelError) as error:
        sys.exit(str(error))
    stack = load_model(model_of(arguments), arguments.device)
    room = longest + arguments.answer_tokens
    together = Together(stack, min(arguments.together, len(samples)), room, profile)
    every = [*map(Setting.parse, answers.settings), *arguments.settings]
    configs = {str(each): delta_config(each.delta) for each in every if each.delta and not each.kv_dtype}
    run["pages_read"] = {
        setting: share_read(delta_plan(stack, config), stack.config.kv_layers, longest)
        for setting, config in configs.items()
    }
    begun = time.monotonic()
    for done in answered(together, samples, answers, arguments, tokenizer.decode):
        rows = compared(samples, answers)
        if arguments.result:
            write_json(arguments.result, {**run, "rows": [asdict(row) for row in rows]})
        print(f"\n{markdown(rows)}\n{done} samples: {time.monotonic() - begun:.0f} s", flush=True)
    return 0


def _profile(arguments: argparse.Namespace) -> Profile | None:
    """Read --profile. Raises ModelError, and MethodError if it lacks a level that --settings name."""
    given = arguments.profile and str(arguments.profile)
    profile = load_profile(replace(model_of(arguments), profile=given))
    for setting in arguments.settings:
        thresholds_for(profile, parse_method(setting.method))
    return profile


def _samples(
    arguments: argparse.Namespace, prompts: Sequence[TaskPrompt], tokenizer: Tokenizer
) -> list[Sample]:
    if arguments.chat:
        return in_chat(prompts, TextTokenizer.load(model_directory(arguments.model)))
    return tokenised(prompts, tokenizer)


def _answer_file(
    arguments: argparse.Namespace, run: Mapping[str, object], samples: Sequence[Sample]
) -> AnswerFile:
    digest = hashlib.sha256(repr([sample.ids for sample in samples]).encode()).hexdigest()
    how = {"samples": digest, "answer_tokens": arguments.answer_tokens, "chunk": arguments.chunk}
    if arguments.profile:
        how["profile"] = hashlib.sha256(arguments.profile.read_bytes()).hexdigest()
    result: Path | None = arguments.result
    file = result and result.with_name(f"{result.stem}.answers.jsonl")
    return AnswerFile(file, {**run, **how})


def by_prefill(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Return the settings by method and `kv_dtype`, with ascending numbers of blocks. So each sample is
    prefilled once per list."""
    ordered = sorted(dict.fromkeys(settings), key=lambda setting: (setting.blocks, setting.delta))
    return [
        [setting for setting in ordered if (setting.method, setting.kv_dtype) == prefill]
        for prefill in dict.fromkeys((setting.method, setting.kv_dtype) for setting in settings)
    ]


def answered(
    together: Together,
    samples: Sequence[Sample],
    answers: AnswerFile,
    arguments: argparse.Namespace,
    decode: Decode,
) -> Iterator[int]:
    """Answer all samples with dense attention and all settings, unless `answers` has them. After each group
    of samples, yield the number of samples so far."""
    for first in range(0, len(samples), arguments.together):
        group = samples[first : first + arguments.together]
        place = slice(first, first + len(group))
        for settings in by_prefill([Setting("dense"), *arguments.settings]):
            missing = [each for each in settings if len(answers.of(str(each))) < place.stop]
            if missing:
                dense = answers.of("dense")[place]
                told = [answer.ids for answer in dense] if len(dense) == len(group) else None
                got = together.answers(missing, group, arguments.chunk, arguments.answer_tokens, decode, told)
                for setting, some in zip(missing, got, strict=True):
                    answers.add(str(setting), first, some)
        yield place.stop


def compared(samples: Sequence[Sample], answers: AnswerFile) -> list[ComparedRow]:
    """Compare each setting that has answers with dense attention."""
    prompts, dense = [sample.prompt for sample in samples], answers.of("dense")
    return [compare(setting, prompts, answers.of(setting), dense) for setting in answers.settings]


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = lab_parser(__doc__, NINE, 16_384)
    add = parser.add_argument
    form = "METHOD:OPTIONS@BLOCKS/DELTA"
    add("--settings", type=told(Setting.parse), nargs="+", default=[Setting("dpxa")], metavar=form)
    add("--profile", type=Path, help="the model's profile, for settings with density=NUMBER")
    add("--chat", action="store_true", help="put prompts into the model's chat template")
    add("--write-prompts", type=Path, help="write the prompts for --prompts and stop; needs no GPU")
    add("--answer-tokens", type=int, default=64)
    add("--together", type=int, default=20, help="samples that are answered at once; memory bounds it")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
