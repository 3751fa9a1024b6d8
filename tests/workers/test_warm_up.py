"""Warming up runs what requests run, on every path, and leaves no trace in their answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput
from deltafront.workers import warm_up
from deltafront.workers.decode.runner import DecodeRunner, Row
from deltafront.workers.messages import Sampling, resolve
from deltafront.workers.model.config import read_config
from deltafront.workers.model.decoder import load_stack
from deltafront.workers.prefill.in_process import run_in_process
from deltafront.workers.settings import PrefillConfig
from deltafront.workers.warm_up import prompt_lengths

from .tiny_model import make_tiny_model, random_ids


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

    def spying(spec: Any) -> Spy:
        spies.append(Spy(spec))
        return spies[-1]

    monkeypatch.setattr(warm_up, "build", spying)
    specs = [resolve("dense"), resolve("streaming", {"min_tokens": 1000, "window": 128})]
    warm_up.warm_up_prefill(stack, specs, 256)
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
    ids, method = random_ids(300), resolve("dpxa", {"min_tokens": 0})
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


@pytest.mark.parametrize("delta_layers", [(), (1, 3)])
async def test_a_warm_decode_worker_has_run_every_path_and_answers_as_a_cold_one(
    bench: Any, monkeypatch: pytest.MonkeyPatch, delta_layers: tuple[int, ...]
) -> None:
    steps: list[list[tuple[int, bool, float]]] = []
    appended: list[tuple[int, int]] = []
    decode, append = DecodeRunner.decode, DecodeRunner.append

    def noting(self: DecodeRunner, rows: Sequence[Row]) -> Any:
        steps.append([(row.length, row.selects_pages, row.sampling.temperature) for row in rows])
        return decode(self, rows)

    def noting_append(self: DecodeRunner, pages: Any, start: int, ids: Any, last: bool) -> Any:
        appended.append((start, len(ids)))
        return append(self, pages, start, ids, last)

    monkeypatch.setattr(DecodeRunner, "decode", noting)
    monkeypatch.setattr(DecodeRunner, "append", noting_append)
    how = {
        "page_selection": "delta" if delta_layers else "full",
        "delta_layers": delta_layers,
        "page_budget": 3,
        "recency": 1,
        "full_layers": (0,),
        "cache_tokens": 1024,
    }
    warm = await bench(warm_up=True, **how)
    assert [start for start, _ in appended] == [100, 1024 - 79]
    assert {length for step in steps for length, _, _ in step} == {177, 1022}
    wanted = {(True,), (False,), (True, False)} if delta_layers else {(False,), (False, False)}
    assert {tuple(selects for _, selects, _ in step) for step in steps} == wanted
    assert {t for step in steps for _, _, t in step} == {0.0, 1.0}
    cold = await bench(**how)
    ids = [n * 7 % 90 + 1 for n in range(150)]
    answers = [await one.ask("a", ids, Sampling(max_tokens=12)) for one in (warm, cold)]
    assert answers[0].ids == answers[1].ids
    assert answers[0].finish.reason is answers[1].finish.reason
