"""How evenly lists of tiles can be shared out among a GPU's programs, without a GPU.

    python -m deltafront.benchmarks.balance

Draws lists as prompts and chunks have them and prints which share of the time the mean program works: dealt
in turns (every second turn in reverse) or taken from a counter by whoever is free; in the order of the rows
of one key head after another, sorted by length within each key head, or sorted over all. `hopper_launch.py`
does what comes out best. A list costs its tiles and START more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

PROGRAMS = 132
START = 3.0
"""What an item costs beside its tiles, in tiles: its queries, its output, the pipeline's filling."""
EVEN = (0.085,)
UNEVEN = (0.05, 0.1, 0.9, 0.2, 0.15, 0.3, 0.05, 0.5, 0.1)


@dataclass(frozen=True)
class Prompt:
    """Row tiles first .. first + rows - 1; densities are those of the heads, in turn."""

    name: str
    heads: int
    key_heads: int
    rows: int
    first: int
    densities: Sequence[float]


PROMPTS = (
    Prompt("random, 32,768 tokens, 36/12 heads", 36, 12, 256, 0, EVEN),
    Prompt("random, 131,072 tokens, 9/3 heads", 9, 3, 1024, 0, EVEN),
    Prompt("random, 131,072 tokens, 32/8 heads", 32, 8, 1024, 0, EVEN),
    Prompt("uneven, chunk of 16,384 at 114,688, 9/3 heads", 9, 3, 128, 896, UNEVEN),
    Prompt("uneven, chunk of 16,384 at 49,152, 9/3 heads", 9, 3, 128, 384, UNEVEN),
    Prompt("uneven, chunk of 8,192 at 65,536, 32/8 heads", 32, 8, 64, 512, UNEVEN),
    Prompt("uneven, chunk of 16,384 at 65,536, 32/8 heads", 32, 8, 128, 512, UNEVEN),
    Prompt("uneven, 32,768 tokens, 32/8 heads", 32, 8, 256, 0, UNEVEN),
    Prompt("uneven, 131,072 tokens, 9/3 heads", 9, 3, 1024, 0, UNEVEN),
)


def lengths(prompt: Prompt, generator: torch.Generator) -> torch.Tensor:
    """Tiles of each list, length_HN: a binomial of the causal ones, sink and diagonal at least."""
    share_H = torch.tensor(prompt.densities).repeat(prompt.heads)[: prompt.heads]
    spread_HN = torch.exp(0.3 * torch.randn(prompt.heads, prompt.rows, generator=generator))
    spread_HN = spread_HN if len(prompt.densities) > 1 else torch.ones_like(spread_HN)
    share_HN = (share_H[:, None] * spread_HN).clamp(0, 1)
    causal_N = prompt.first + 1.0 + torch.arange(prompt.rows)
    return torch.binomial(causal_N.expand_as(share_HN), share_HN, generator=generator).clamp(min=2)


def orders(prompt: Prompt, length_HN: torch.Tensor) -> dict[str, list[float]]:
    grouped = length_HN.view(prompt.key_heads, -1, prompt.rows)
    by_row = grouped.flip(2).transpose(1, 2).reshape(prompt.key_heads, -1)
    return {
        "rows": by_row.flatten().tolist(),
        "sorted in a key head": by_row.sort(1, descending=True).values.flatten().tolist(),
        "sorted": by_row.flatten().sort(descending=True).values.tolist(),
    }


def dealt(items: Sequence[float], programs: int = PROGRAMS) -> float:
    """Mean over largest load when items are dealt in turns, every second turn in reverse."""
    load = [0.0] * programs
    for i, tiles in enumerate(items):
        turn, lane = divmod(i, programs)
        load[programs - 1 - lane if turn % 2 else lane] += tiles + START
    return sum(load) / programs / max(load)


def taken(items: Sequence[float], programs: int = PROGRAMS) -> float:
    """The same when whoever is free takes the next."""
    load = [0.0] * programs
    for tiles in items:
        heapq.heapreplace(load, load[0] + tiles + START)
    return sum(load) / programs / max(load)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    ways: tuple[Callable[[Sequence[float]], float], ...] = (dealt, taken)
    print("prompt | items a program | dealt: rows, sorted in a key head, sorted | taken: the same")
    for prompt in PROMPTS:
        items = orders(prompt, lengths(prompt, generator))
        shares = [" ".join(f"{way(listed):.3f}" for listed in items.values()) for way in ways]
        rounds = prompt.heads * prompt.rows / PROGRAMS
        print(f"{prompt.name} | {rounds:.0f} | {shares[0]} | {shares[1]}")


if __name__ == "__main__":
    main()
