"""Base class of both whole-prompt selectors. Shape suffixes are defined in `kernels.interface`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from deltafront.benchmarks.whole_prompt.lines import KEPT, kept_scores
from deltafront.kernels.interface import (
    AttentionInput,
    KernelInputError,
    Phase,
    StateSpec,
    TileMask,
    runs_on_cpu,
)
from deltafront.kernels.selectors.rules import cpu, kernel


class LineSelector(ABC):
    """Selects tiles of a whole prompt from the attention of its last queries, in one call.

    scored_share is 0, because only the prompt's last rows (and FlexPrefill's block means) are scored.
    """

    name: str
    scored_share = 0.0

    def new_state(self, spec: StateSpec) -> None:
        return None

    @abstractmethod
    def cpu_kept(self, x: AttentionInput) -> torch.Tensor:
        """Return bool_BHNM, the tiles to keep, in torch. Tiles after the diagonal are ignored."""

    @abstractmethod
    def kernel_kept(self, x: AttentionInput) -> torch.Tensor:
        """Compute `cpu_kept` on the GPU, without a host sync."""

    def select(self, x: AttentionInput, state: object, phase: Phase) -> TileMask:
        self._check(x)
        if runs_on_cpu(x.q_BHTD, self.name):
            return self.cpu_select(x, phase)
        return self.kernel_select(x, phase)

    def _check(self, x: AttentionInput) -> None:
        if x.q_start or x.q_BHTD.shape[2] != x.prompt_tokens:
            raise KernelInputError(
                f"{self.name} estimates from the prompt's last queries: give it the whole prompt"
            )
        if not x.scale > 0:
            raise KernelInputError(f"{self.name}: the scale must be positive, got {x.scale}")

    def cpu_select(self, x: AttentionInput, phase: Phase) -> TileMask:
        with phase("scoring"):
            kept_BHNM = self.cpu_kept(x)
        with phase("selection"):
            return cpu.select(kept_scores(kept_BHNM), KEPT, 0)

    def kernel_select(self, x: AttentionInput, phase: Phase) -> TileMask:
        with phase("scoring"):
            kept_BHNM = self.kernel_kept(x)
        with phase("selection"):
            return kernel.select(kept_scores(kept_BHNM), KEPT, 0)
