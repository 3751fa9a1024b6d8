"""Base classes of selectors that rank tiles by a score."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import (
    AttentionInput,
    KernelInputError,
    Phase,
    StateSpec,
    Thresholds,
    TileMask,
)
from deltafront.kernels.options import ScoredOptions
from deltafront.kernels.selectors.rules import cpu, kernel
from deltafront.kernels.selectors.rules.rule import Rule
from deltafront.kernels.selectors.rules.sums import Sums, slabs

SlabSums = Callable[[int, int], Sums]
"""Computes the `Sums` of query blocks: (first block, number of blocks) → Sums."""


def rule_of(options: ScoredOptions) -> Rule:
    """Make the selection rule of the options, with sink and window rounded up to whole blocks."""
    sink_blocks, window_blocks = -(-options.sink // BLOCK), 1 - (1 - options.window) // BLOCK
    if options.share > 0:
        return Rule("top_k", options.share, sink_blocks, window_blocks)
    outside = options.levels_outside if options.density > 0 else options.outside
    return Rule("cumulative", options.tau, sink_blocks, window_blocks, outside)


@dataclass
class ScoredState:
    rule: Rule


class ScoredSelector(ABC):
    """Scores tiles, then applies a selection rule.

    `rule` applies to every layer and head. `thresholds`, if set, override the rule's threshold for each layer
    and head. with_scores: Masks contain scores.
    """

    name: str
    scored_share: float

    def __init__(self, options: ScoredOptions, with_scores: bool = False) -> None:
        self.rule = rule_of(options)
        self.with_scores = with_scores
        self.thresholds: Thresholds | None = None

    def new_state(self, spec: StateSpec) -> ScoredState:
        return ScoredState(self.layer_rule(spec))

    def layer_rule(self, spec: StateSpec) -> Rule:
        """Return the rule with this layer's thresholds. Raises KernelInputError if a threshold is not within
        0 .. 1, or if there is not exactly one per query head."""
        if self.thresholds is None:
            return self.rule
        thresholds = self.thresholds(spec.layer, spec.max_tokens)
        if len(thresholds) != spec.q_heads or not all(0.0 <= threshold <= 1.0 for threshold in thresholds):
            raise KernelInputError(
                f"layer {spec.layer}: {self.name} needs a threshold within 0 .. 1 for each of its "
                f"{spec.q_heads} query heads, got {len(thresholds)}: {thresholds}"
            )
        return replace(self.rule, threshold=torch.tensor(thresholds, dtype=torch.float32, device=spec.device))

    @abstractmethod
    def cpu_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        """Compute float32 score_BHNM in torch."""

    @abstractmethod
    def kernel_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        """Compute `cpu_scores` on the GPU."""

    @abstractmethod
    def kernel_select(self, x: AttentionInput, state: ScoredState, phase: Phase) -> TileMask:
        """Compute `cpu_select` on the GPU."""

    def scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        """Compute float32 score_BHNM. Columns after a row's diagonal are 0."""
        self._check(x)
        if x.q_BHTD.is_cuda:
            return self.kernel_scores(x, state, phase)
        return self.cpu_scores(x, state, phase)

    def select(self, x: AttentionInput, state: ScoredState, phase: Phase) -> TileMask:
        self._check(x)
        if x.q_BHTD.is_cuda:
            return self.kernel_select(x, state, phase)
        return self.cpu_select(x, state, phase)

    def _check(self, x: AttentionInput) -> None:
        x.require_aligned(self.name)
        if not x.scale > 0:
            raise KernelInputError(f"{self.name}: the scale must be positive, got {x.scale}")

    def cpu_select(self, x: AttentionInput, state: ScoredState, phase: Phase) -> TileMask:
        score_BHNM = self.cpu_scores(x, state, phase)
        with phase("selection"):
            return cpu.select(score_BHNM, state.rule, x.first_block, with_scores=self.with_scores)


class SlabSelector(ScoredSelector):
    """Scores and selects one slab of query blocks after the other on the GPU, without a synchronisation."""

    @abstractmethod
    def slab_sums(self, x: AttentionInput, state: Any, phase: Phase) -> tuple[int, SlabSums]:
        """Return the number of rows of `Sums` for one query block (R), and a function that computes the
        `Sums` of a slab on the GPU."""

    def kernel_select(self, x: AttentionInput, state: ScoredState, phase: Phase) -> TileMask:
        parts, slab_sums = self.slab_sums(x, state, phase)
        mask = kernel.empty_mask(x, self.with_scores)
        tables = (mask.index_BHNM, mask.count_BHN, mask.score_BHNM)
        for first, blocks in slabs(x, parts):
            with phase("scoring"):
                sums = slab_sums(first, blocks)
            with phase("selection"):
                kernel.apply_to_sums(x, sums, state.rule, *tables)
        return mask

    def kernel_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        parts, slab_sums = self.slab_sums(x, state, phase)
        shape = (*x.q_BHTD.shape[:2], x.query_blocks, x.key_blocks)
        score_BHNM = torch.empty(shape, dtype=torch.float32, device=x.q_BHTD.device)
        for first, blocks in slabs(x, parts):
            with phase("scoring"):
                kernel.apply_to_sums(x, slab_sums(first, blocks), None, None, None, score_BHNM)
        return score_BHNM
