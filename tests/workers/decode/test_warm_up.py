"""Tests that a decode worker's warm-up runs every path of requests and does not change their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.messages.requests import Sampling

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.mark.parametrize("delta_layers", [(), (1, 3)])
async def test_warm_up_runs_every_path_and_changes_no_answer(
    bench: Any, monkeypatch: pytest.MonkeyPatch, delta_layers: tuple[int, ...]
) -> None:
    steps: list[list[tuple[int, bool, float]]] = []
    appended: list[int] = []
    again: list[int] = []
    decode, append, recompute = DecodeRunner.decode, DecodeRunner.append, DecodeRunner.recompute

    def noting(self: DecodeRunner, rows: Sequence[Row]) -> Any:
        steps.append([(row.length, row.selects_pages, row.sampling.temperature) for row in rows])
        return decode(self, rows)

    def noting_append(self: DecodeRunner, pages: Any, step: Read, *more: Any) -> Any:
        appended.append(step.start)
        return append(self, pages, step, *more)

    def noting_recompute(self: DecodeRunner, pages: Any, blocks: Any, *more: Any, **how: Any) -> Any:
        again.append(len(blocks))
        return recompute(self, pages, blocks, *more, **how)

    monkeypatch.setattr(DecodeRunner, "decode", noting)
    monkeypatch.setattr(DecodeRunner, "append", noting_append)
    monkeypatch.setattr(DecodeRunner, "recompute", noting_recompute)
    how = {
        "page_selection": "delta" if delta_layers else "full",
        "delta_layers": delta_layers,
        "page_budget": 3,
        "recency": 1,
        "full_layers": (0,),
        "cache_tokens": 1024,
    }
    warm = await bench(warm_up=True, **how)
    assert appended == [100, 1024 - 79]
    assert again == [2]  # the shorter request has no block to recompute
    assert {length for step in steps for length, _, _ in step} == {177, 1022}
    wanted = {(True,), (False,), (True, False)} if delta_layers else {(False,), (False, False)}
    assert {tuple(selects for _, selects, _ in step) for step in steps} == wanted
    assert {t for step in steps for _, _, t in step} == {0.0, 1.0}
    cold = await bench(**how)
    ids = [n * 7 % 90 + 1 for n in range(150)]
    answers = [await one.ask("a", ids, Sampling(max_tokens=12)) for one in (warm, cold)]
    assert answers[0].ids == answers[1].ids
    assert answers[0].finish.reason is answers[1].finish.reason


@pytest.mark.parametrize("room", [16, 64, 80])
async def test_worker_with_few_pages_warms_up_too(bench: Any, room: int) -> None:
    warm = await bench(warm_up=True, page_selection="full", cache_tokens=room)
    answer = await warm.ask("a", [1, 2, 3], Sampling(max_tokens=4, ignore_eos=True))
    assert len(answer.ids) == 4
