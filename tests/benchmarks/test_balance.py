"""The model of how lists are shared out: by hand, and that a sorted counter is the best of its ways."""

from __future__ import annotations

import pytest
import torch

from deltafront.benchmarks.balance import PROMPTS, Prompt, dealt, lengths, orders, taken


def test_dealt_and_taken_by_hand() -> None:
    """Two programs, an item costs 3 more than its tiles: dealt 8 + 3 and 3 + 3, taken 8 and 3 + 3 + 3."""
    assert dealt([5, 0, 0, 0], programs=2) == pytest.approx(8.5 / 11)
    assert taken([5, 0, 0, 0], programs=2) == pytest.approx(8.5 / 9)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)
def test_the_kernels_rule_comes_out_best(prompt: Prompt) -> None:
    """Below 48 items a program sorted lists from a counter, above it the counter alone: 99% of the time."""
    items = orders(prompt, lengths(prompt, torch.Generator().manual_seed(0)))
    assert all(sorted(listed) == sorted(items["rows"]) for listed in items.values())
    few = len(items["rows"]) < 48 * 132
    assert taken(items["sorted" if few else "rows"]) > 0.99
