"""Oracles: the baselines by their definitions, one pair of query and key at a time.

Shape suffixes are defined in `kernels.interface`.
"""

from __future__ import annotations

import math

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput
from deltafront.tests.reference.selection import pooled_scores


def line_masses(x: AttentionInput, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the mass of each key block and of each band of 128 distances in the attention of the last
    `queries` queries, or of all if fewer: both float64 (B, H, M)."""
    batch, heads, rows, _ = x.q_BHTD.shape
    vertical = torch.zeros(batch, heads, x.key_blocks, dtype=torch.float64)
    band = torch.zeros_like(vertical)
    for b in range(batch):
        for h in range(heads):
            k = x.k_BGSD[b, h // x.group].double()
            columns, distances = [0.0] * x.key_blocks, [0.0] * x.key_blocks
            for row in range(max(0, rows - queries), rows):
                place = x.q_start + row
                weights = (k[: place + 1] @ x.q_BHTD[b, h, row].double() * x.scale).softmax(0)
                for key, weight in enumerate(weights.tolist()):
                    columns[key // BLOCK] += weight
                    distances[(place - key) // BLOCK] += weight
            vertical[b, h] = torch.tensor(columns, dtype=torch.float64)
            band[b, h] = torch.tensor(distances, dtype=torch.float64)
    return vertical, band


def flex_tiles(x: AttentionInput, gamma: float, tau: float) -> list[list[set[int]]]:
    """Return the tiles that FlexPrefill (Algorithms 2-4, `flex.FlexSelector`) keeps of a whole prompt, by
    head and query block, with diagonal and sink."""
    vertical, band = line_masses(x, BLOCK)
    scores = pooled_scores(x)
    found = []
    for h in range(x.q_BHTD.shape[1]):
        true, guess = vertical[0, h] / vertical[0, h].sum(), scores[0, h, -1]
        middle = ((true + guess) / 2).tolist()
        pairs = [(p, m) for dist in (true, guess) for p, m in zip(dist.tolist(), middle, strict=True)]
        divergence = sum(p * math.log(p / m) for p, m in pairs if p > 0) / 2
        kept: list[set[int]] = [{0, n} for n in range(x.query_blocks)]
        if math.sqrt(max(divergence, 0.0)) < tau:
            for cell in _heaviest_share(scores[0, h].flatten().tolist(), gamma):
                kept[cell // x.key_blocks].add(cell % x.key_blocks)
        else:
            columns = _heaviest_share(vertical[0, h].tolist(), gamma)
            distances = _heaviest_share(band[0, h].tolist(), gamma)
            crossed = distances | {d + 1 for d in distances}
            for n in range(x.query_blocks):
                kept[n] |= {m for m in range(n + 1) if m in columns or n - m in crossed}
        found.append([{m for m in tiles if m <= n} for n, tiles in enumerate(kept)])
    return found


def vertical_slash_tiles(x: AttentionInput, verticals: int, slashes: int) -> list[list[set[int]]]:
    """Return the tiles that MInference (Algorithm 2) keeps of a whole prompt, in the form of `flex_tiles`."""
    vertical, band = line_masses(x, 64)
    found = []
    for h in range(x.q_BHTD.shape[1]):
        columns = set(_ranked(vertical[0, h].tolist())[: -(-verticals // BLOCK)])
        distances = set(_ranked(band[0, h].tolist())[: -(-slashes // BLOCK)])
        crossed = distances | {d + 1 for d in distances}
        found.append(
            [
                {0, n} | {m for m in range(n + 1) if m in columns or n - m in crossed}
                for n in range(x.query_blocks)
            ]
        )
    return found


def _ranked(mass: list[float]) -> list[int]:
    """Return indices sorted by mass, heaviest first. Among equal masses the lower index comes first."""
    return sorted(range(len(mass)), key=lambda place: (-mass[place], place))


def _heaviest_share(mass: list[float], share: float) -> set[int]:
    """Return the fewest indices that together have `share` of the mass."""
    kept: set[int] = set()
    held = 0.0
    for place in _ranked(mass):
        if held >= share * sum(mass):
            break
        kept.add(place)
        held += mass[place]
    return kept
