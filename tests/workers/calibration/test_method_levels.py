"""Tests making a profile's levels from documents: densities are met, and costly layers get more density."""

from __future__ import annotations

import random

import pytest
import torch

from deltafront.kernels.methods import method_spec
from deltafront.workers.calibration import method_levels as levels
from deltafront.workers.calibration.curves import QUOTAS, Curves, curves, forced_density
from deltafront.workers.calibration.method_levels import head_thresholds, method_levels, selector_of
from deltafront.workers.calibration.probes import Document, Question
from deltafront.workers.calibration.sensitivity import LayerCosts
from deltafront.workers.calibration.thresholds import ADJUSTMENTS, FACTOR, START
from deltafront.workers.model.calibrated.profile import shaping_options
from deltafront.workers.model.decoder.stack import LayerStack

POOLED = method_spec("xattention", {"window": 1})


def made(seed: int, tokens: int) -> Document:
    ids = random.Random(seed).choices(range(199), k=tokens)
    return Document(ids, [Question("it", tuple(ids[5:9]), tuple(ids[9:12]))])


def costs(tail: list[float], answer: list[float] | None = None) -> LayerCosts:
    return LayerCosts(torch.tensor(tail), torch.tensor(answer or [0.0] * len(tail)))


def test_calibrates_a_level_for_each_prompt_length_and_density(tiny_stack: LayerStack) -> None:
    steps: list[str] = []
    found = method_levels(
        tiny_stack,
        {640: [made(1, 640), made(2, 640)], 400: [made(3, 400)]},
        POOLED,
        [0.75, 0.9],
        tell=steps.append,
    )
    assert found.method == "xattention" and found.options == shaping_options(POOLED)
    assert [(level.density, level.tokens) for level in found.levels] == [
        (0.75, 400),
        (0.9, 400),
        (0.75, 640),
        (0.9, 640),
    ]
    assert found.levels[2].density_at_length == 0.75 and found.levels[0].density_at_length == pytest.approx(
        0.75 * 1.6**0.4, abs=1e-4
    )
    config = tiny_stack.config
    assert all(len(level.thresholds) == config.layers for level in found.levels)
    assert all(
        len(row) == config.q_heads and set(row) <= set(QUOTAS)
        for level in found.levels
        for row in level.thresholds
    )
    assert len(steps) == 10 and any("640 tokens, document 2 of 2" in step for step in steps)


def test_layers_whose_sparsity_costs_more_get_more_density() -> None:
    steps = torch.linspace(0, 1, len(QUOTAS))
    density = (0.2 + 0.8 * steps).expand(2, 2, -1)
    error = ((1 - steps) ** 2).expand(2, 2, -1).clone()
    curves = Curves(density, error, error, QUOTAS)
    one, other = head_thresholds([curves], [costs([9.0, 1.0])], 0.6)
    assert min(one) > max(other)
    asked, unasked = head_thresholds([curves], [costs([1.0, 1.0], [9.0, 1.0])], 0.6)
    assert min(asked) > max(unasked)
    alike = head_thresholds([curves, curves], [costs([1.0, 1.0]), costs([1.0, 1.0])], 0.6)
    assert max(map(max, alike)) - min(map(min, alike)) <= 0.11
    error[0, 1] *= 0.01
    quiet = head_thresholds([curves], [costs([1.0, 1.0])], 0.6)
    assert quiet[0][1] < quiet[0][0]


def test_errors_at_fact_tokens_are_weighted_by_answer_loss() -> None:
    steps = torch.linspace(0, 1, len(QUOTAS))
    density = (0.2 + 0.8 * steps).expand(1, 2, -1)
    falling = (1 - steps) ** 2
    prose, facts = torch.stack([falling, 0.01 * falling])[None], torch.stack([0.01 * falling, falling])[None]
    curves = Curves(density, prose, facts, QUOTAS)
    ((one, other),) = head_thresholds([curves], [costs([1.0], [0.0])], 0.6)
    assert one > other
    ((one, other),) = head_thresholds([curves], [costs([1.0], [1.0])], 0.6)
    assert one < other
    ((one, other),) = head_thresholds([curves], [costs([1.0], [1.0])], 0.6, answer_weight=0.1)
    assert one > other


def test_a_layer_without_error_gets_the_smallest_threshold() -> None:
    density = torch.tensor([0.4, *([1.0] * (len(QUOTAS) - 1))]).expand(1, 2, -1)
    nothing = torch.zeros(1, 2, len(QUOTAS))
    curves = Curves(density, nothing, nothing, QUOTAS)
    assert head_thresholds([curves], [costs([0.0])], 0.7) == ((0.0, 0.0),)


def test_level_that_exceeds_its_density_falls_back_to_sink_and_window(
    tiny_stack: LayerStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse activations can make thresholds keep far more than the level's density."""
    monkeypatch.setattr(levels, "realised", lambda *_: 1.0)
    (found,) = method_levels(tiny_stack, {640: [made(1, 640)]}, POOLED, [0.75]).levels
    assert {threshold for row in found.thresholds for threshold in row} == {QUOTAS[0]}


def test_refuses_too_sparse_a_level_before_it_measures(tiny_stack: LayerStack) -> None:
    document, told = made(1, 640), list[str]()
    selector = selector_of(POOLED)
    least = curves(tiny_stack, document, selector).density_LHI[..., 0]
    assert forced_density(640, selector.rule) == pytest.approx(float(least.max()))
    assert forced_density(640, selector.rule) == pytest.approx(float(least.min()))
    sparser = 0.99 * float(least.min())
    with pytest.raises(ValueError, match="at 640 tokens sink and window alone take"):
        method_levels(tiny_stack, {640: [document]}, POOLED, [0.9, sparser], tell=told.append)
    assert not told


def test_threshold_search_may_reach_the_smallest_threshold(
    tiny_stack: LayerStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "realised", lambda *_: 1.0)
    documents = {640: [made(1, 640)]}
    (found,) = method_levels(tiny_stack, documents, POOLED, [0.9], allocation="threshold").levels
    least = round(START * FACTOR**ADJUSTMENTS, 6)
    assert {threshold for row in found.thresholds for threshold in row} == {least}


def test_refuses_methods_without_thresholds(tiny_stack: LayerStack) -> None:
    for name in ("dense", "streaming", "xattention+delta"):
        with pytest.raises(ValueError, match="ranks no tiles"):
            method_levels(tiny_stack, {300: [made(1, 300)]}, method_spec(name), [0.5])
