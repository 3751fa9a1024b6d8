"""Which kernels a stage or a decode worker would compile after its warm-up. See test_specialisations.py.

Run as a script, without TRITON_INTERPRET: `specialisations.py DIRECTORY NAME …`. A name is a method's, one
behind a `-` (which is then not warmed up), or `decode` for a decode worker's appended text and steps. Prints
a JSON object for each: {"name": …, "warm_up": how many, "missing": {kernel: [key …]}}.
"""

from __future__ import annotations

import json
import random
import sys
from unittest import mock

import numpy as np
from fake_gpu import DEVICE, fake_gpu

from deltafront.kernels.constants import BLOCK, PAGE_TOKENS
from deltafront.workers.decode.page_selection import plan_layers
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.rows import Row
from deltafront.workers.decode.runner import DecodeRunner, warm_up
from deltafront.workers.kv.pages.pool import pages_for
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.messages.stages import ChunkCommand, OpenRequest
from deltafront.workers.model.decoder import load_model
from deltafront.workers.prefill.stage import PrefillStage, load_stage
from deltafront.workers.settings import DecodeConfig, ModelSpec, PrefillConfig

CHUNK, ROOM = 16_384, 262_144
PROMPTS = 16


def lengths(randomly: random.Random) -> list[int]:
    """Of prompts: near what a kernel may be compiled for, and anywhere."""
    near = [CHUNK, CHUNK + 1, 2 * CHUNK - 1, 4096, 4097, 1, 16, 100_000, ROOM - 1, ROOM]
    return near + [int(2 ** randomly.uniform(5, 18)) for _ in range(PROMPTS - len(near))]


def read(stage: PrefillStage, config: PrefillConfig, name: str, tokens: int, scattered: bool) -> None:
    """A prompt, as its group's controller has it read; scattered: on pages that do not follow one another."""
    pages = range(pages_for(tokens))
    order = OpenRequest("r", tuple(reversed(pages) if scattered else pages), tokens, config.method(name), "d")
    stage.open(order)
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        ids = np.zeros(count, dtype="<u4").tobytes()
        last = start + count == tokens
        stage.run_chunk(ChunkCommand("r", start, count, last=last, wants_logits=last, token_ids=ids))()
    stage.close("r")


def stage_after_warm_up(
    directory: str, name: str, warm_up: tuple[str, ...], seen: set[tuple[str, str]]
) -> set[tuple[str, str]]:
    """What reading prompts adds to what the warm-up of a stage has seen."""
    config = PrefillConfig(
        stages=1, chunk_tokens=CHUNK, cache_tokens=ROOM, device=str(DEVICE), warm_up=warm_up
    )
    sender = mock.MagicMock()
    sender.announce.return_value = 0
    sender.holds.return_value = False
    stage = load_stage(ModelSpec(directory), config, 0, None, lambda _cache: sender)
    warm = set(seen)
    randomly = random.Random(5)
    for number, tokens in enumerate(lengths(randomly)):
        read(stage, config, name, tokens, scattered=number % 3 == 2)
    return seen - warm


def decode_after_warm_up(directory: str, seen: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """What appended text and decode steps add to what the warm-up of a decode worker has seen."""
    layers = {"full_layers": (0,), "delta_layers": (1,)}
    config = DecodeConfig(cache_tokens=ROOM, max_batch=6, device=str(DEVICE), **layers)
    stack = load_model(ModelSpec(directory), config.device)
    plan = plan_layers(config, stack.config.layers)
    pages = ROOM // PAGE_TOKENS
    runner = DecodeRunner(stack, plan, pages=pages, max_batch=config.max_batch, max_pages=pages)
    warm_up(runner, ROOM, plan.calibrated)
    warm, randomly = set(seen), random.Random(6)
    for number, length in enumerate(lengths(randomly)):
        start = min(length, ROOM - config.append_chunk_tokens - 1)
        tokens = randomly.randint(1, config.append_chunk_tokens)
        held = tuple(range(pages_for(start + tokens + 1)))
        looked = runner.append(held, Read(start, [0] * tokens, looks=3, among=start), last=True)
        runner.recompute(held, looked.blocks, [0] * BLOCK * len(looked.blocks))
        sampling = [Sampling(temperature=float(randomly.randint(0, 1))) for _ in range(number % 6 + 1)]
        rows = [
            Row(100 * number + place, held, start + tokens, 0, one, bool(randomly.randint(0, 1)))
            for place, one in enumerate(sampling)
        ]
        runner.decode(rows)
    return seen - warm


def main() -> None:
    directory, *names = sys.argv[1:]
    for name in names:
        method = name.removeprefix("-")
        with fake_gpu() as seen:
            if name == "decode":
                new = decode_after_warm_up(directory, seen)
            else:
                new = stage_after_warm_up(directory, method, (name,) * (method == name), seen)
        missing: dict[str, list[str]] = {}
        for kernel, key in sorted(new):
            missing.setdefault(kernel, []).append(key)
        print(json.dumps({"name": name, "warm_up": len(seen) - len(new), "missing": missing}), flush=True)


if __name__ == "__main__":
    main()
