"""What every selector that ranks tiles by a score shares. Shape suffixes as in `kernels.interface`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..constants import BLOCK
from ..interface import AttentionInput, KernelInputError, Phase, StateSpec, Thresholds, TileMask
from ..options import min_tokens, option
from .rules.rule import Rule

if TYPE_CHECKING:
    import torch

    from .rules.sums import Sums

SlabSums = Callable[[int, int], "Sums"]
"""(first query block, query blocks) -> the logarithms that those blocks' scores are made of."""


def tau(default: float = 0.9) -> float:
    """The field `tau`, the threshold of the cumulative rule."""
    return option(default, 0.01, 1.0, "cumulative probability mass of the kept tiles")


def outside(default: bool = False) -> bool:
    return option(default, 0, 1, "count tau, or relative, outside sink and window")


def window(default: int = 1) -> int:
    return option(default, 1, 1 << 20, "most recent tokens that every query attends to")


@dataclass(frozen=True)
class ScoredOptions:
    """What every method that ranks tiles by a score takes: its rule (XAttention, Xu et al. 2025, section
    2.2). The papers count tau over all mass.

    density: the mean share of causal tiles for which the model's profile was calibrated. Its thresholds, one
    for each layer and head, then take the place of tau; they count outside sink and window. share: of each
    row's causal tiles, sink and window among them, the highest-scoring, in place of tau. relative: tiles that
    score at least this part of the row's largest, in place of tau (FlashPrefill). Raises KernelInputError for
    more than one of the three.
    """

    tau: float = tau()
    outside: bool = outside()
    density: float = option(0.0, 0.0, 1.0, "a level of the model's profile, in place of tau; 0: none")
    share: float = option(0.0, 0.0, 1.0, "of each row's causal tiles to keep, in place of tau; 0: by tau")
    relative: float = option(
        0.0, 0.0, 1.0, "of the row's largest score, what a tile needs to be kept, in place of tau; 0: by tau"
    )
    sink: int = option(1, 1, 1 << 20, "tokens at the start that every query attends to")
    window: int = window()
    min_tokens: int = min_tokens()

    def __post_init__(self) -> None:
        thresholds = {"share": self.share, "relative": self.relative, "density": self.density}
        given = [f"{name} = {threshold}" for name, threshold in thresholds.items() if threshold > 0]
        if len(given) > 1:
            raise KernelInputError(f"{' and '.join(given)} exclude each other: all but one must be 0")

    @property
    def rule(self) -> Rule:
        """Tokens as whole blocks: all that hold one of them for some row of a query block."""
        sink_blocks, window_blocks = -(-self.sink // BLOCK), 1 - (1 - self.window) // BLOCK
        if self.share > 0:
            return Rule("top_k", self.share, sink_blocks, window_blocks)
        if self.relative > 0:
            return Rule("max_relative", self.relative, sink_blocks, window_blocks, self.outside)
        outside = self.outside or self.density > 0
        return Rule("cumulative", self.tau, sink_blocks, window_blocks, outside)


@dataclass
class ScoredState:
    """What is carried for one layer of one prompt: the rule of its layer."""

    rule: Rule


class ScoredSelector(ABC):
    """Scores every causal tile, then applies a rule; on the GPU slab by slab, without a host sync.

    rule: its threshold holds for every layer and head, unless `thresholds` are set. with_scores: the masks
    carry the scores of their tiles.
    """

    name: str
    sampled: float

    def __init__(self, rule: Rule, with_scores: bool = False) -> None:
        self.rule = rule
        self.with_scores = with_scores
        self.thresholds: Thresholds | None = None

    def new_state(self, spec: StateSpec) -> ScoredState:
        return ScoredState(self.rule_of(spec))

    def rule_of(self, spec: StateSpec) -> Rule:
        """The rule of the spec's layer. Raises KernelInputError for thresholds that do not fit its heads."""
        import torch

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
        """float32 score_BHNM in plain torch."""

    @abstractmethod
    def slab_sums(self, x: AttentionInput, state: Any, phase: Phase) -> tuple[int, SlabSums]:
        """On the GPU: logarithm rows per query block, and what computes a slab of them."""

    def scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        """float32 score_BHNM, the estimate itself; columns after a row's diagonal are 0."""
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
        from .rules import cpu

        score_BHNM = self.cpu_scores(x, state, phase)
        with phase("selection"):
            return cpu.select(score_BHNM, state.rule, x.first_block, with_scores=self.with_scores)

    def kernel_select(self, x: AttentionInput, state: ScoredState, phase: Phase) -> TileMask:
        from .rules import kernel
        from .rules import sums as sums_of

        parts, slab_sums = self.slab_sums(x, state, phase)
        mask = kernel.empty_mask(x, self.with_scores)
        for first, blocks in sums_of.slabs(x, parts):
            with phase("scoring"):
                sums = slab_sums(first, blocks)
            with phase("selection"):
                kernel.select_from_sums(x, sums, state.rule, mask)
        return mask

    def kernel_scores(self, x: AttentionInput, state: Any, phase: Phase) -> torch.Tensor:
        import torch

        from .rules import kernel
        from .rules import sums as sums_of

        parts, slab_sums = self.slab_sums(x, state, phase)
        shape = (*x.q_BHTD.shape[:2], x.query_blocks, x.key_blocks)
        score_BHNM = torch.empty(shape, dtype=torch.float32, device=x.q_BHTD.device)
        for first, blocks in sums_of.slabs(x, parts):
            with phase("scoring"):
                kernel.scores_from_sums(x, slab_sums(first, blocks), score_BHNM)
        return score_BHNM
