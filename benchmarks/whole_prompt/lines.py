"""Finds the heaviest vertical and slash lines in the attention of a prompt's last queries.

Both papers keep single columns and diagonals. Tiles of 128 x 128 cannot, so a line here is a key block, or a
band of 128 diagonals, which crosses two tiles of a query block. Shape suffixes are defined in
`kernels.interface`; L last queries.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.selectors.rules.rule import Rule

KEPT = Rule("cumulative", 0.5, outside=True)
"""A rule that keeps the ones in a row of ones and zeros, because equal scores are kept together."""


def cpu_line_masses(x: AttentionInput, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute, in torch, `line_masses` of the attention of the prompt's last `queries` rows."""
    return line_masses(last_attention(x, queries))


def last_attention(x: AttentionInput, queries: int) -> torch.Tensor:
    """Compute float32 mass_BHLS: attention weights of the last `queries` rows, or of all if fewer."""
    batch, heads, rows, dim = x.q_BHTD.shape
    groups, keys = x.k_BGSD.shape[1:3]
    taken = min(queries, rows)
    q_BGXD = x.q_BHTD[:, :, rows - taken :].reshape(batch, groups, -1, dim)
    logit_BGXS = q_BGXD.float() @ x.k_BGSD.float().transpose(2, 3)
    logit_BHLS = logit_BGXS.view(batch, heads, taken, keys) * x.scale
    position_L1 = torch.arange(keys - taken, keys, device=logit_BHLS.device)[:, None]
    future_LS = torch.arange(keys, device=logit_BHLS.device) > position_L1
    return logit_BHLS.masked_fill(future_LS, float("-inf")).softmax(-1)


def line_masses(mass_BHLS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masses of key blocks and of bands of distances 128 d .. 128 d + 127, both float32 (B, H, M)."""
    vertical_BHS, slash_BHS = single_line_masses(mass_BHLS)
    return by_block(vertical_BHS), by_block(slash_BHS)


def single_line_masses(mass_BHLS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mass of each key and of each distance between query and key, both float32 (B, H, S)."""
    batch, heads, taken, keys = mass_BHLS.shape
    slash_BHS = torch.zeros((batch, heads, keys), device=mass_BHLS.device)
    for row in range(taken):
        seen = keys - taken + row + 1
        slash_BHS[..., :seen] += mass_BHLS[:, :, row, :seen].flip(-1)
    return mass_BHLS.sum(2), slash_BHS


def by_block(mass_BHS: torch.Tensor) -> torch.Tensor:
    padded = functional.pad(mass_BHS, (0, -mass_BHS.shape[-1] % BLOCK))
    return padded.view(*padded.shape[:-1], -1, BLOCK).sum(-1)


def heaviest(mass_BHM: torch.Tensor, lines: int) -> torch.Tensor:
    """Mark the ceil(lines / 128) heaviest blocks: bool_BHM. Among equal blocks the first wins."""
    order_BHM = mass_BHM.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(mass_BHM, dtype=torch.bool).scatter_(
        -1, order_BHM[..., : -(-lines // BLOCK)], True
    )


def heaviest_share(mass_BHX: torch.Tensor, share: float) -> torch.Tensor:
    """Mark the fewest entries of the last dimension that have `share` of its sum: bool_BHX. Among equal
    entries the first wins. A share of 1 keeps all entries.

    The function sorts all entries. `selectors.rules` does not fit, since it bisects each query block and adds
    forced tiles, while FlexPrefill ranks all N x M tiles together. Sorting takes 25 bytes an entry: 0.8 GB
    for 32 heads of 131,072 tokens.
    """
    if share >= 1.0:
        return torch.ones_like(mass_BHX, dtype=torch.bool)
    value, order = mass_BHX.sort(dim=-1, descending=True, stable=True)
    before = value.cumsum(-1) - value
    kept = before < share * value.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def tiles_of_lines(vertical_BHM: torch.Tensor, band_BHM: torch.Tensor) -> torch.Tensor:
    """Mark the tiles that a kept key block or band crosses: bool_BHNM of a whole prompt of M blocks."""
    blocks = vertical_BHM.shape[-1]
    block_M = torch.arange(blocks, device=vertical_BHM.device)
    distance_NM = block_M[:, None] - block_M
    crossed_BHM = band_BHM | functional.pad(band_BHM[..., :-1], (1, 0))
    banded_BHNM = crossed_BHM[..., distance_NM.clamp(min=0)] & (distance_NM >= 0)
    return banded_BHNM | vertical_BHM[..., None, :]


def kept_scores(kept_BHNM: torch.Tensor) -> torch.Tensor:
    """Convert bool_BHNM to scores from which the rule KEPT keeps these causal tiles, diagonal and sink."""
    score_BHNM = kept_BHNM.float()
    score_BHNM[..., 0] = 1.0  # because the rule keeps all tiles of a row of zeros
    return score_BHNM
