"""Warming a stage up runs what requests run, on every path, and leaves no trace in their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput
from deltafront.workers.messages.methods import method_spec
from deltafront.workers.model.config import read_config
from deltafront.workers.model.decoder import load_stack
from deltafront.workers.prefill import warm_up
from deltafront.workers.prefill.in_process import run_in_process
from deltafront.workers.prefill.warm_up import prompt_lengths
from deltafront.workers.settings import PrefillConfig

from ..tiny_model import make_tiny_model, random_ids


class Spy:
    """Stands before a method and notes what it is asked."""

    def __init__(self, spec: Any) -> None:
        self.method = build(spec)
        self.seen: list[tuple[int, int, int]] = []
        self.density = 1.0

    def new_state(self, spec: Any) -> Any:
        return self.method.new_state(spec)

    def attend(self, x: AttentionInput, state: Any) -> Any:
        self.seen.append((x.q_start, x.q_BHTD.shape[2], x.k_BGSD.shape[2]))
        out_BHTD, coverage = self.method.attend(x, state)
        assert bool(out_BHTD.isfinite().all())
        self.density = float(coverage.computed) / coverage.causal
        return out_BHTD, coverage


def test_a_method_meets_whole_chunks_past_its_shortest_prompt_and_a_ragged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path)
    config = read_config(directory)
    stack = load_stack(
        directory, config, range(2, 5), embedding=False, head=True, dtype=torch.float32, device="cpu"
    )
    spies: list[Spy] = []

    def spying(spec: Any, _amounts: None) -> Spy:
        spies.append(Spy(spec))
        return spies[-1]

    monkeypatch.setattr(warm_up, "build", spying)
    specs = [method_spec("dense"), method_spec("streaming", {"min_tokens": 1000, "window": 128})]
    warm_up.warm_up(stack, specs, 256)
    dense = [spy for spy in spies if not hasattr(spy.method, "shortest")]
    sparse = [spy for spy in spies if hasattr(spy.method, "shortest")]
    assert dense[0].seen == [(0, 256, 256), (256, 256, 512), (512, 77, 589)]
    assert sparse[0].seen == [(n * 256, 256, n * 256 + 256) for n in range(4)] + [(1024, 77, 1101)]
    assert all(spy.density < 1.0 for spy in sparse), "the sparse path must have run"
    assert [spy.seen[-1][-1] for spy in dense] == prompt_lengths(0, 256)


@pytest.mark.parametrize(("shortest", "chunk_tokens"), [(4096, 8192), (4096, 512), (0, 128), (10_000, 4096)])
def test_the_prompts_meet_every_specialisation(shortest: int, chunk_tokens: int) -> None:
    lengths = prompt_lengths(shortest, chunk_tokens)
    assert all(length > shortest for length in lengths)
    last = [length % chunk_tokens for length in lengths]
    tiles = [-(-rows // 128) for rows in last if rows]
    assert 1 in tiles and any(rows % 16 for rows in last)
    if chunk_tokens > 512:
        assert any(count % 16 and count > 1 for count in tiles), "tiles of the last chunk"
        assert any(-(-length // 128) % 16 for length in lengths), "tiles of the prompt"
    if chunk_tokens > shortest + 128:
        assert any(length < chunk_tokens for length in lengths), "a prompt of one chunk"


def test_a_warm_group_answers_as_a_cold_one(tmp_path: Path) -> None:
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
