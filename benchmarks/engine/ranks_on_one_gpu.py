"""Do the ranks of a decode worker read, choose and answer as one rank does, in 16 bits at full length?

    GLOO_SOCKET_IFNAME=lo python -m deltafront.benchmarks.engine.ranks_on_one_gpu --text FILE … --result FILE

Ranks are threads that share one device and are linked by gloo, so that any number of them fits one GPU. What
links ranks on separate GPUs (NCCL, the one-shot all-reduce) is compared by tests/kernels/layers.

rows: a model of --shape, cut to --layers layers, with random weights. Prompts are appended and decoded by 1
rank and by each of --ranks, which are given the same tokens. Prints the largest relative error of a row of
the last layer's KV cache, which depends on every all-reduce before it, and of the logits.
answers: the embedded model with the 128K adapter has three key/value heads, so 1 and 3 ranks. Each document
is read once, and its needles are asked for with all pages and with selected ones. Prints how many tokens of
the answers are equal, and how many answers are right. The adapter was trained on this form of questions.
Ends with 1 where a row is beyond its tolerance or an answer changes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.harness import commit_of
from deltafront.benchmarks.reader import MODEL, load_text, load_tokenizer
from deltafront.tests.numerics import ROW_TOLERANCE
from deltafront.tests.workers.in_ranks import followers, link, unused
from deltafront.workers.calibration.probes import needles
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.decode.ranks import FollowerRank, LeadRunner, runner_sizes
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.decoder.collectives import SINGLE_RANK, GroupCollectives
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.settings import DecodeConfig, ModelSpec

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE: Literal["float16", "float32"] = "float16" if DEVICE == "cuda" else "float32"
"""gloo adds up no bfloat16."""
DELTA_LAYERS = (8, 14, 18, 21)
"""The embedded model's profile has these."""
ANSWER_TOKENS = 8


@contextmanager
def linked(spec: ModelSpec, config: DecodeConfig) -> Iterator[LeadRunner]:
    """Rank 0 of a worker of `config.tensor_parallel` ranks."""
    ranks = config.tensor_parallel
    links = [SINGLE_RANK] if ranks == 1 else [GroupCollectives(n, ranks) for n in range(ranks)]
    stacks = [load_model(spec, DEVICE, collectives=own) for own in links]
    if ranks > 1:
        link(stacks)
    model = stacks[0].config
    with followers(stacks, config, unused) as others:
        layers = plan_layers(config, model.layers, model.windows)
        yield LeadRunner(stacks[0], layers, others, **runner_sizes(config, model))


def decode_config(ranks: int, tokens: int, **more: Any) -> DecodeConfig:
    room = pages_for(tokens + 256) * PAGE_TOKENS
    gpus = 1 if DEVICE == "cuda" else 0
    return DecodeConfig(tensor_parallel=ranks, cache_tokens=room, device=DEVICE, gpus=gpus, threads=2, **more)


def append(runner: LeadRunner, ids: Sequence[int], chunk: int) -> torch.Tensor:
    """Read a prompt. Returns its last logits."""
    pages, logits_V = tuple(range(pages_for(len(ids) + 256))), None
    for start in range(0, len(ids), chunk):
        last = start + chunk >= len(ids)
        logits_V = runner.append(pages, Read(start, list(ids[start : start + chunk])), last).logits_V
    assert logits_V is not None
    return logits_V


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest L2 error of a row over its length. Both: [rows, channels]."""
    error = (found.float() - wanted.float()).norm(dim=1) / wanted.float().norm(dim=1)
    return float(error.nan_to_num(float("inf")).max())


def rows_of(spec: ModelSpec, ranks: int, ids: Sequence[int], chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append all but the last tokens, and decode over those with the given tokens. Returns the last layer's
    K and V of every token, a row each, and the logits after the prompt."""
    steps = 16
    config = decode_config(ranks, len(ids))
    with linked(spec, config) as lead:
        prompt = ids[:-steps]
        logits_V = append(lead, prompt, chunk)
        pages = tuple(range(pages_for(len(ids))))
        for n in range(steps):
            lead.decode([Row(n, pages, len(prompt) + n, ids[len(prompt) + n], Sampling(), False)])
        others = [rank._runner.cache for rank in lead._ranks if isinstance(rank, FollowerRank)]
        sides = [[cache.k_LPSGD, cache.v_LPSGD] for cache in (lead.cache, *others)]
        joined = torch.cat([torch.cat([side[-1] for side in pair], dim=-1) for pair in sides], dim=2)
        kv_TC = joined[: len(pages)].flatten(0, 1)[: len(ids)].flatten(1)
        # A rank's heads have K and V side by side: sorted by heads they are the same rows.
        return kv_TC.clone(), logits_V.clone()


def compare_rows(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    shape = replace(SHAPES[given.shape], layers=given.layers, positions=given.row_tokens + 256)
    write_model(folder, shape, torch.device(DEVICE))
    spec = ModelSpec(path=str(folder), dtype=DTYPE)
    rng = random.Random(given.seed)
    ids = [rng.randrange(shape.vocab) for _ in range(given.row_tokens)]
    alone_TC, alone_V = rows_of(spec, 1, ids, given.chunk)
    for ranks in given.ranks:
        found_TC, found_V = rows_of(spec, ranks, ids, given.chunk)
        yield {
            "case": "rows",
            "shape": given.shape,
            "layers": given.layers,
            "tokens": given.row_tokens,
            "ranks": ranks,
            "kv_error": relative_error(found_TC, alone_TC),
            "logits_error": relative_error(found_V[None], alone_V[None]),
            "tolerance": ROW_TOLERANCE[getattr(torch, DTYPE)],
        }


def answers_of(
    ranks: int, documents: Sequence[Any], selects: Sequence[bool], given: argparse.Namespace
) -> list[list[list[int]]]:
    """Return each document's greedy answers, by question and selection."""
    config = decode_config(
        ranks, given.tokens, delta_layers=DELTA_LAYERS, page_budget=256, page_selection="delta"
    )
    found = []
    with linked(replace(MODEL, dtype=DTYPE), config) as lead:
        for document in documents:
            append(lead, document.ids, given.chunk)
            found.append([_answer(lead, document, q, s) for q in document.questions for s in selects])
    return found


_keys = iter(range(sys.maxsize))


def _answer(lead: LeadRunner, document: Any, question: Any, selects: bool) -> list[int]:
    start, end = len(document.ids), len(document.ids) + len(question.prompt)
    pages = tuple(range(pages_for(end + ANSWER_TOKENS)))
    logits_V = lead.append(pages, Read(start, list(question.prompt)), last=True).logits_V
    assert logits_V is not None
    key = next(_keys)
    row = Row(key, pages, end, int(logits_V.argmax()), Sampling(), selects)
    answer = [row.token]
    while len(answer) < ANSWER_TOKENS:
        answer += [lead.decode([row])[0].token]
    return answer


def compare_answers(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    texts = [load_text(path, load_tokenizer(MODEL.path)) for path in given.text]
    documents = [
        needles(random.Random(f"{given.seed} {n}"), given.tokens, given.questions, text)
        for n, text in enumerate(texts)
    ]
    selections = (False, True)
    alone, three = (answers_of(ranks, documents, selections, given) for ranks in (1, 3))
    for kind, selects in enumerate(selections):
        pairs, right = [], [0, 0]
        for document, *both in zip(documents, alone, three, strict=True):
            for asked, question in enumerate(document.questions):
                one, other = (answers[asked * len(selections) + kind] for answers in both)
                gold = list(question.gold)
                pairs.append((one, other))
                right = [right[n] + (got[: len(gold)] == gold) for n, got in enumerate((one, other))]
        yield {
            "case": "answers",
            "tokens": given.tokens,
            "ranks": 3,
            "pages": "selected" if selects else "all",
            "documents": len(documents),
            "questions": len(pairs),
            "equal": sum(one == other for one, other in pairs),
            "right_of_one_rank": right[0],
            "right_of_three": right[1],
        }


def wrong(found: dict[str, Any]) -> bool:
    if found["case"] == "rows":
        return bool(max(found["kv_error"], found["logits_error"]) > found["tolerance"])
    return bool(found["equal"] < found["questions"])


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="a document of each")
    parser.add_argument("--tokens", type=int, default=130_560, help="of a document")
    parser.add_argument("--questions", type=int, default=16, help="to each document")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--result", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given, found = parsed(arguments), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for one in chain(compare_rows(given, Path(folder)), compare_answers(given) if given.text else ()):
            print(json.dumps(one), flush=True)
            found.append(one)
    if given.result:
        hardware = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
        origin = {"hardware": hardware, "commit": commit_of(ROOT), "dtype": DTYPE}
        given.result.write_text(json.dumps({**origin, "rows": found}, indent=1) + "\n")
    return int(any(wrong(one) for one in found))


if __name__ == "__main__":
    sys.exit(main())
