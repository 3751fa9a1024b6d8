"""Cosines, ranks and Lemma 1's error and bound, against their definitions."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from deltafront.benchmarks.paper_forms.delta_outputs import (
    Bound,
    LastRows,
    best,
    cosine,
    last_rows,
    lemma_1,
    rank_correlation,
)
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.directory.model_config import read_config
from deltafront.workers.model.weights.stack_weights import StackSpec

from ...workers.tiny_model import make_tiny_model


def random_rows(seed: int) -> LastRows:
    generator = torch.Generator().manual_seed(seed)
    shapes = (4, 3, 8), (4, 3, 8), (2, 50, 8)
    return LastRows(*(torch.randn(shape, generator=generator) for shape in shapes))


def test_ranks_are_correlated_as_spearman_says() -> None:
    mine, dense = random_rows(1), random_rows(2)
    found = []
    for h in range(4):
        for row in range(3):
            places = []
            for one in (mine, dense):
                logits = [float(one.q_HRD[h, row] @ key) for key in one.k_GSD[h // 2]]
                places.append([sorted(logits).index(logit) for logit in logits])
            pair = torch.tensor(places, dtype=torch.float64)
            found.append(float(torch.corrcoef(pair)[0, 1]))
    assert rank_correlation(mine, dense) == pytest.approx(sum(found) / 12)
    assert rank_correlation(mine, mine) == 1.0
    turned = LastRows(mine.out_HRD, -mine.q_HRD, mine.k_GSD)
    assert rank_correlation(turned, mine) == pytest.approx(-1.0)


def test_outputs_are_compared_row_by_row() -> None:
    mine, dense = random_rows(1), random_rows(2)
    each = [
        float(torch.cosine_similarity(mine.out_HRD[h, row], dense.out_HRD[h, row], dim=0))
        for h in range(4)
        for row in range(3)
    ]
    assert cosine(mine, dense) == pytest.approx(sum(each) / 12, abs=1e-6)


def test_error_and_bound_are_the_lemmas() -> None:
    generator = torch.Generator().manual_seed(3)
    logit_RS, v_SD = torch.randn(5, 40, generator=generator) * 3, torch.randn(40, 4, generator=generator)
    kept_RS = torch.rand(5, 40, generator=generator) < 0.3
    kept_RS[:, 0] = True
    logit_RS[:, 35:], kept_RS[:, 35:] = -math.inf, False
    error_RD, bound_RD = lemma_1(logit_RS, v_SD, kept_RS)
    for row in range(5):
        power = [math.exp(logit) for logit in logit_RS[row].double().tolist()]
        keys, v = [key for key in range(40) if kept_RS[row, key]], v_SD.double()
        tail = sum(power[key] for key in keys)
        head = sum(power) - tail
        for d in range(4):
            dense = sum(power[key] * float(v[key, d]) for key in range(40)) / (head + tail)
            sparse = sum(power[key] * float(v[key, d]) for key in keys) / tail
            missing = sum(power[key] * float(v[key, d]) for key in range(40) if key not in keys)
            left = abs(dense - sparse - missing / (head + tail))
            assert float(error_RD[row, d]) == pytest.approx(left, rel=1e-9, abs=1e-12)
            largest = max(abs(float(v[key, d])) for key in keys)
            assert float(bound_RD[row, d]) == pytest.approx(head / (head + tail) * largest)
    assert (error_RD <= bound_RD).all()


def test_best_keys_are_those_of_the_largest_logits() -> None:
    logit_RS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 2.0, -math.inf]])
    kept_RS = best(logit_RS, torch.tensor([3, 1]))
    assert kept_RS.tolist() == [[False, True, True, True], [True, False, False, False]]


def test_a_method_that_keeps_everything_is_dense(tmp_path: Path) -> None:
    config = read_config(directory := make_tiny_model(tmp_path))
    every = range(config.layers)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    stack = load_stack(directory, StackSpec(config=config, layers=every, embedding=True, head=True, **where))
    ids, rows = random.Random(2).choices(range(199), k=800), slice(600, 728)
    bounds = {"streaming": Bound(), "best keys": Bound()}
    dense = last_rows(stack, ids, "dense", rows, bounds)
    whole = last_rows(stack, ids, "streaming", rows)
    short = last_rows(stack, ids, "streaming:sink=1,window=100", rows)
    assert len(dense) == config.layers
    for layer, mine in enumerate(dense):
        assert mine.out_HRD.shape[1] == 128 and mine.k_GSD.shape[1] == 600
        assert cosine(whole[layer], mine) == pytest.approx(1.0, abs=1e-5)
    assert cosine(short[-1], dense[-1]) < 0.999
    assert rank_correlation(short[0], dense[0]) == 1.0, "the first layer's queries and keys are the same"
    for sums in bounds.values():  # 800 tokens are within streaming's window
        assert sums.count > 0 and sums.error / sums.count < 1e-6
