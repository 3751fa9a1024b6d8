"""Tests that a stage's warm-up runs every path of requests and does not change their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.methods import method_spec
from deltafront.tests.workers.in_process import run_in_process
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.weights.stack_weights import StackSpec
from deltafront.workers.prefill.stage import warm_up
from deltafront.workers.prefill.stage.warm_up import length_classes, longest_dense_rows, prompt_lengths
from deltafront.workers.settings import PrefillConfig

from ..tiny_model import make_tiny_model, random_ids


class Spy:
    """Wraps a method and records its calls."""

    def __init__(self, spec: Any) -> None:
        self.method = build(spec)
        self.seen: list[tuple[int, int, int]] = []
        self.least = 1.0

    def new_state(self, spec: Any) -> Any:
        return self.method.new_state(spec)

    def attend(self, x: AttentionInput, state: Any) -> Any:
        self.seen.append((x.q_start, x.q_BHTD.shape[2], x.k_BGSD.shape[2]))
        out_BHTD, counts = self.method.attend(x, state)
        assert bool(out_BHTD.isfinite().all())
        self.least = min(self.least, float(counts.computed) / counts.causal)
        return out_BHTD, counts


def test_warm_up_runs_full_and_partial_chunks_beyond_min_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path)
    config = read_config(directory)
    stack = load_stack(
        directory,
        StackSpec(
            config=config,
            layers=range(2, 5),
            embedding=False,
            head=True,
            dtype=torch.float32,
            device=torch.device("cpu"),
        ),
    )
    spies: list[Spy] = []

    def spying(spec: Any, *_more: Any) -> Spy:
        spies.append(Spy(spec))
        return spies[-1]

    monkeypatch.setattr(warm_up, "build", spying)
    specs = [method_spec("dense"), method_spec("streaming", {"min_tokens": 1000, "window": 128})]
    warm_up.warm_up(stack, specs, 256)
    dense, sparse = spies
    assert dense.seen == [(0, 256, 256), (256, 256, 512), (512, 77, 589)]
    short = [(0, 77, 77)]
    assert sparse.seen == [(n * 256, 256, n * 256 + 256) for n in range(4)] + [(1024, 77, 1101)] + short
    assert sparse.least < 1.0, "the sparse path must have run"


def test_warm_up_prompts_have_full_partial_and_short_chunks() -> None:
    assert prompt_lengths(0, 128) == [2 * 128 + 77]
    assert prompt_lengths(4096, 8192) == [2 * 8192 + 77, 77]
    assert prompt_lengths(4096, 512) == [9 * 512 + 77, 77]
    assert prompt_lengths(64, 128) == [2 * 128 + 77, 64]
    assert longest_dense_rows(0, 128) == [3 * 128 - 1]
    assert longest_dense_rows(4096, 8192) == [3 * 8192 - 1, 4096]


def test_warm_up_prompt_lengths_double_up_to_the_longest() -> None:
    assert length_classes(1000) == [128, 256, 512, 1000]
    assert length_classes(1024) == [128, 256, 512, 1024]
    assert length_classes(100) == [100]


def test_warm_up_does_not_change_answers(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    ids, method = random_ids(300), method_spec("dpxa", {"min_tokens": 0})
    cold, warm = (
        run_in_process(
            directory,
            PrefillConfig(stages=2, chunk_tokens=128, cache_tokens=512, warm_up=names),
            ids,
            method,
        )[1]
        for names in ((), ("dense", "xattention+delta"))
    )
    assert (cold == warm).all()
