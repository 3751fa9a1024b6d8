"""Calibration: maps against a loop, and the choice against its own rule by brute force."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafront.kernels.testing import assert_rows_close
from deltafront.workers.calibration import attention_maps, calibrate, changes, choose
from deltafront.workers.model_config import read_config

IDS = [random.Random(1).randrange(199) for _ in range(150)]


def test_maps_are_transformers_attention_weights(tiny_llama: Path, tiny_stack: Any) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_llama, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        weights = model(torch.tensor([IDS]), output_attentions=True).attentions
    expected = torch.stack([layer[0].amax(0) for layer in weights])
    found = attention_maps(tiny_stack, IDS, queries=20)
    positions = torch.linspace(75, 149, 20).long()
    assert_rows_close(found, expected[:, positions])


def test_changes_are_one_minus_cos() -> None:
    maps = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [0.0, 1.0]], [[2.0, 2.0], [0.0, 3.0]]])
    assert changes(maps) == pytest.approx((0.0, (1 - math.sqrt(0.5) + 1) / 2, 0.0), abs=1e-6)


@given(st.lists(st.floats(0, 1), min_size=4, max_size=40, unique=True), st.data())
def test_the_choice_is_the_largest_change_of_each_part(change: list[float], data: st.DataObject) -> None:
    full = data.draw(st.sampled_from([(), (0,), (0, 1)]))
    count = data.draw(st.integers(1, max(1, len(change) - len(full) - 1)))
    chosen = choose(change, count, full)
    assert len(chosen) == count and list(chosen) == sorted(set(chosen))
    free = list(range(len(full), len(change) - 1))
    sizes = {len(free) // count, -(-len(free) // count)}
    for part, layer in enumerate(chosen):
        mine = free[part * len(free) // count : (part + 1) * len(free) // count]
        assert len(mine) in sizes and layer in mine
        assert change[layer] == max(change[other] for other in mine)


def test_impossible_requests_are_refused(tiny_stack: Any) -> None:
    with pytest.raises(ValueError, match="4 Δ-layers"):
        choose([0.0] * 6, 4, (0, 1))
    with pytest.raises(ValueError, match="too few"):
        attention_maps(tiny_stack, IDS)[0]
        attention_maps(tiny_stack, IDS[:127])


def test_calibrate_is_the_whole_way(tiny_llama: Path, tiny_stack: Any) -> None:
    expected = choose(changes(attention_maps(tiny_stack, IDS)), 2, (0, 1))
    assert calibrate(tiny_llama, read_config(tiny_llama), IDS, 2) == expected
