"""Compares a decode step with sampling options (masks, log-probabilities, penalties) to one without.

    python -m deltafront.benchmarks.sampling_options MODEL --device cuda

Each step is launched before the previous step has ended, as in a decode worker. The masks allow every
token, so the time to make a grammar's masks is left out.
"""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from deltafront.benchmarks.arguments import parser_of
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.decode.runner import DecodeRunner
from deltafront.workers.decode.sampling.row_options import AnswerSoFar
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.kv.pages.pool import pages_for
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.settings import DecodeConfig, ModelSpec

OPTIONS = {
    "free": Sampling(temperature=1.0),
    "masks": Sampling(temperature=1.0),
    "logprobs 20": Sampling(temperature=1.0, top_logprobs=20),
    "penalties": Sampling(
        temperature=1.0, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.1
    ),
}


def rows_of(sampling: Sampling, batch: int, length: int, pages: int, key: int) -> list[Row]:
    so_far = AnswerSoFar(b"", array("I"), length, ()) if sampling.changes_logits else None
    each = range(batch)
    return [
        Row(key + n, tuple(range(n * pages, (n + 1) * pages)), length, 0, sampling, False, so_far)
        for n in each
    ]


def step_seconds(runner: DecodeRunner, rows: Sequence[Row], steps: int, masked: bool) -> float:
    """Return the median time from one step's tokens to the next one's."""
    masks = [runner.any_token] * len(rows) if masked else []
    ahead, ends = runner.launch(rows, masks), list[float]()
    for step in range(1, steps):
        following = runner.launch([replace(row, length=row.length + step) for row in rows], masks)
        ahead.chosen()
        ends.append(time.perf_counter())
        ahead = following
    ahead.chosen()
    return statistics.median(later - earlier for earlier, later in pairwise(ends))


def main(arguments: Sequence[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a model's directory")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096, help="tokens before the answer")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args(arguments)
    model = ModelSpec(path=given.model, dtype="bfloat16" if given.device == "cuda" else "float32")
    stack = load_model(model, given.device)
    pages = pages_for(given.length + given.steps + 1)
    config = DecodeConfig(page_selection="full", max_batch=given.batch, device=given.device)
    plan = plan_layers(config, stack.config.layers, stack.config.windows)
    runner = DecodeRunner(stack, plan, pages=pages * given.batch, max_batch=given.batch, max_pages=pages)
    runner.compile()
    free = None
    for number, (name, sampling) in enumerate(OPTIONS.items()):
        for again in (0, 1):  # the first time loads kernels
            key = (2 * number + again) * given.batch
            rows = rows_of(sampling, given.batch, given.length, pages, key)
            seconds = step_seconds(runner, rows, given.steps, name == "masks")
        free = free or seconds
        print(f"{name:12} {1000 * seconds:8.3f} ms  {seconds / free:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
