"""MInference's vertical-slash pattern. Shape suffixes are defined in `kernels.interface`."""

from __future__ import annotations

import torch

from deltafront.benchmarks.whole_prompt.line_selector import LineSelector
from deltafront.benchmarks.whole_prompt.lines import cpu_line_masses, heaviest, tiles_of_lines
from deltafront.benchmarks.whole_prompt.lines_kernel import kernel_line_masses
from deltafront.benchmarks.whole_prompt.methods import VerticalSlashOptions
from deltafront.kernels.interface import AttentionInput, KernelInputError

LAST_QUERIES = 64


class VerticalSlashSelector(LineSelector):
    """Keeps tiles that the heaviest lines cross, ranked by the attention of the last 64 queries."""

    name = "vertical_slash"

    def __init__(self, options: VerticalSlashOptions) -> None:
        self.verticals, self.slashes = options.verticals, options.slashes
        if self.verticals < 1 or self.slashes < 1:
            raise KernelInputError(f"{self.verticals} verticals, {self.slashes} slashes: at least 1 of each")

    def cpu_kept(self, x: AttentionInput) -> torch.Tensor:
        return choose(*cpu_line_masses(x, LAST_QUERIES), self.verticals, self.slashes)

    def kernel_kept(self, x: AttentionInput) -> torch.Tensor:
        return choose(*kernel_line_masses(x, LAST_QUERIES), self.verticals, self.slashes)


def choose(vertical_BHM: torch.Tensor, band_BHM: torch.Tensor, verticals: int, slashes: int) -> torch.Tensor:
    """Return bool_BHNM, the tiles to keep, from the lines' masses, in torch, without a host sync."""
    return tiles_of_lines(heaviest(vertical_BHM, verticals), heaviest(band_BHM, slashes))
