"""MInference's vertical-slash pattern; a baseline, whole prompt only. Suffixes as in `kernels.interface`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..executors.block_sparse import BlockSparseExecutor
from ..interface import AttentionInput, KernelInputError
from ..methods import register
from ..options import min_tokens, option
from .line_selector import LineSelector

if TYPE_CHECKING:
    import torch

LAST_QUERIES = 64


@dataclass(frozen=True)
class VerticalSlashOptions:
    """MInference (Jiang et al. 2024), Algorithm 2, with budgets in lines filled by blocks of 128 lines."""

    verticals: int = option(1000, 1, 1 << 16, "vertical lines kept")
    slashes: int = option(4096, 1, 1 << 16, "slash lines kept")
    min_tokens: int = min_tokens()


class VerticalSlashSelector(LineSelector):
    """The tiles of the heaviest lines of the last 64 queries' attention."""

    name = "vertical_slash"

    def __init__(self, options: VerticalSlashOptions) -> None:
        self.verticals, self.slashes = options.verticals, options.slashes
        if self.verticals < 1 or self.slashes < 1:
            raise KernelInputError(f"{self.verticals} verticals, {self.slashes} slashes: at least 1 of each")

    def cpu_kept(self, x: AttentionInput) -> torch.Tensor:
        from .lines import cpu_line_masses

        return choose(*cpu_line_masses(x, LAST_QUERIES), self.verticals, self.slashes)

    def kernel_kept(self, x: AttentionInput) -> torch.Tensor:
        from .lines_kernel import kernel_line_masses

        return choose(*kernel_line_masses(x, LAST_QUERIES), self.verticals, self.slashes)


def choose(vertical_BHM: torch.Tensor, band_BHM: torch.Tensor, verticals: int, slashes: int) -> torch.Tensor:
    """bool_BHNM from the lines' masses; plain torch on every device, without a host sync."""
    from .lines import heaviest, tiles_of_lines

    return tiles_of_lines(heaviest(vertical_BHM, verticals), heaviest(band_BHM, slashes))


register(
    "vertical_slash",
    VerticalSlashOptions,
    VerticalSlashSelector,
    BlockSparseExecutor,
    source="MInference (Jiang et al. 2024), Algorithm 2; whole prompt only",
    whole_prompt=True,
)
