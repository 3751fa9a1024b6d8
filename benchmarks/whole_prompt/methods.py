"""Registers the baselines of this package. It must not import torch, because the API server may import it."""

from __future__ import annotations

from dataclasses import dataclass

from deltafront.kernels.methods import register
from deltafront.kernels.options import min_tokens, option

_SPARSE = "deltafront.kernels.attention.block_sparse:BlockSparseBackend"


@dataclass(frozen=True)
class VerticalSlashOptions:
    """MInference (Jiang et al. 2024), Algorithm 2. Budgets in lines are rounded up to blocks of 128."""

    verticals: int = option(1000, 1, 1 << 16, "vertical lines kept")
    slashes: int = option(4096, 1, 1 << 16, "slash lines kept")
    min_tokens: int = min_tokens()


@dataclass(frozen=True)
class FlexOptions:
    """FlexPrefill (Lai et al. 2025), Algorithms 1-4."""

    gamma_flex: float = option(0.9, 0.01, 1.0, "cumulative attention mass kept")
    tau_flex: float = option(0.1, 0.0, 1.0, "Jensen-Shannon threshold for query-aware heads")
    min_tokens: int = min_tokens()


register(
    "vertical_slash",
    VerticalSlashOptions,
    f"{__package__}.vertical_slash:VerticalSlashSelector",
    _SPARSE,
    source="MInference (Jiang et al. 2024), Algorithm 2; whole prompt only",
    whole_prompt=True,
)
register(
    "flex",
    FlexOptions,
    f"{__package__}.flex:FlexSelector",
    _SPARSE,
    source="FlexPrefill (Lai et al. 2025), Algorithms 1-4; whole prompt only",
    whole_prompt=True,
)
