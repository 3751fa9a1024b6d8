"""The recall benchmark's two measures against brute force, and one small run of its estimators."""

from __future__ import annotations

import pytest
import torch

from deltafront.benchmarks.recall import COVERAGES, ESTIMATORS, measure, tiles_needed, true_masses
from deltafront.tests.numerics import chunk_of
from deltafront.tests.reference.structured import structured_input


def test_true_masses_equal_one_big_softmax() -> None:
    x = structured_input(300, q_heads=4, kv_heads=2, head_dim=16)
    for part in (x, chunk_of(x, 128, 300)):
        k = part.k_BGSD.double().repeat_interleave(2, 1)
        logit = part.q_BHTD.double() @ k.transpose(2, 3) * part.scale
        position = torch.arange(part.q_start, 300)[:, None]
        mass = logit.masked_fill(torch.arange(300) > position, float("-inf")).softmax(-1)
        found = true_masses(part)
        for n, rows in enumerate(mass.split(128, dim=2)):
            for m, tile in enumerate(rows.split(128, dim=3)):
                torch.testing.assert_close(
                    found[:, :, n, m].double(), tile.sum(-1).mean(-1), atol=1e-6, rtol=1e-5
                )


@pytest.mark.parametrize("forced", [False, True])
def test_tiles_needed_equals_brute_force(forced: bool) -> None:
    score = torch.rand(1, 2, 3, 8)
    true = torch.rand(1, 2, 3, 8) ** 4
    for n in range(3):
        true[:, :, n, 6 + n :] = 0.0
    true = true / true.sum(-1, keepdim=True)
    needed = tiles_needed(score, true, 5, forced=forced)
    for c, coverage in enumerate(COVERAGES):
        for h in range(2):
            total = 0
            for n in range(3):
                rest = sorted(range(6 + n), key=lambda m, n=n, h=h: -float(score[0, h, n, m]))
                if forced:
                    rest = [0, 5 + n, *(m for m in rest if m not in (0, 5 + n))]
                mass, count = 0.0, 0
                while mass < coverage - 1e-9:
                    mass += float(true[0, h, n, rest[count]])
                    count += 1
                total += count
            assert float(needed[c, h]) == pytest.approx(total / (6 + 7 + 8))


def test_the_oracle_needs_least_and_ours_less_than_block_means() -> None:
    x = structured_input(2048, q_heads=3, kv_heads=1, head_dim=64)
    rows = {row.estimator: row for row in measure([x], ["dpxa", "block_pool"])}
    assert {"dpxa", "block_pool"} < set(ESTIMATORS)
    assert rows["oracle"].coverage_90 <= rows["dpxa"].coverage_90 < rows["block_pool"].coverage_90
    assert rows["dpxa"].coverage_75 <= rows["dpxa"].coverage_90 <= rows["dpxa"].coverage_95
