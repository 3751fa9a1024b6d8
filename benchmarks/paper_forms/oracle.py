"""Oracles: the methods of this package by their definitions, one row or tile at a time.

Shape suffixes are defined in `kernels.interface`.
"""

from __future__ import annotations

import math

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput


def phased_attention(
    x: AttentionInput,
    starts: list[int],
    *,
    block: int = 128,
    counts: bool = True,
    history: bool = True,
    diagonal: bool = True,
) -> torch.Tensor:
    """Compute Delta-KV of one head row by row (DeltaAttention, section 4.1.4). Return fp32.

    starts: Positions of the anchors. An anchor stands for each key of its run up to the query; without
    counts, for one key.
    """
    q, k, v = x.q_BHTD[0, 0].double(), x.k_BGSD[0, 0].double(), x.v_BGSD[0, 0].double()
    timestamps = [stop - 1 for stop in [*starts[1:], k.shape[0]]]
    out = []
    for row in range(q.shape[0]):
        position = x.q_start + row
        critical = position // BLOCK * BLOCK
        safe = 0
        while safe < len(starts) and max(timestamps[safe : safe + block]) < critical:
            safe += block
        exact_from = timestamps[safe - 1] + 1 if safe else 0
        if not diagonal:
            safe, exact_from = len(starts), k.shape[0]
        places = []
        for first, last in list(zip(starts, timestamps, strict=True))[: safe if history else 0]:
            times = min(last, position) - first + 1
            places += [first] * (times if counts else min(times, 1))
        places += range(exact_from, position + 1)
        weights = (k[places] @ q[row] * x.scale).softmax(0)
        out.append(weights @ v[places])
    return torch.stack(out)[None, None].float()


def all_packed(
    x: AttentionInput, starts: list[list[int]], kept_HNM: torch.Tensor, *, means: bool
) -> torch.Tensor:
    """Compute attention over kept tiles row by row, with each key and value replaced by the first (anchor) or
    the mean of its run of similar keys. Return fp32.

    starts: Positions of each key head's anchors. Runs do not cross tiles.
    """
    out_BHTD = torch.zeros(x.q_BHTD.shape)
    for h in range(x.q_BHTD.shape[1]):
        g = h // x.group
        k, v = x.k_BGSD[0, g].double().clone(), x.v_BGSD[0, g].double().clone()
        for first, stop in zip(starts[g], [*starts[g][1:], k.shape[0]], strict=True):
            for kv in (k, v):
                kv[first:stop] = kv[first:stop].mean(0) if means else kv[first].clone()
        for row in range(x.q_BHTD.shape[2]):
            position = x.q_start + row
            tiles = kept_HNM[h, row // BLOCK].nonzero()[:, 0].tolist()
            places = [key for m in tiles for key in range(m * BLOCK, (m + 1) * BLOCK) if key <= position]
            weights = (k[places] @ x.q_BHTD[0, h, row].double() * x.scale).softmax(0)
            out_BHTD[0, h, row] = (weights @ v[places]).float()
    return out_BHTD


def skipped_tiles(scores: list[list[float]], saved: float) -> list[set[int]]:
    """Drop `saved` tiles of one head in proportion to each row's tiles, rounded so that the total is right. A
    row loses its tiles with the lowest scores.

    scores: Scores of each row's kept tiles. Block 0 is first and the diagonal last; both stay.
    """
    others = [max(0, len(row) - 2) for row in scores]
    share, passed, gone = min(1.0, saved / max(1, sum(others))), 0, 0
    kept = []
    for row, count in zip(scores, others, strict=True):
        passed += count
        lose = int(passed * share + 1e-9) - gone
        gone += lose
        ranked = sorted(range(1, count + 1), key=lambda entry, row=row: (row[entry], entry))  # type: ignore[misc]
        kept.append({*range(len(row))} - {*ranked[:lose]})
    return kept


def cells(x: AttentionInput, rows: list[list[int]], keys: list[list[int]]) -> torch.Tensor:
    """Score tiles from pairs of sampled rows and keys (DeltaAttention, section 4.3). All scores of a query
    block are divided by one sum.

    Args:
        rows, keys: Sampled rows of the chunk, and sampled keys, for each (batch, head).
    """
    batch, heads = x.q_BHTD.shape[:2]
    score_BHNM = torch.zeros(batch, heads, x.query_blocks, x.key_blocks, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            group = b * x.k_BGSD.shape[1] + h // x.group
            for row in rows[b * heads + h]:
                for key in (key for key in keys[group] if key <= x.q_start + row):
                    k = x.k_BGSD[b, h // x.group, key].double()
                    logit = float(x.q_BHTD[b, h, row].double() @ k) * x.scale
                    score_BHNM[b, h, row // BLOCK, key // BLOCK] += math.exp(logit)
    return score_BHNM / score_BHNM.sum(-1, keepdim=True)


def sparge_tiles(x: AttentionInput, tau: float, theta: float) -> list[list[set[int]]]:
    """Return the tiles that SpargeAttn (section 3.2) keeps, by head and query block."""

    def blocks_of(rows: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(rows.double(), BLOCK))

    def alike(block: torch.Tensor) -> bool:
        unit = block / block.norm(dim=1, keepdim=True)
        return float((unit @ unit.T).mean()) > theta

    found = []
    for h in range(x.q_BHTD.shape[1]):
        keys = blocks_of(x.k_BGSD[0, h // x.group])
        like = [alike(block) for block in keys]
        rows = []
        for n, block in enumerate(blocks_of(x.q_BHTD[0, h])):
            causal = range(x.first_block + n + 1)
            logits = {m: float(block.mean(0) @ keys[m].mean(0)) * x.scale for m in causal if like[m]}
            total = sum(math.exp(logit) for logit in logits.values())
            held, kept = 0.0, {0, causal[-1], *(m for m in causal if not like[m])}
            for rank, m in enumerate(sorted(logits, key=lambda m, logits=logits: -logits[m])):  # type: ignore[misc]
                held += math.exp(logits[m]) / total
                if rank == 0 or held <= tau:
                    kept.add(m)
            rows.append(kept if alike(block) else set(causal))
        found.append(rows)
    return found


def smoothed_rows(
    sparse_TD: torch.Tensor,
    dense_TD: torch.Tensor,
    gamma: int,
    *,
    linear: bool = False,
    numbers: tuple[float, float, float] = (1.0, 0.0, 0.0),
) -> torch.Tensor:
    """Correct one head's sparse rows by smoothed differences (Δ Attention, appendix J). Every `gamma`-th row
    gives a difference. Return fp32.

    linear: Interpolate the differences. Otherwise apply Algorithm 2, with α, β and γ in `numbers`.
    """
    terms = [(dense_TD[row] - sparse_TD[row]).double() for row in range(0, len(sparse_TD), gamma)]
    alpha, beta, acceleration = numbers
    p, v, a = terms[0], torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
    out = []
    for row in range(len(sparse_TD)):
        own, k = divmod(row, gamma)
        following = terms[min(own + 1, len(terms) - 1)]
        if linear:
            mix = torch.linspace(0, 1, gamma, dtype=torch.float64)[k] if gamma > 1 else 0.0
            out.append((1 - mix) * terms[own] + mix * following)
        elif row == 0:
            out.append(p)
        else:
            ahead, faster = p + v + 0.5 * a, v + a
            r = terms[own] - ahead
            p, v, a = ahead + alpha * r, faster + beta * r, a + acceleration * r
            out.append(p)
    return (sparse_TD.double() + torch.stack(out)).float()
