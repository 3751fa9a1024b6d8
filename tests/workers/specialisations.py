"""Finds the kernels that a stage or a decode worker would compile after its warm-up, for
test_specialisations.py.

Run it as a script, without TRITON_INTERPRET: `specialisations.py DIRECTORY CASE …`, where each case is the
fields of `Case` as JSON. It prints a JSON object for each case: {"name": …, "warm_up": number of kernels
compiled in warm-up, "missing": {kernel: [key …]} compiled later, "waits": [places where the host read from
the GPU while it launched a chunk], "noticed": [places found for one known read], "confused": [kernels
launched in another specialisation than Triton would choose]}.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from fake_gpu import DEVICE, FakeGpu, fake_gpu  # type: ignore[import-not-found]

from deltafront.kernels.constants import BLOCK, PAGE_TOKENS
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner, warm_up
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.kv.pages.pool import pages_for
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.messages.stages import ChunkCommand, ChunkReport, OpenRequest
from deltafront.workers.model.calibrated.profile import (
    Level,
    MethodLevels,
    Profile,
    ProfiledModel,
    shaping_options,
)
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.prefill.stage.activations import Activations
from deltafront.workers.prefill.stage.stage import PrefillStage, load_stage
from deltafront.workers.settings import DecodeConfig, ModelSpec, PrefillConfig

CHUNK, ROOM = 16_384, 262_144
PROMPTS = 16
DENSITY = 0.1
"""The density of the profile's level for `dpxa`."""


@dataclass(frozen=True)
class Case:
    """A worker and its work.

    With a method, stage `stage` of `stages` prefills prompts. Without a method, a decode worker prefills
    appended text and runs decode steps. `warm_up` is the configuration's value, `model` a folder in
    DIRECTORY.
    """

    name: str
    method: str = ""
    options: Mapping[str, float] = field(default_factory=dict)
    warm_up: Sequence[Any] = ()
    stage: int = 0
    stages: int = 1
    quantisation: Any = None
    kv_dtype: Any = None
    model: str = ""


def lengths(randomly: random.Random) -> list[int]:
    """Return prompt lengths: some near those for which kernels are specialised, others random."""
    near = [CHUNK, CHUNK + 1, 2 * CHUNK - 1, 4096, 4097, 1, 16, 100_000, ROOM - 1, ROOM]
    return near + [int(2 ** randomly.uniform(5, 18)) for _ in range(PROMPTS - len(near))]


def read(stage: PrefillStage, config: PrefillConfig, case: Case, tokens: int, scattered: bool) -> set[str]:
    """Prefill a prompt as the group's controller does, on contiguous or `scattered` pages. Returns the places
    where the host read from the GPU before a chunk was launched."""
    pages = range(pages_for(tokens))
    method = config.method(case.method, case.options)
    stage.open(
        OpenRequest(
            request_id="r",
            pages=tuple(reversed(pages) if scattered else pages),
            prompt_tokens=tokens,
            method=method,
            decode_worker="d",
        )
    )
    waits = set[str]()
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        ids = np.zeros(count, dtype="<u4").tobytes()
        last = start + count == tokens
        FakeGpu.reads.clear()
        command = ChunkCommand(
            request_id="r", start=start, tokens=count, last=last, wants_logits=last, token_ids=ids
        )
        end = stage.run_batch([command])
        waits |= {*FakeGpu.reads}
        assert isinstance(end()[0], ChunkReport)
    stage.close("r")
    return waits


class _Neighbours:
    """Provides the hidden states of a previous stage. There is no next stage."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self._hidden, self._dtype = hidden, dtype

    def receive(self, tokens: int) -> torch.Tensor:
        return torch.zeros(tokens, self._hidden, dtype=self._dtype, device=DEVICE)

    def send(self, hidden_TC: torch.Tensor) -> None:
        pass

    close = abort = lambda self: None


def profile_of(model: ModelConfig) -> Profile:
    heads = ((0.5,) * model.q_heads,) * model.layers
    level = Level(density=DENSITY, tokens=ROOM, share=DENSITY, amounts=heads)
    options = shaping_options(PrefillConfig().method("dpxa"))
    family = MethodLevels(method="dpxa", options=options, levels=(level,))
    return Profile(format=1, model=ProfiledModel(name="", digest="0" * 64), texts=(), prefill=(family,))


def stage_after_warm_up(
    directory: str, case: Case, seen: set[tuple[str, str]]
) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the specialisations that prefill adds to those of a stage's warm-up, and the host's waits."""
    config = PrefillConfig(
        stages=case.stages,
        chunk_tokens=CHUNK,
        cache_tokens=ROOM,
        device=str(DEVICE),
        warm_up=tuple(case.warm_up),
    )
    spec = ModelSpec(path=directory, quantisation=case.quantisation)
    model = read_config(directory)
    neighbours: Activations = _Neighbours(model.hidden, torch.bfloat16)
    sender = mock.MagicMock()
    sender.open.side_effect = lambda to: mock.MagicMock(
        pages=to.pages, has_prefix=False, **{"put.return_value": 0, "close.return_value": True}
    )
    with mock.patch("deltafront.workers.prefill.stage.stage.load_profile", return_value=profile_of(model)):
        stage = load_stage(
            spec, config, case.stage, neighbours, lambda _cache: sender, kv_dtype=case.kv_dtype
        )
    warm, waits = set(seen), set[str]()
    randomly = random.Random(5)
    for number, tokens in enumerate(lengths(randomly)):
        waits |= read(stage, config, case, tokens, scattered=number % 3 == 2)
    return seen - warm, waits


def decode_after_warm_up(directory: str, case: Case, seen: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the specialisations that appended text and decode steps add to those of the warm-up."""
    layers = {"full_layers": (0,), "delta_layers": (1,)}
    config = DecodeConfig(cache_tokens=ROOM, max_batch=6, device=str(DEVICE), **layers)
    stack = load_model(ModelSpec(path=directory, quantisation=case.quantisation), config.device)
    plan = plan_layers(config, stack.config.layers)
    pages = ROOM // PAGE_TOKENS
    sizes = {"pages": pages, "max_batch": config.max_batch, "max_pages": pages}
    runner = DecodeRunner(stack, plan, **sizes, kv_dtype=case.kv_dtype)
    warm_up(runner, ROOM, plan.calibrated)
    warm, randomly = set(seen), random.Random(6)
    for number, length in enumerate(lengths(randomly)):
        start = min(length, ROOM - config.append_chunk_tokens - 1)
        tokens = randomly.randint(1, config.append_chunk_tokens)
        held = tuple(range(pages_for(start + tokens + 1)))
        question = Read(start, [0] * tokens)
        look = replace(question, select_blocks=16, select_among=start)
        result = runner.append(held, look, last=True)
        if result.blocks:
            runner.recompute(held, result.blocks, [0] * BLOCK * len(result.blocks), question, last=True)
        sampling = [Sampling(temperature=float(randomly.randint(0, 1))) for _ in range(number % 6 + 1)]
        rows = [
            Row(100 * number + place, held, start + tokens, 0, one, bool(randomly.randint(0, 1)))
            for place, one in enumerate(sampling)
        ]
        runner.decode(rows)
    return seen - warm


def main() -> None:
    directory, *cases = sys.argv[1:]
    torch.use_deterministic_algorithms(True)  # fills new host memory with NaN
    for case in (Case(**json.loads(given)) for given in cases):
        waits, model = set[str](), f"{directory}/{case.model}"
        with fake_gpu() as seen:
            if case.method:
                new, waits = stage_after_warm_up(model, case, seen)
            else:
                new = decode_after_warm_up(model, case, seen)
            FakeGpu.reads.clear()
            torch.ones(1, device=DEVICE).tolist()
        missing: dict[str, list[str]] = {}
        for kernel, key in sorted(new):
            missing.setdefault(kernel, []).append(key)
        found = {"warm_up": len(seen) - len(new), "missing": missing}
        found |= {"waits": sorted(waits), "noticed": FakeGpu.reads, "confused": sorted(FakeGpu.confused)}
        print(json.dumps({"name": case.name, **found}), flush=True)


if __name__ == "__main__":
    main()
