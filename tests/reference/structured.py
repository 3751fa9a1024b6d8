"""Synthetic q, k, v with the structure of a real model's after RoPE, deterministic by seed.

Each row has a topic, and consecutive rows mostly share it. Rows of a topic are similar and attend to each
other. The first keys are attention sinks, some keys are verticals that all queries attend to, and each head
attends to one distance, its slash. Suffixes: P = D / 2 pairs of channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltafront.kernels.anchor_scan import find_anchors
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput


@dataclass(frozen=True)
class Recipe:
    """Lengths of the vectors that add up to a row at head dimension 64. They grow with D^(1/4). `run` and
    `vertical_every` are mean numbers of rows."""

    rope_theta: float = 500_000.0
    topics: int = 1500
    run: float = 8.0
    topic: float = 10.8
    noise: float = 4.2
    mean: float = 6.75
    slash: float = 6.75
    sink: float = 19.0
    vertical: float = 14.0
    vertical_every: float = 600.0
    free_pairs: int = 8


DEFAULT_RECIPE = Recipe()


def structured_input(
    tokens: int,
    *,
    q_heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    recipe: Recipe = DEFAULT_RECIPE,
) -> AttentionInput:
    """Make q, k, v of a whole prompt, head by head, so that a long prompt fits memory."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (tokens, head_dim)
    q_BHTD = torch.empty((batch, q_heads, *shape), dtype=dtype, device=device)
    k_BGSD = torch.empty((batch, kv_heads, *shape), dtype=dtype, device=device)
    v_BGSD = torch.empty_like(k_BGSD)
    for b in range(batch):
        topic_S = _topic_of_rows(tokens, recipe, generator)
        vertical_S = torch.rand(tokens, generator=generator, device=device) < 1 / recipe.vertical_every
        for g in range(kv_heads):
            head = _Head(head_dim, recipe, generator)
            k_BGSD[b, g] = head.keys(topic_S, vertical_S).to(dtype)
            v_BGSD[b, g] = torch.randn(shape, generator=generator, device=device).to(dtype)
            for h in range(g * q_heads // kv_heads, (g + 1) * q_heads // kv_heads):
                q_BHTD[b, h] = head.queries(topic_S).to(dtype)
    return AttentionInput.of(q_BHTD, k_BGSD, v_BGSD)


def _topic_of_rows(tokens: int, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    starts_S = torch.rand(tokens, generator=generator, device=device) < 1 / recipe.run
    run_S = starts_S.cumsum(0)
    topic_R = torch.randint(recipe.topics, (tokens + 1,), generator=generator, device=device)
    return topic_R[run_S]


class _Head:
    """Random directions from which the rows of a key head and its query heads are made."""

    def __init__(self, head_dim: int, recipe: Recipe, generator: torch.Generator) -> None:
        self.recipe, self.generator = recipe, generator
        pairs, device = head_dim // 2, generator.device
        exponent_P = torch.arange(pairs, device=device, dtype=torch.float64) / pairs
        self.turn_P = recipe.rope_theta**-exponent_P
        free = min(recipe.free_pairs, pairs // 4)
        self.slow_P = torch.arange(pairs, device=device) >= pairs - free
        self.size = (head_dim / 64) ** 0.25
        self.topic_KD = self._directions(recipe.topics, ~self.slow_P & (self.turn_P < 0.5)) * recipe.topic
        self.free_D = self._directions(1, self.slow_P)[0]
        middle_P = (self.turn_P < 0.5) & (self.turn_P > 0.002)
        self.slash_D = self._directions(1, middle_P)[0]

    def keys(self, topic_S: torch.Tensor, vertical_S: torch.Tensor) -> torch.Tensor:
        recipe, tokens = self.recipe, topic_S.shape[0]
        distance = int(torch.randint(4 * BLOCK, (1,), generator=self.generator, device=topic_S.device))
        x_SD = self._rows(topic_S)
        pull_S = torch.where(vertical_S, recipe.vertical, 0.0)
        pull_S[:4] += recipe.sink
        x_SD += pull_S[:, None] * self.free_D
        x_SD += recipe.slash * self._turned(self.slash_D[None], torch.tensor([distance], device=x_SD.device))
        return self._turned(self.size * x_SD, torch.arange(tokens, device=x_SD.device))

    def queries(self, topic_S: torch.Tensor) -> torch.Tensor:
        recipe, tokens = self.recipe, topic_S.shape[0]
        x_SD = self._rows(topic_S) + recipe.mean * self.free_D + recipe.slash * self.slash_D
        return self._turned(self.size * x_SD, torch.arange(tokens, device=x_SD.device))

    def _rows(self, topic_S: torch.Tensor) -> torch.Tensor:
        dim = self.topic_KD.shape[1]
        shape = (topic_S.shape[0], dim)
        noise_SD = torch.randn(shape, generator=self.generator, device=topic_S.device)
        rows_SD: torch.Tensor = self.topic_KD[topic_S] + noise_SD * (self.recipe.noise / dim**0.5)
        return rows_SD

    def _directions(self, count: int, pairs_P: torch.Tensor) -> torch.Tensor:
        """Draw random unit vectors that are 0 outside the channel pairs pairs_P."""
        dim = 2 * pairs_P.shape[0]
        x_KD = torch.randn((count, dim), generator=self.generator, device=pairs_P.device)
        x_KD = x_KD * pairs_P.repeat(2)
        length_K1: torch.Tensor = torch.linalg.vector_norm(x_KD, dim=-1, keepdim=True)
        return x_KD / length_K1

    def _turned(self, x_SD: torch.Tensor, position_S: torch.Tensor) -> torch.Tensor:
        """Apply RoPE: pair p of a row at position s is rotated by s * theta^(-p/P)."""
        angle_SP = (position_S[:, None] * self.turn_P[None, :]).float()
        first_SP, second_SP = x_SD.chunk(2, dim=-1)
        cos_SP, sin_SP = angle_SP.cos(), angle_SP.sin()
        return torch.cat(
            (first_SP * cos_SP - second_SP * sin_SP, second_SP * cos_SP + first_SP * sin_SP), dim=-1
        )


def statistics(x: AttentionInput, cos: float = 0.75) -> dict[str, float]:
    """Return mean cosine of adjacent rows and share of anchors, of q and k, over 8,192 rows per head."""
    found: dict[str, float] = {}
    for name, rows in (("q", x.q_BHTD[:, :, :8192]), ("k", x.k_BGSD[:, :, :8192])):
        wide = rows.float()
        similar = torch.cosine_similarity(wide[:, :, 1:], wide[:, :, :-1], dim=-1)
        found[f"{name}_adjacent_cosine"] = float(similar.mean())
        found[f"{name}_kept"] = float(find_anchors(rows, cos).float().mean())
    return found
