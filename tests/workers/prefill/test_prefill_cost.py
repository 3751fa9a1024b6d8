"""What a group learns of its speed, against synthetic chunks of known cost."""

from __future__ import annotations

import random
from itertools import pairwise

from deltafront.workers.messages.states import PrefillCost
from deltafront.workers.prefill.group.cost import CostFit

CHUNK = 8192
TRUE = PrefillCost(token_s=2.3e-5, pair_s=8.5e-10, chunk_s=0.012, chunk_tokens=CHUNK)
"""8B's, about, on an H200."""


def chunks(start: int, tokens: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(start, tokens, CHUNK), tokens]))


def read(fit: CostFit, chance: random.Random, start: int, tokens: int, true: PrefillCost = TRUE) -> float:
    """Prefill a prompt with noise of 5% in each chunk, and return its seconds."""
    total = 0.0
    for begin, end in chunks(start, tokens):
        seconds = true.seconds(begin, end) * max(0.5, chance.gauss(1.0, 0.05))
        fit.record_chunk(begin, end - begin, seconds)
        total += seconds
    return total


def prompt(chance: random.Random) -> tuple[int, int]:
    tokens = int(chance.choice([256, 1024, 2048, 8192, 32_768, 131_072]) * chance.uniform(0.7, 1.3))
    return (tokens // 2 if chance.random() < 0.3 else 0), tokens


def test_predicted_seconds_are_within_15_percent_at_p90() -> None:
    for seed in range(3):
        chance, fit = random.Random(seed), CostFit(CHUNK)
        errors = []
        for number in range(200):
            start, tokens = prompt(chance)
            expected = fit.cost.seconds(start, tokens)
            found = read(fit, chance, start, tokens)
            if number >= 20:
                errors.append(abs(expected / found - 1))
        assert sorted(errors)[int(0.9 * len(errors))] < 0.15, seed


def test_group_that_becomes_slower_is_predicted_slower() -> None:
    chance, fit = random.Random(0), CostFit(CHUNK)
    slow = PrefillCost(token_s=5e-5, pair_s=1.7e-9, chunk_s=0.02, chunk_tokens=CHUNK)
    for true in (TRUE, slow):
        for _ in range(60):
            read(fit, chance, *prompt(chance), true)
    assert abs(fit.cost.seconds(0, 65_536) / slow.seconds(0, 65_536) - 1) < 0.15


def test_one_chunk_that_compiles_changes_little() -> None:
    chance, fit = random.Random(0), CostFit(CHUNK)
    for _ in range(30):
        read(fit, chance, *prompt(chance))
    before = fit.cost.seconds(0, 32_768)
    fit.record_chunk(0, 8192, 60.0)
    assert fit.cost.seconds(0, 32_768) < 1.2 * before


def test_no_part_of_a_cost_is_negative() -> None:
    fit = CostFit(CHUNK)
    assert fit.cost.seconds(0, 1000) == 0.0
    for start, seconds in ((0, 1.0), (8192, 0.8), (16_384, 0.6)):
        fit.record_chunk(start, 8192, seconds)
    cost = fit.cost
    assert min(cost.token_s, cost.pair_s, cost.chunk_s) >= 0.0 < cost.seconds(0, 8192)
