"""A token's time on one GPU without a service: a decode worker's own steps, K/V in 16 and in 8 bits.

    python -m deltafront.benchmarks.decode_alone [--quantisation fp8] [--moving] --result FILE

The 8B shape with random weights and four requests of --tokens tokens. K/V is drawn, not read, so one GPU of
80 GB holds four of 131,072 tokens in 16 bits beside weights in 8. Steps are launched as a worker launches
them: captured, the next one before the tokens of the last are waited for. Rows say `alone` for where they
were decoded (`engine.rows`). Random weights show no fault of a kernel: tests/kernels/paged_decode does.

--moving: only what a step of one request takes while other pages are copied without a pause, over what it
takes otherwise: from host memory as a worker brings a document back, and to host memory as entries leave.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from deltafront.benchmarks.engine import rows
from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.engine.setup import ANSWER_ROOM, delta_layers
from deltafront.benchmarks.harness import commit_of, repeated
from deltafront.benchmarks.reader import ROOT
from deltafront.kernels.layers.kv_int8 import Scales, quantise
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.decode.runner import DecodeRunner
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.kv.host_memory import HostMemory
from deltafront.workers.kv.pages.host_tier import BATCH_PAGES, Runs
from deltafront.workers.kv.pages.pool import pages_for
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.settings import DecodeConfig, KVDtype, ModelSpec, Quantisation

_STEPS, _REPEATS = 32, 5
_SEED = 35


def make_runner(stack: LayerStack, tokens: int, batch: int, kv_dtype: KVDtype | None) -> DecodeRunner:
    """With room for `batch` requests of `tokens` tokens and their answers, and K/V drawn for all of it: the
    same in 16 bits as in 8, but for rounding."""
    layers, windows = stack.config.layers, stack.config.windows
    config = DecodeConfig(
        delta_layers=tuple(delta_layers(layers, windows)), page_budget=256, kv_dtype=kv_dtype
    )
    pages = pages_for(tokens + ANSWER_ROOM)
    sizes = {"pages": batch * pages, "max_batch": batch, "max_pages": pages}
    runner = DecodeRunner(stack, plan_layers(config, layers, windows), **sizes, kv_dtype=kv_dtype)
    cache, draws = runner.cache, torch.Generator(stack.device).manual_seed(_SEED)
    for layer in range(layers):
        scales = cache.scales(layer) or Scales(*[torch.empty(0)] * 2)
        for kept, scale in zip(cache.layer(layer), (scales.k, scales.v), strict=True):
            for part in range(0, len(kept), 1024):
                where = slice(part, part + 1024)
                drawn = torch.randn(
                    kept[where].shape, generator=draws, device=stack.device, dtype=stack.dtype
                )
                if kv_dtype is None:
                    kept[where] = drawn
                else:
                    kept[where], scale[where] = quantise(drawn)
    return runner


def requests(tokens: int, batch: int, key: int, selects: bool) -> list[Row]:
    """Rows with pages of their own, that lie anywhere."""
    pages = pages_for(tokens + ANSWER_ROOM)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(_SEED)).tolist()
    return [
        Row(key + n, tuple(order[n * pages : (n + 1) * pages]), tokens, 7 + n, Sampling(), selects)
        for n in range(batch)
    ]


def step_ms(runner: DecodeRunner, rows_R: list[Row]) -> float:
    """The median of several runs' mean step."""
    times, ahead = [], runner.launch(rows_R)
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_STEPS):
            rows_R = [replace(row, length=row.length + 1) for row in rows_R]
            launched, ahead = ahead, runner.launch(rows_R)
            launched.chosen()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / _STEPS)
    ahead.chosen()
    return statistics.median(times)


def measured(stack: LayerStack, tokens: int, kv_dtype: KVDtype | None, mark: str) -> Iterator[rows.Row]:
    runner = make_runner(stack, tokens, rows.BATCH, kv_dtype)
    runner.compile()
    key = 0
    for batch in (1, rows.BATCH):
        for selection in ("full", "delta"):
            key += batch
            value = step_ms(runner, requests(tokens, rows.BATCH, key, selection == "delta")[:batch])
            name = f"{'' if batch == 1 else f'batch{batch}_'}token_{selection}{mark}"
            more = {"decode_gpu": "alone", **({"kv_dtype": kv_dtype} if kv_dtype else {})}
            yield {**rows.row(name, round(value, 3), "ms", tokens=tokens, gpus=0), **more}
    gib = round(torch.cuda.max_memory_allocated() / (1 << 30), 1)
    yield {**rows.row(f"memory{mark}", gib, "GiB", tokens=tokens, gpus=0), **more}


def while_moving(stack: LayerStack, tokens: int) -> Iterator[rows.Row]:
    """Steps alone and beside copies take turns. The copies are of pages that no request has."""
    runner = make_runner(stack, tokens, rows.BATCH, None)
    runner.compile()
    own = requests(tokens, 1, 1, False)
    first, pages = pages_for(tokens + ANSWER_ROOM), pages_for(tokens)
    memory = HostMemory(runner.cache, pages)
    layers, runs = range(stack.config.layers), [(first, 0, pages)]
    back = [(runs, range(n, n + 1), True) for n in layers]
    leaving = [
        ([(first + n, n, min(BATCH_PAGES, pages - n))], layers, False) for n in range(0, pages, BATCH_PAGES)
    ]
    for name, copies in (("token_moving_in", back), ("token_moving_out", leaving)):
        alone, beside = list[float](), list[float]()
        for _ in range(_REPEATS):
            alone.append(step_ms(runner, own))
            with repeated(partial(_copy, memory, copies)):
                beside.append(step_ms(runner, own))
        ratio = round(statistics.median(beside) / statistics.median(alone), 3)
        yield {**rows.row(name, ratio, "ratio", tokens=tokens, gpus=0), "decode_gpu": "alone"}
    memory.close()


def _copy(memory: HostMemory, copies: Sequence[tuple[Runs, range, bool]]) -> None:
    for runs, layers, back in copies:
        memory.copy(runs, layers, back)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, default=131_072, help="of each request")
    parser.add_argument("--quantisation", choices=get_args(Quantisation), help="model.quantisation")
    parser.add_argument("--kv-dtypes", nargs="+", choices=("16", *get_args(KVDtype)), default=["16", "int8"])
    parser.add_argument("--moving", action="store_true", help="only steps beside copies, K/V in 16 bits")
    parser.add_argument("--model", type=Path, help="where the model is made; memory-backed by default")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    model = given.model or memory / f"deltafront-engine-{given.shape}"
    shape = replace(SHAPES[given.shape], positions=given.tokens + ANSWER_ROOM)
    device = torch.device("cuda")
    write_model(model, shape, device)
    stack = load_model(ModelSpec(path=str(model), dtype="bfloat16", quantisation=given.quantisation), device)
    mark = f"_{given.quantisation}" if given.quantisation else ""
    if given.moving:
        given.kv_dtypes = ["16"]
    for kind in given.kv_dtypes:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found = (
            while_moving(stack, given.tokens)
            if given.moving
            else measured(stack, given.tokens, None if kind == "16" else kind, mark)
        )
        for one in found:
            print(one, flush=True)
            commit = given.commit or commit_of(ROOT)
            rows.merge_into(given.result, [one], torch.cuda.get_device_name(), commit)


if __name__ == "__main__":
    main()
