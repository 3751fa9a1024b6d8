"""What a layout holds, against sizes that were added up one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltafront.benchmarks.layout import HEADER, Layout, fit, row
from deltafront.service.cli.size import GIB, RESERVE_GIB, SHAPES, rank_bytes, stage_bytes
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.settings import Quantisation

LAYOUTS = {
    "shared": Layout(1, 1, 0.5, 79.0, 1, 1, 0.5, 79.0),
    "two groups": Layout(2, 2, 1.0, 79.0, 3, 1, 1.0, 79.0),
    "unlike GPUs": Layout(1, 8, 1.0, 79.0, 1, 1, 1.0, 267.0),
    "ranks": Layout(1, 4, 1.0, 79.0, 2, 4, 1.0, 79.0),
    "side by side": Layout(1, 8, 1.0, 79.0, 1, 8, 0.0, 79.0),
}


@pytest.mark.parametrize("kind", [None, "fp8"])
@pytest.mark.parametrize("tokens", [1000, 131_072, 524_288])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_fits_exactly_if_stages_and_ranks_have_room(
    layout: Layout, name: str, tokens: int, kind: Quantisation | None
) -> None:
    model, found = SHAPES[name], fit(layout, name, SHAPES[name], tokens, kind)
    stage_room = (layout.stage_gpu_gib - RESERVE_GIB) * GIB
    stage = stage_bytes(model, layout.stages, tokens, "bfloat16", kind)
    assert found.prefill.stage_bytes == stage
    assert bool(found.prefill.stages) == (stage <= stage_room)
    rank_room = (layout.rank_gpu_gib - RESERVE_GIB) * GIB
    if layout.gpus_per_rank < 1:
        rank_room -= stage + RESERVE_GIB * GIB
    each, pages = found.decode.contexts_per_worker, -(-tokens // 16) * 16
    assert rank_bytes(model, layout.ranks, (each + 1) * pages, "bfloat16", kind) > rank_room
    assert not each or rank_bytes(model, layout.ranks, each * pages, "bfloat16", kind) <= rank_room
    assert found.contexts == layout.workers * each
    assert found.gpus == (layout.gpus if each and stage <= stage_room else None)
    whole = (layout.stage_gpu_gib - RESERVE_GIB) * GIB
    fitting = [n for n in range(1, 17) if stage_bytes(model, n, tokens, "bfloat16", kind) <= whole]
    assert found.stages_needed == fitting[0]


def test_adds_up_the_gpus_of_a_layout() -> None:
    assert [layout.gpus for layout in LAYOUTS.values()] == [1, 7, 9, 12, 8]


def test_summary_line_says_what_fits_and_what_would_fit() -> None:
    shared, unlike = LAYOUTS["shared"], LAYOUTS["unlike GPUs"]
    lines = [row(fit(shared, "8b", SHAPES["8b"], tokens)) for tokens in (131_072, 524_288)]
    assert lines == [
        ["8b", "131,072", "1", "1 × 31.0", "1 × 31.0", "1"],
        ["8b", "524,288", "–", "does not fit: 79.0, needs 2 stages", "does not fit: 79.0", "–"],
    ]
    assert row(fit(unlike, "70b", SHAPES["70b"], 524_288, "fp8"))[0] == "70b, fp8"
    beside = row(fit(LAYOUTS["side by side"], "70b", SHAPES["70b"], 131_072))
    assert beside == ["70b", "131,072", "8", "8 × 22.9", "1 × 8 × 38.1", "4"]
    tiny = replace(unlike, stage_gpu_gib=RESERVE_GIB + 0.1)
    assert "no number of stages fits" in row(fit(tiny, "70b", SHAPES["70b"], 1000))[3]
    assert all(len(line) == len(HEADER) for line in lines)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="33 stages"):
        fit(replace(LAYOUTS["shared"], stages=33), "8b", SHAPES["8b"], 1000)
