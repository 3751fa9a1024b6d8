"""Compares prefill methods and page selections with dense attention on the same documents.

    python -m deltafront.benchmarks.accuracy --text FILE [FILE …] --documents 6x32640 3x130900 \
        --tasks needles:100 --methods dpxa dpxa:tau=0.9 xattention streaming --result FILE \
        --gate 'dpxa:exact>=0.985,kl<=0.11' --decode 8,11,14,20,21:256

One model in one process prefills documents in chunks, with a prefill worker's layers and kernels. Each
document has its own seed and is cut from one of the texts, which take turns. It is prefilled with `dense`,
then with every method. For each method the script reports KL(dense | method) and perplexity of the
next-token distributions at the last 2,048 positions, log-probability and exactness of every right answer
(teacher-forced, with questions prefilled densely), density, and the time of selection and attention.

--questions-in-prompt: End a prompt with each question and prefill it with the method, as the service does.
    Answers are prefilled densely.
--recompute 4 8 16: Add a case `<method> recompute N` for each N and each method but dense. Before each
    question the N blocks of the document that it attends to most are recomputed densely. The density
    includes the recomputed tiles (mean over questions), the time includes finding and recomputing the blocks
    (median). The KL is still that of the method.
--decode LAYERS:BUDGET:RECENCY: Prefill densely, then decode answers with page selection and by full decode.
    LAYERS are Δ-layers, periodic:COUNT or random:COUNT:SEED; quest:BUDGET is a baseline, whose time is
    meaningless. The script reports the share of answers that agree, the share of pages read over all layers
    as `density`, the time of page selection and attention of a decode step, and KL of the answers' tokens.
--quantisation fp8: Repeat every method, also dense, with quantised layers. Compare with dense in --dtype.
--kv-dtype int8: Repeat every method, also dense, and every selection of --decode with an int8 KV cache,
    marked `K/V int8`. Compare with dense and full decode in --dtype.
--key-tokens 1024: Also report the loss relative to dense at the tail's key tokens: tokens to which dense
    attention gives a far higher probability with the whole document than with only the 1,024 to 2,048 tokens
    before (LongPPL, Fang et al. 2025).
--rope-theta, --positions: Stretch the model's positions beyond its adapter's training, for longer documents.
    The script then asks no questions and only compares methods with dense attention.
--outcomes FILE: Append a document's outcomes when it is done, one line per case. Skip documents in the file.
--minutes M: Begin no document after M minutes. Documents of all lengths and tasks take turns.
--compare FILE: Compare each row with a result of the same arguments. Exit with 1 if one differs
    (`report.apart`).
--shard I/N: Run documents I, I + N, I + 2 N, … as one of N processes, and write outcomes to --result.
    `accuracy.merge` combines the shards into the result of a single process.

Methods take options: `dpxa:tau=0.9,k_anchors=16`, and with --profile `dpxa:density=0.08`. The script prints a
line for each document and method and a table, writes --result as JSON, and exits with 1 if a --gate is
missed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import get_args

import torch

from deltafront.benchmarks import DEMO_TEXT
from deltafront.benchmarks.accuracy.decode import AnswerDecoder, parse_selection
from deltafront.benchmarks.accuracy.merge import append_outcomes, conclude, read_outcomes, write_shard
from deltafront.benchmarks.accuracy.predictions import key_tokens, short_logps, tail_logps
from deltafront.benchmarks.accuracy.questions import (
    Answered,
    Looked,
    ask,
    ask_and_look,
    ask_in_prompt,
    ask_one_by_one,
    ask_recomputed,
    by_subject,
)
from deltafront.benchmarks.accuracy.report import BASELINE, Outcome, line, parse_gate
from deltafront.benchmarks.accuracy.tasks import TASKS, parse_task
from deltafront.benchmarks.arguments import parse_shard, parser_of, told
from deltafront.benchmarks.harness import commit_of
from deltafront.benchmarks.reader import MODEL, ROOT, SpelledText, load_text, load_tokenizer, warm_up
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.methods import load
from deltafront.workers.calibration.probes import Document, Question
from deltafront.workers.calibration.sensitivity import divergence
from deltafront.workers.evaluation.reader import Reader, Reading
from deltafront.workers.evaluation.setting import known_method, parse_method
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import Profile, load_profile
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.settings import KVDtype, ModelSpec, Quantisation

QUESTION_ROOM = 1024
"""Maximum number of tokens of a question with its answer. Questions of the task `names` are the longest."""
CLOSE = {torch.float32: 1e-3, torch.float16: 0.15, torch.bfloat16: 0.5}
"""Maximum difference of logp between `ask` and `ask_one_by_one`, relative to logp if it is below -1. It
allows for rounding of an answer of about twenty tokens after 130,000."""
METHODS = "deltafront.benchmarks.whole_prompt.methods", "deltafront.benchmarks.paper_forms.methods"
"""Modules that register methods the service lacks: whole-prompt baselines and variants from the papers."""


def main() -> int:
    started = time.monotonic()
    for module in METHODS:
        load(module)
    arguments = _arguments()
    stacks, profile = _load(arguments)
    tokenizer = load_tokenizer(arguments.model)
    texts = {path.stem: load_text(path, tokenizer) for path in arguments.text}
    room = max(tokens for _, tokens in arguments.documents) + QUESTION_ROOM
    methods = [BASELINE, *(method for method in arguments.methods if method != BASELINE)]
    for stack in stacks:
        warm_up(stack, methods, arguments.chunk, profile)
    readers = {"": Reader(stacks[0], room, profile)}
    for stack in stacks[1:]:
        readers[f" {arguments.quantisation}"] = Reader(stack, room, profile)
    if arguments.kv_dtype:
        readers[_kv_mark(arguments)] = Reader(stacks[0], room, profile, arguments.kv_dtype)
    outcomes = _known(arguments, [f"{method}{mark}" for mark in readers for method in methods])
    done = {(outcome.tokens, outcome.task, outcome.document) for outcome in outcomes}
    for made in _documents(arguments, texts):
        if (made.tokens, made.task, made.name) in done:
            continue
        if arguments.minutes is not None and time.monotonic() - started > 60 * arguments.minutes:
            print(f"{arguments.minutes:g} minutes are over: the documents left are not read", flush=True)
            break
        found = []
        for outcome in _compare(readers, made, methods, arguments):
            found.append(outcome)
            print(line(outcome), flush=True)
        outcomes += found
        if arguments.outcomes:
            append_outcomes(arguments.outcomes, found)
    origin = {
        "hardware": arguments.hardware or _hardware(arguments.device),
        "commit": arguments.commit or commit_of(ROOT),
        "dtype": arguments.dtype,
    }
    if arguments.shard:
        write_shard(outcomes, arguments.shard, origin, arguments.result)
        return 0
    return conclude(outcomes, origin, arguments.gate, arguments.result, arguments.compare)


def _known(arguments: argparse.Namespace, cases: Sequence[str]) -> list[Outcome]:
    """Read the outcomes that earlier runs wrote to --outcomes. Raises SystemExit if the file has outcomes,
    but lacks a case of this run."""
    if not arguments.outcomes or not arguments.outcomes.exists():
        return []
    outcomes = read_outcomes(arguments.outcomes)
    missing = set(cases) - {outcome.case for outcome in outcomes}
    if outcomes and missing:
        raise SystemExit(f"{arguments.outcomes} has no {', '.join(sorted(missing))}: give another file")
    return outcomes


def _load(arguments: argparse.Namespace) -> tuple[list[LayerStack], Profile | None]:
    """Load the model (with --quantisation also a quantised copy) and its profile. Raises ValueError for a
    method without a level in the profile, and for a page selection that does not fit the layers."""
    chosen = {"path": arguments.model, "dtype": arguments.dtype, "profile": arguments.profile}
    spec = ModelSpec(**chosen) if arguments.no_adapter else replace(MODEL, **chosen)
    profile = load_profile(spec)  # before stretching: the profile belongs to the unstretched model
    stretch = {"rope_theta": arguments.rope_theta, "max_position_embeddings": arguments.positions}
    spec = replace(spec, **{key: value for key, value in stretch.items() if value is not None})
    for method in arguments.methods:
        thresholds_for(profile, parse_method(method))
    kinds = [None] if arguments.quantisation is None else [None, arguments.quantisation]
    stacks = [load_model(replace(spec, quantisation=kind), arguments.device) for kind in kinds]
    for selection in arguments.decode:
        parse_selection(selection, stacks[0].config.layers)
    return stacks, profile


class _Made:
    """A document with its task, length and name. The text is made on first use."""

    def __init__(self, task: str, tokens: int, name: str, make: Callable[[], Document]) -> None:
        self.task, self.tokens, self.name, self._make = task, tokens, name, make

    @cached_property
    def document(self) -> Document:
        return self._make()


def _documents(arguments: argparse.Namespace, texts: dict[str, SpelledText]) -> Iterator[_Made]:
    shard, shards = arguments.shard or (0, 1)
    most = max(count for count, _ in arguments.documents)
    for index, (count, tokens), (task, questions) in itertools.product(
        range(shard, most, shards), arguments.documents, arguments.tasks
    ):
        if index < count:
            text = list(texts)[index % len(texts)]
            rng = random.Random(f"{arguments.seed} {task} {tokens} {index}")
            make = partial(TASKS[task], rng, tokens, questions, texts[text])
            yield _Made(task, tokens, f"{text}-{index}", make)


@torch.inference_mode()
def _compare(
    readers: Mapping[str, Reader], made: _Made, methods: Sequence[str], arguments: argparse.Namespace
) -> Iterator[Outcome]:
    """Yield every method's outcome on one document, dense first. Page selections come after dense and use its
    KV cache. Cases with recomputed blocks come after their method.

    Args:
        readers: Readers by the suffix that they add to a case's name.
    """
    ids, questions = made.document.ids, made.document.questions
    tail, dense = ids[-arguments.tail :], None
    short_A, key_A = None, None
    if arguments.key_tokens:
        first_reader = next(iter(readers.values()))
        short_A = short_logps(first_reader, ids, len(tail), arguments.key_tokens, arguments.chunk)
    decoder: AnswerDecoder | None = None
    for (mark, reader), method in itertools.product(readers.items(), methods):
        case = f"{method}{mark}"
        reading = reader.read(ids, method, arguments.chunk, len(tail))
        dense = reading if dense is None else dense
        kl_T = divergence(reader.stack, dense.tail_TC, reading.tail_TC)
        logp_A = tail_logps(reader.stack, reading.tail_TC, tail)
        if short_A is not None and key_A is None:
            key_A = key_tokens(logp_A, short_A)
        looked: list[Looked] = []
        if arguments.questions_in_prompt:
            answers = ask_in_prompt(reader, ids, questions, method, arguments.chunk)
        elif arguments.recompute and method != BASELINE:
            answers, looked = ask_and_look(reader, questions)
        else:
            answers = ask(reader, questions)
        if case == BASELINE and questions and not arguments.questions_in_prompt:
            _check(reader, questions[0], answers[0])
        outcome = _outcome(made, case, reading, kl_T, math.exp(-float(logp_A.mean())), answers)
        if key_A is not None and key_A.any():
            outcome = replace(outcome, key_tokens=int(key_A.sum()), key_logp=float(logp_A[key_A].mean()))
        yield outcome
        for count in arguments.recompute if looked else []:
            yield _recomputed(reader, questions, looked, count, outcome)
        decodes = method == BASELINE and mark in ("", _kv_mark(arguments))
        if decodes and arguments.decode and questions:
            decoder = AnswerDecoder(reader, questions[: arguments.decode_questions], decoder)
            yield from _decoded(decoder, made, arguments.decode, mark)


def _check(reader: Reader, question: Question, answer: Answered) -> None:
    """Check an answer of `ask`, whose kernels differ by device, by asking the question token by token."""
    logp, exact = ask_one_by_one(reader, question)
    if abs(logp - answer.logp) > CLOSE[reader.stack.dtype] * max(1.0, abs(logp)):
        raise RuntimeError(
            f"asked at once, {question.about} has logp {answer.logp:.5f}, exact {answer.exact};"
            f" one by one {logp:.5f}, {exact}"
        )


def _outcome(
    made: _Made,
    case: str,
    reading: Reading,
    kl_T: torch.Tensor,
    perplexity: float,
    answers: Sequence[Answered],
) -> Outcome:
    return Outcome(
        case=case,
        task=made.task,
        tokens=made.tokens,
        document=made.name,
        density=reading.density,
        ms=reading.milliseconds,
        kl=float(kl_T.mean()),
        kl_p95=float(kl_T.quantile(0.95)),
        perplexity=perplexity,
        answers=by_subject(made.document.questions, answers),
    )


def _recomputed(
    reader: Reader, questions: Sequence[Question], looked: Sequence[Looked], count: int, method: Outcome
) -> Outcome:
    """Ask the questions again, each after recomputing the `count` document blocks that it attends to most.
    method: The method's outcome without recomputation."""
    found = ask_recomputed(reader, questions, looked, count)
    blocks = -(-reader.length // BLOCK)
    return replace(
        method,
        case=f"{method.case} recompute {count}",
        density=method.density + found.tiles / (blocks * (blocks + 1) / 2),
        answers=by_subject(questions, found.answers),
        ms=(method.ms or 0.0) + found.milliseconds,
        recompute_ms=found.milliseconds,
    )


def _decoded(decoder: AnswerDecoder, made: _Made, selections: Sequence[str], mark: str) -> Iterator[Outcome]:
    questions = decoder.questions
    plans = {one: parse_selection(one, decoder.layers) for one in selections}
    for selection, plan in {"full": None, **plans}.items():
        decoded = decoder.decode(plan)
        yield Outcome(
            case=f"decode {selection}{mark}",
            task=made.task,
            tokens=made.tokens,
            document=made.name,
            density=decoded.share,
            answers=by_subject(questions, decoded.answers),
            agree=sum(decoded.agrees) / len(decoded.agrees),
            ms=decoded.milliseconds,
            kl=decoded.kl,
        )


def _hardware(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {platform.machine()}"


def _arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", default=MODEL.path, help="a name, directory or GGUF file, as for `serve`")
    add("--no-adapter", action="store_true", help="the model as it is, without the 128K adapter")
    add("--rope-theta", type=float, help="in place of the model's")
    add("--positions", type=int, help="in place of the model's")
    add("--profile", help="the model's profile, for methods that ask for a density")
    add("--text", type=Path, nargs="+", default=[DEMO_TEXT])
    add("--documents", type=told(_counted_lengths), nargs="+", default=[(2, 4096)], metavar="COUNTxTOKENS")
    add("--tasks", type=told(parse_task), nargs="+", default=[("needles", 16)], metavar="TASK:COUNT")
    add("--methods", type=told(known_method), nargs="+", default=["dpxa"])
    add("--recompute", type=int, nargs="+", default=[], metavar="BLOCKS", help="for each question by itself")
    add("--decode", nargs="+", default=[], metavar="LAYERS:BUDGET[:RECENCY]|quest:BUDGET")
    add("--questions-in-prompt", action="store_true", help="each ends a prompt, instead of a session's")
    add("--decode-questions", type=int, default=40)
    add("--gate", type=told(parse_gate), nargs="+", default=[], metavar="METHOD:FIGURE>=NUMBER,…")
    add("--tail", type=int, default=2048, help="last positions whose distributions are compared")
    add("--key-tokens", type=int, default=0, metavar="CONTEXT", help="loss at tokens known from further back")
    add("--chunk", type=int, default=16_384)
    add("--seed", type=int, default=3)
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16" if cuda else "float32")
    add("--quantisation", choices=get_args(Quantisation), help="also with the layers in so many bits")
    add("--kv-dtype", choices=get_args(KVDtype), help="also with K/V in so many bits")
    add("--device", default="cuda" if cuda else "cpu")
    add("--shard", type=told(parse_shard), metavar="I/N", help="every N-th document from I on, for `merge`")
    add("--result", type=Path)
    add("--outcomes", type=Path, help="documents that stand in it are not read again")
    add("--minutes", type=float, help="after which no document is begun")
    add("--compare", type=Path, help="a result that this run must be near")
    add("--hardware", default="", help="what it ran on, for the record")
    add("--commit", help="recorded instead of git's answer, where there is no git")
    arguments = parser.parse_args()
    if arguments.questions_in_prompt and arguments.decode:
        parser.error("--questions-in-prompt: --decode answers questions that are appended to a session")
    if arguments.questions_in_prompt and arguments.recompute:
        parser.error("--questions-in-prompt: --recompute asks questions that are appended to a session")
    if arguments.kv_dtype and any(selection.startswith("quest") for selection in arguments.decode):
        parser.error("--kv-dtype: quest reads K/V of --dtype alone")
    if arguments.shard and (arguments.gate or arguments.compare or not arguments.result):
        parser.error("--shard: --result is needed, and --gate and --compare are for accuracy.merge")
    cases = list(_cases(arguments))
    for gate in arguments.gate:
        if gate.case not in cases:
            parser.error(f"--gate: no case {gate.case!r}, but {', '.join(cases)}")
    return arguments


def _cases(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the names of all cases."""
    kinds = [""] if arguments.quantisation is None else ["", f" {arguments.quantisation}"]
    kinds += [_kv_mark(arguments)] if arguments.kv_dtype else []
    for kind, method in itertools.product(kinds, dict.fromkeys([BASELINE, *arguments.methods])):
        yield f"{method}{kind}"
        if method != BASELINE:
            yield from (f"{method}{kind} recompute {count}" for count in arguments.recompute)
    for mark in ["", *([_kv_mark(arguments)] if arguments.kv_dtype else [])] if arguments.decode else []:
        yield from (f"decode {selection}{mark}" for selection in ("full", *arguments.decode))


def _kv_mark(arguments: argparse.Namespace) -> str:
    return f" K/V {arguments.kv_dtype}"


def _counted_lengths(given: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", given)
    if match is None:
        raise ValueError(f"no documents {given!r}: COUNTxTOKENS")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    sys.exit(main())
