"""What every selector that ranks tiles by a score shares. Shape suffixes as in `kernels.interface`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..interface import AttentionInput, KernelInputError, Phase, StateSpec, TileMask
from ..methods import Value
from .rules import reference as rules
from .rules.rule import Rule

if TYPE_CHECKING:
    from .rules.sums import Sums

SlabSums = Callable[[int, int], "Sums"]
"""(first query block, query blocks) -> the logarithms that those blocks' scores are made of."""


class ScoredSelector(ABC):
    """Scores every causal tile, then applies a rule; on the GPU slab by slab, without a host sync.

    values: the method's options; `tau` is the default rule's threshold, and where `exact_share` is named the
    masks carry the scores of their tiles. rule: replaces the cumulative rule, for instance by one with a
    calibrated threshold per head, `Rule("cumulative", tau_H)`.
    """

    name: str
    sampled: float

    def __init__(self, values: Mapping[str, Value], rule: Rule | None) -> None:
        self.rule = rule or Rule("cumulative", float(values["tau"]))
        self.with_scores = "exact_share" in values

    def new_state(self, spec: StateSpec) -> Any:
        return None

    @abstractmethod
    def reference_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        """float32 score_BHNM in plain torch."""

    @abstractmethod
    def slab_sums(self, x: AttentionInput, state: Any, phase: Phase) -> tuple[int, SlabSums]:
        """On the GPU: logarithm rows per query block, and what computes a slab of them."""

    def scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        """float32 score_BHNM, the estimate itself; columns after a row's diagonal are 0."""
        self._check(x)
        if x.q_BHTD.is_cuda:
            return self.kernel_scores(x, state, phase)
        return self.reference_scores(x, state, phase)

    def select(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask:
        self._check(x)
        if x.q_BHTD.is_cuda:
            return self.kernel_select(x, state, phase)
        return self.reference_select(x, state, phase)

    def _check(self, x: AttentionInput) -> None:
        x.require_aligned(self.name)
        if not x.scale > 0:
            raise KernelInputError(f"{self.name}: the scale must be positive, got {x.scale}")

    def reference_select(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask:
        score_BHNM = self.reference_scores(x, state, phase)
        with phase("selection"):
            return rules.select(score_BHNM, self.rule, x.first_block, with_scores=self.with_scores)

    def kernel_select(self, x: AttentionInput, state: Any, phase: Phase) -> TileMask:
        from .rules import kernel
        from .rules import sums as sums_of

        parts, slab_sums = self.slab_sums(x, state, phase)
        mask = kernel.empty_mask(x, self.with_scores)
        for first, blocks in sums_of.slabs(x, parts):
            with phase("scoring"):
                sums = slab_sums(first, blocks)
            with phase("selection"):
                kernel.select_from_sums(x, sums, self.rule, mask)
        return mask

    def kernel_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        from .rules import kernel
        from .rules import sums as sums_of

        parts, slab_sums = self.slab_sums(x, state, phase)
        shape = (*x.q_BHTD.shape[:2], x.query_blocks, x.key_blocks)
        score_BHNM = torch.empty(shape, dtype=torch.float32, device=x.q_BHTD.device)
        for first, blocks in sums_of.slabs(x, parts):
            with phase("scoring"):
                kernel.scores_from_sums(x, slab_sums(first, blocks), score_BHNM)
        return score_BHNM
