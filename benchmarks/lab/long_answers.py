"""Compares DELTA's page selection with dense decode along long answers.

    python -m deltafront.benchmarks.lab.long_answers --model FILE --prompts FILE --answer-tokens 2048 \
        --settings dense dense/delta_layers=5+8+16,page_budget=512 --result FILE

Dense attention over all pages answers all prompts greedily, as one batch; end tokens are never chosen. Each
setting then decodes the same tokens (teacher-forced) with a decode worker's kernels. The result has the share
of tokens that remain the most likely, and their log-probability, by position in the answer. The setting
`dense` decodes again, with --together prompts at once: the difference is noise. A greedy answer may repeat
itself, so tokens after 16 tokens that stand earlier in the answer are also left out (`fresh`).

Dense attention's answers are written beside --result as FILE.told.json. A later run with further --settings
reads them.

Shape suffixes are defined in `workers.evaluation.answering`; also T tokens of an answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deltafront.benchmarks.arguments import told
from deltafront.benchmarks.harness import write_json
from deltafront.benchmarks.lab.arguments import lab_parser, model_of, prompts_of, recorded
from deltafront.benchmarks.lab.samples import tokenised
from deltafront.benchmarks.reader import load_tokenizer
from deltafront.workers.decode.decode_attention import LayerPlan, plan_layers
from deltafront.workers.evaluation.paged import PagedSteps, delta_plan, share_read
from deltafront.workers.evaluation.prompts import Sample
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.setting import Setting, delta_config
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.settings import DecodeConfig

CONTEXT = 16
"""Tokens after which the next token repeats the answer, if they stand earlier in it."""
PART = 256
"""Tokens of an answer whose mean is one number of `by_position`."""


@dataclass(frozen=True)
class Decoded:
    """A batch's answers. logp_BT, best_BT: Log-probability of each token, and whether it is the likeliest of
    those that end no answer. `seconds`: wall-clock time of a step, without prefill."""

    ids_BT: torch.Tensor
    logp_BT: torch.Tensor
    best_BT: torch.Tensor
    seconds: float


class Batch:
    """Prompts that are prefilled densely and then decoded together, with one plan of layers after another."""

    def __init__(self, stack: LayerStack, samples: Sequence[Sample], tokens: int, chunk: int) -> None:
        config, room = stack.config, max(sample.tokens for sample in samples) + tokens
        shape = (config.layers, len(samples), config.kv_heads, room, config.head_dim)
        self._stack, self._tokens = stack, tokens
        self._k_LBGSD = torch.zeros(shape, dtype=stack.dtype, device=stack.device)
        self._v_LBGSD = torch.zeros_like(self._k_LBGSD)
        self._lengths_B = torch.tensor([sample.tokens for sample in samples], device=stack.device)
        readings = [
            Reader(stack, room, kv=(self._k_LBGSD[:, n : n + 1], self._v_LBGSD[:, n : n + 1])).read(
                sample.ids, "dense", chunk
            )
            for n, sample in enumerate(samples)
        ]
        self._first_BC = torch.cat([reading.tail_TC for reading in readings])

    def decode(self, plan: LayerPlan, told_BT: torch.Tensor | None = None) -> Decoded:
        """Decode along `told_BT`, or greedily."""
        ends = [*self._stack.config.eos_ids]
        ids, logp, best = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        hidden_BC, step = self._first_BC, self._step(plan)
        begun = time.monotonic()
        for at in range(self._tokens):
            logits_BV = self._stack.logits(hidden_BC).float()
            logp_BV = logits_BV.log_softmax(-1)
            logits_BV[:, ends] = float("-inf")
            best_B = logits_BV.argmax(-1)
            token_B = best_B if told_BT is None else told_BT[:, at]
            ids.append(token_B)
            logp.append(logp_BV.gather(1, token_B[:, None])[:, 0])
            best.append(best_B == token_B)
            hidden_BC = step(token_B, self._lengths_B + at)
        ids_BT, logp_BT, best_BT = (torch.stack(each, 1).cpu() for each in (ids, logp, best))
        return Decoded(ids_BT, logp_BT, best_BT, (time.monotonic() - begun) / self._tokens)

    def _step(self, plan: LayerPlan) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        stack, pages = self._stack, PagedSteps(self._stack, plan, self._k_LBGSD, self._v_LBGSD)
        return lambda token_B, positions_B: stack.forward(
            stack.embed(token_B), positions_B, pages.attend(positions_B)
        )


def fresh(answer: Sequence[int]) -> list[bool]:
    """Return for each token whether the CONTEXT tokens before it are new in the answer."""
    seen, found = set[tuple[int, ...]](), list[bool]()
    for at in range(len(answer)):
        before = tuple(answer[max(0, at - CONTEXT) : at])
        found.append(len(before) < CONTEXT or before not in seen)
        seen.add(before)
    return found


def row(setting: str, decoded: Decoded, dense: Decoded) -> dict[str, object]:
    """Return the means over a setting's teacher-forced tokens. The log-probabilities of the greedy answer's
    own run are subtracted."""
    fresh_BT = torch.tensor([fresh(ids) for ids in dense.ids_BT.tolist()])
    best_BT, less_BT = decoded.best_BT.double(), (decoded.logp_BT - dense.logp_BT).double()
    return {
        "setting": setting,
        "tokens": best_BT.numel(),
        "agreement": float(best_BT.mean()),
        "logp": float(less_BT.mean()),
        "fresh_tokens": int(fresh_BT.sum()),
        "fresh_agreement": float(best_BT[fresh_BT].mean()),
        "fresh_logp": float(less_BT[fresh_BT].mean()),
        "by_position": {
            "agreement": [float(part.mean()) for part in torch.split(best_BT, PART, 1)],
            "logp": [float(part.mean()) for part in torch.split(less_BT, PART, 1)],
        },
        "by_prompt": {"agreement": best_BT.mean(1).tolist(), "logp": less_BT.mean(1).tolist()},
        "seconds_a_step": decoded.seconds,
    }


@torch.inference_mode()
def main(given: Sequence[str] | None = None) -> int:
    arguments = _arguments(given)
    tokenizer = load_tokenizer(arguments.model)
    samples = tokenised(prompts_of(arguments, tokenizer), tokenizer)
    stack = load_model(model_of(arguments), arguments.device)
    dense = _told(arguments, stack, samples)
    longest = max(sample.tokens for sample in samples) + arguments.answer_tokens
    rows = []
    for setting in arguments.settings:
        plan = _plan(stack, setting)
        parts = [
            _batch(arguments, stack, samples[first : first + arguments.together]).decode(
                plan, dense.ids_BT[first : first + arguments.together].to(stack.device)
            )
            for first in range(0, len(samples), arguments.together)
        ]
        ids_BT = torch.cat([part.ids_BT for part in parts])
        logp_BT = torch.cat([part.logp_BT for part in parts])
        best_BT = torch.cat([part.best_BT for part in parts])
        made = row(str(setting), Decoded(ids_BT, logp_BT, best_BT, parts[0].seconds), dense)
        pages_read = share_read(plan, stack.config.kv_layers, longest)
        rows.append({**made, "together": arguments.together, "pages_read": pages_read})
        print(json.dumps(rows[-1]), flush=True)
        run = {**recorded(arguments), "longest_prompt": longest - arguments.answer_tokens}
        write_json(arguments.result, {**run, "prompts": len(samples), "rows": rows})
    return 0


def _told(arguments: argparse.Namespace, stack: LayerStack, samples: Sequence[Sample]) -> Decoded:
    file: Path = arguments.told or arguments.result.with_suffix(".told.json")
    if file.exists():
        kept = json.loads(file.read_text())
        made = torch.tensor(kept["ids"]), torch.tensor(kept["logp"])
        return Decoded(*made, torch.ones_like(made[0], dtype=torch.bool), kept["seconds"])
    dense = _batch(arguments, stack, samples).decode(_plan(stack, Setting("dense")))
    kept = {"ids": dense.ids_BT.tolist(), "logp": dense.logp_BT.tolist(), "seconds": dense.seconds}
    write_json(file, kept)
    return dense


def _batch(arguments: argparse.Namespace, stack: LayerStack, samples: Sequence[Sample]) -> Batch:
    return Batch(stack, samples, arguments.answer_tokens, arguments.chunk)


def _plan(stack: LayerStack, setting: Setting) -> LayerPlan:
    if setting.delta:
        return delta_plan(stack, delta_config(setting.delta))
    return plan_layers(DecodeConfig(full_layers=()), stack.config.layers, stack.config.windows)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = lab_parser(__doc__, (), 16_384)
    add = parser.add_argument
    form = "dense/DELTA"
    add("--settings", type=told(Setting.parse), nargs="*", default=[Setting("dense")], metavar=form)
    add("--answer-tokens", type=int, default=2048)
    add("--together", type=int, default=16, help="prompts that a setting decodes at once")
    add("--told", type=Path, help="dense attention's answers, in place of FILE.told.json")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
