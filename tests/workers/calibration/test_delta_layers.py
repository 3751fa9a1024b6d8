"""Tests calibration of Δ-layers: attention maps against transformers, choices against brute force."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafront.tests.numerics import assert_rows_close
from deltafront.workers.calibration.delta_layers import (
    attention_maps,
    calibrate,
    choose,
    losses,
    query_positions,
    shortest_text,
)
from deltafront.workers.calibration.probes import Document, Question

IDS = random.Random(1).choices(range(199), k=150)


def test_attention_maps_equal_transformers(tiny_llama: Path, tiny_stack: Any) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_llama, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        weights = model(torch.tensor([IDS]), output_attentions=True).attentions
    expected = torch.stack([layer[0].amax(0) for layer in weights])
    positions = [3, 75, 149]
    found = attention_maps(tiny_stack, IDS, positions)
    assert_rows_close(found, expected[:, positions])


def test_delta_layer_loss_is_the_mass_lost_with_its_selected_pages() -> None:
    draw = torch.Generator().manual_seed(3)
    positions = [79, 90, 149]
    maps = torch.rand(3, 3, 150, generator=draw) ** 4
    maps[:, torch.arange(150) > torch.tensor(positions)[:, None]] = 0
    found = losses(maps, positions, budget=4, recency=2)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for query, position in enumerate(positions):
        score = [[float(row[16 * p : 16 * p + 16].sum()) for p in range(10)] for row in maps[:, query]]
        last = position // 16
        for a in range(3):
            others = sorted(range(last - 1), key=lambda page: -score[a][page])
            kept = {last, last - 1, *others[:2]}
            for b in range(3):
                expected[a, b] += sum(score[b][page] for page in kept) / 3
    expected = expected.diagonal() - expected
    torch.testing.assert_close(found, expected.clamp(min=0), atol=1e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 10), st.sampled_from([(), (0,), (0, 1), (0, 4)]), st.integers(0, 999), st.data())
def test_chosen_delta_layers_equal_brute_force(
    layers: int, full: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    loss = torch.rand(layers, layers, generator=torch.Generator().manual_seed(seed)).double()
    free = [layer for layer in range(layers) if layer not in full]
    candidates = [layer for layer in free if layer < layers - 1]
    count = data.draw(st.integers(1, len(candidates)))
    limit = candidates[len(candidates) // 4]

    def total(chosen: tuple[int, ...]) -> float:
        sparse = [layer for layer in free if layer > chosen[0] and layer not in chosen]
        return sum(float(loss[max(c for c in chosen if c < layer), layer]) for layer in sparse)

    possible = [c for c in itertools.combinations(candidates, count) if c[0] <= limit]
    found = choose(loss, count, full)
    assert found in possible
    assert total(found) == pytest.approx(min(map(total, possible)))


def test_refuses_impossible_budgets_and_layer_counts() -> None:
    with pytest.raises(ValueError, match="4 Δ-layers"):
        choose(torch.zeros(6, 6), 4, (0, 1))
    with pytest.raises(ValueError, match="too few"):
        query_positions(127, [])
    with pytest.raises(ValueError, match="budget of 5 pages"):
        losses(torch.zeros(6, 1, 160), [100], 5, 2)


def lost(stack: Any, ids: list[int], positions: list[int]) -> torch.Tensor:
    return losses(attention_maps(stack, ids, positions), positions, 4, 2)


def test_calibrate_equals_its_steps_one_by_one(tiny_stack: Any) -> None:
    positions = query_positions(150, [])
    assert len(positions) == 64 and (positions[0], positions[-1]) == (75, 149)
    expected = choose(lost(tiny_stack, IDS, positions), 2, (0, 1))
    assert calibrate(tiny_stack, [Document(IDS, [])], 2, budget=4, recency=2).delta_layers == expected


def test_delta_layer_losses_count_only_rows_predicting_answer_tokens(tiny_stack: Any) -> None:
    questions = [Question("a", (7, 8, 9), (10, 11)), Question("b", (12,), (13,))]
    found = calibrate(tiny_stack, [Document(IDS, questions)], 2, budget=4, recency=2)
    whole = [*IDS, 7, 8, 9, 10, 11, 12, 13]
    assert found.tokens == (157,)
    expected = lost(tiny_stack, whole, [152, 153, 155])
    torch.testing.assert_close(torch.tensor(found.losses, dtype=torch.float64), expected)


def test_calibration_weighs_texts_equally(tiny_stack: Any) -> None:
    texts = [IDS, random.Random(2).choices(range(199), k=300)]
    found = calibrate(tiny_stack, [Document(ids, []) for ids in texts], 2, budget=4, recency=2)
    both = sum(lost(tiny_stack, ids, query_positions(len(ids), [])) for ids in texts)
    torch.testing.assert_close(torch.tensor(found.losses, dtype=torch.float64), both / 2)
    assert found.tokens == (150, 300)
    assert found.delta_layers == choose(both, 2, (0, 1))


def test_refuses_an_impossible_calibration_in_one_line(tiny_stack: Any) -> None:
    with pytest.raises(ValueError, match="1025 tokens are more than the model's 1024 positions"):
        calibrate(tiny_stack, [Document([1] * 1025, [])], 2, budget=4, recency=2)
    with pytest.raises(ValueError, match="recency 4 must be"):
        calibrate(tiny_stack, [Document(IDS, [])], 2, budget=4, recency=4)
    for budget in (2, 4, 40):
        shortest = shortest_text(budget)
        losses(torch.rand(3, 1, shortest), [shortest - 1], budget, 1)
        assert shortest == 128 or shortest // 2 - 1 == budget * 16
    with pytest.raises(ValueError, match="too few"):
        losses(torch.rand(3, 1, shortest_text(40) - 1), [1280], 40, 1)
