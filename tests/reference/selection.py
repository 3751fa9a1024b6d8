"""Oracles of tile scores (float64 score_BHNM) and selection, one pair of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.selectors.anchors.form import AnchorSettings, SideSettings
from deltafront.kernels.selectors.rules.rule import LEVELS


def _from_logits(
    x: AttentionInput, per_block: int, logit: Callable[[int, int, int, int], float | None]
) -> torch.Tensor:
    """Compute a softmax of logit(batch, head, query group, key group) over key groups, and add up tiles. Key
    groups with logit None are masked."""
    batch, heads = x.q_BHTD.shape[:2]
    score = torch.zeros(batch, heads, x.query_blocks, x.key_blocks, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(x.query_blocks * per_block):
                found = [(j, logit(b, h, i, j)) for j in range(x.key_blocks * per_block)]
                real = [(j, value) for j, value in found if value is not None]
                if not real:
                    continue
                top = max(value for _, value in real)
                total = sum(math.exp(value - top) for _, value in real)
                for j, value in real:
                    score[b, h, i // per_block, j // per_block] += math.exp(value - top) / total
    return score


def antidiagonal_scores(x: AttentionInput, stride: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Compute XAttention's scores (section 2.1) from the mean over each cell's causal antidiagonal pairs.

    order: For each row of a cell, the key that it is paired with. None: the antidiagonal.
    """
    order = range(stride - 1, -1, -1) if order is None else order
    q, k = x.q_BHTD.double(), x.k_BGSD.double()
    dots = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(x.group, 1)) * x.scale

    def logit(b: int, h: int, i: int, j: int) -> float | None:
        pairs = []
        for u in range(stride):
            row, key = i * stride + u, j * stride + order[u]
            if row < q.shape[2] and key <= x.q_start + row:
                pairs.append(float(dots[b, h, row, key]))
        return sum(pairs) / len(pairs) if pairs else None

    return _from_logits(x, BLOCK // stride, logit)


def pooled_scores(x: AttentionInput) -> torch.Tensor:
    q, k = x.q_BHTD.double(), x.k_BGSD.double()

    def logit(b: int, h: int, i: int, j: int) -> float | None:
        if j > i + x.first_block:
            return None
        mean_q = q[b, h, i * BLOCK : (i + 1) * BLOCK].mean(0)
        return float(mean_q @ k[b, h // x.group, j * BLOCK : (j + 1) * BLOCK].mean(0)) * x.scale

    return _from_logits(x, 1, logit)


def true_masses(x: AttentionInput) -> torch.Tensor:
    """Compute each tile's attention mass, summed over its rows."""
    q, k = x.q_BHTD.double(), x.k_BGSD.double().repeat_interleave(x.group, 1)
    place = torch.arange(k.shape[2])
    future = place > place[x.q_start :, None]
    mass = (q @ k.mT * x.scale).masked_fill(future, -math.inf).softmax(-1)
    rows, columns = (-size % BLOCK for size in mass.shape[2:])
    padded = torch.nn.functional.pad(mass, (0, columns, 0, rows))
    batch, heads, height, width = padded.shape
    tiles = padded.view(batch, heads, height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    return tiles.sum((3, 5))


def block_log_sums(q_THD: torch.Tensor, k_GSD: torch.Tensor) -> torch.Tensor:
    """Compute the log of the sum of e^logit over each block's keys, without a causal mask: lse_THM."""
    (tokens, heads, dim), (groups, keys, _) = q_THD.shape, k_GSD.shape
    lse = torch.zeros(tokens, heads, -(-keys // BLOCK), dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            logits = k_GSD[h * groups // heads].double().cpu() @ q_THD[t, h].double().cpu() * dim**-0.5
            for m in range(lse.shape[2]):
                lse[t, h, m] = logits[m * BLOCK : (m + 1) * BLOCK].exp().sum().log()
    return lse


def largest_shares(lse_THM: torch.Tensor) -> torch.Tensor:
    """Compute mass_M, the largest share of attention of any token and head, from `block_log_sums`."""
    sums_THM = lse_THM.exp()
    shares = [sums_M / sums_M.sum() for sums_HM in sums_THM for sums_M in sums_HM]
    return torch.stack(shares).amax(0)


def anchor_slots(
    rows: torch.Tensor, form: AnchorSettings, side: SideSettings
) -> list[tuple[int, int, torch.Tensor]]:
    """Return (first row, number of rows, vector) of each anchor slot of one block (at most 128 rows, D)."""
    cos, compared = form.cos, rows - rows.mean(0) if form.centred else rows

    def runs_at(threshold: float) -> list[tuple[int, int]]:
        starts = [0]
        for row in range(1, rows.shape[0]):
            a, b = compared[starts[-1]], compared[row]
            if float(a @ b / (a.norm() * b.norm())) < threshold:
                starts.append(row)
        return list(zip(starts, [*starts[1:], rows.shape[0]], strict=True))

    runs = runs_at(cos)
    if side.relax is not None and len(runs) > side.cap:
        runs = runs_at(cos - side.relax)
    if len(runs) > side.cap:
        picks = [i * len(runs) // side.cap for i in range(side.cap)]
        runs = [runs[pick] for pick in picks]
    return [(start, end - start, rows[start]) for start, end in runs]


def anchor_scores(x: AttentionInput, form: AnchorSettings) -> torch.Tensor:
    """Compute DPXA's tile scores (docs/decisions/0003), one pair of anchor slots at a time."""
    batch, heads = x.q_BHTD.shape[:2]
    score = torch.zeros(batch, heads, x.query_blocks, x.key_blocks, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            k = x.k_BGSD[b, h // x.group].double()
            keys = [
                (m, m * BLOCK + first, count, vector)
                for m in range(x.key_blocks)
                for first, count, vector in anchor_slots(k[m * BLOCK : (m + 1) * BLOCK], form, form.k)
            ]
            for n in range(x.query_blocks):
                q = x.q_BHTD[b, h, n * BLOCK : (n + 1) * BLOCK].double()
                for first, _, vector in anchor_slots(q, form, form.q):
                    place = x.q_start + n * BLOCK + first
                    cells = []
                    for m, start, count, key in keys:
                        seen = min(count, place - start + 1)
                        if seen > 0:
                            cells.append((m, seen * math.exp(float(vector @ key) * x.scale)))
                    for m, mass in cells:
                        score[b, h, n, m] += mass / sum(mass for _, mass in cells)
    return score


def kept_tiles(
    score: list[float],
    diagonal: int,
    kind: str,
    threshold: float,
    *,
    sink: int = 1,
    window: int = 1,
    outside: bool = False,
) -> list[int]:
    """Return the tiles of one row that a `Rule` keeps, by trying every floor. sink, window: in blocks."""
    score = score[: diagonal + 1]
    forced = {m for m in range(diagonal + 1) if m < sink or m > diagonal - window}
    if max(score) <= 0:
        return list(range(diagonal + 1))
    if outside:
        rest = [m for m in range(diagonal + 1) if m not in forced]
        inner = _kept_of([score[m] for m in rest], set(), kind, threshold)
        return sorted(forced | {rest[m] for m in inner})
    return _kept_of(score, forced, kind, threshold)


def _kept_of(score: list[float], forced: set[int], kind: str, threshold: float) -> list[int]:
    top = max(score, default=0.0)
    if kind == "cumulative" and top <= 0:
        return list(range(len(score))) if threshold >= 1 else sorted(forced)
    value = [math.floor(s * (LEVELS / top) + 0.5) if kind == "cumulative" else s for s in score]
    weight = value if kind == "cumulative" else [1.0] * len(score)
    need = threshold * sum(value) if kind == "cumulative" else math.ceil(threshold * len(score) - 1e-6)
    if kind == "cumulative" and threshold >= 1:
        return list(range(len(score)))
    for floor in (math.inf, *sorted(set(value), reverse=True)):
        kept = forced | {m for m, v in enumerate(value) if v >= floor}
        if sum(weight[m] for m in kept) >= need:
            return sorted(kept)
    raise AssertionError("the whole row is always enough")
