"""Tests the choice of Δ-layers: by the shift of attention, periodic and random."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks.accuracy.decode import parse_selection
from deltafront.benchmarks.paper_forms.delta_layers import (
    attention_shifts,
    periodic_layers,
    random_layers,
    shifted_layers,
)
from deltafront.kernels.interface import AttentionInput
from deltafront.workers.calibration.dense_pass import embedded, read_densely
from deltafront.workers.decode.decode_attention import plan_layers
from deltafront.workers.settings import DecodeConfig

from ...workers.tiny_model import make_tiny_model, whole_stack


def test_layer_shift_is_one_minus_the_cosine_of_attention_maps(tmp_path: Path) -> None:
    stack = whole_stack(make_tiny_model(tmp_path))
    ids = random.Random(1).choices(range(199), k=200)
    positions, maps = [90, 150, 199], list[list[torch.Tensor]]()

    def hook(_layer: int, x: AttentionInput) -> None:
        rows = []
        for place in positions:
            heads = [
                (x.k_BGSD[0, h // x.group, : place + 1] @ x.q_BHTD[0, h, place] * x.scale).softmax(0)
                for h in range(x.q_BHTD.shape[1])
            ]
            rows.append(torch.cat(heads))
        maps.append(rows)

    read_densely(stack, embedded(stack, ids), hook)
    expected = [0.0]
    for before, after in itertools.pairwise(maps):
        cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(before, after, strict=True)]
        expected.append(1 - sum(cosines) / len(cosines))
    assert attention_shifts(stack, ids, positions).tolist() == pytest.approx(expected, abs=1e-5)


def test_chooses_the_layer_with_the_largest_shift_of_each_part() -> None:
    shift = [0.0, 0.9, 0.9, 0.1, 0.5, 0.2, 0.3, 0.1, 0.1, 0.4, 0.9]
    assert shifted_layers(shift, 1) == (2,)
    assert shifted_layers(shift, 2) == (2, 4)
    assert shifted_layers(shift, 3) == (2, 4, 9)  # from parts 3-5 and 6-9, without the last layer
    assert shifted_layers(shift, 8) == (2, 3, 4, 5, 6, 7, 8, 9)


@pytest.mark.parametrize("layers", [11, 30])
def test_chosen_layers_begin_with_2_and_exclude_the_last(layers: int) -> None:
    shift = [random.Random(layers).random() for _ in range(layers)]
    for count in range(1, layers - 2):
        for found in (
            shifted_layers(shift, count), periodic_layers(layers, count), random_layers(layers, count, 3),
        ):  # fmt: skip
            assert len(found) == count and found[0] == 2 and found[-1] <= layers - 2
            assert list(found) == sorted(set(found))
    for count in (0, layers - 1):
        with pytest.raises(ValueError, match=f"a model of {layers} layers has 1 to {layers - 3}"):
            periodic_layers(layers, count)
    assert periodic_layers(30, 3) == (2, 11, 20)
    assert random_layers(30, 4, 1) == random_layers(30, 4, 1) != random_layers(30, 4, 2)


def test_parses_periodic_and_random_delta_layers() -> None:
    def plan(delta_layers: tuple[int, ...], recency: int):  # type: ignore[no-untyped-def]
        config = DecodeConfig(full_layers=(), delta_layers=delta_layers, page_budget=64, recency=recency)
        return plan_layers(config, 30)

    assert parse_selection("periodic:3:64", 30) == plan((2, 11, 20), 8)
    assert parse_selection("random:4:1:64:16", 30) == plan(random_layers(30, 4, 1), 16)
    assert parse_selection("2,14,22:64:4", 30) == plan((2, 14, 22), 4)
    for wrong in ("periodic", "periodic:3", "random:3:64"):
        with pytest.raises(ValueError):
            parse_selection(wrong, 30)
