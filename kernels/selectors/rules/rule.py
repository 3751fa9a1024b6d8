"""Defines `Rule`, which decides from scores which tiles of the attention matrix are kept."""

from dataclasses import dataclass
from typing import Literal

import torch

from deltafront.kernels.interface import KernelInputError

LEVELS = 1 << 17
"""The cumulative rule rounds scores to multiples of the row's largest score / LEVELS. Sums of integers do not
depend on the order, so the same tiles are kept however a prompt is cut into chunks."""

ROUNDING = 1.0 - 2.0**-22
"""Factor of a number of tiles before it is rounded up. In float32, 0.6 of 25 is a little more than 15, which
would be rounded up to 16."""

TINY, LARGER = 2.0**-64, 2.0**64
"""A row whose largest score is below TINY is scaled by LARGER. Otherwise LEVELS / score would be infinite."""

MAX_BLOCKS = (1 << 31) // LEVELS - 1
"""Maximum number of key blocks for which a row's sum fits int32: 2 million tokens."""

Kind = Literal["cumulative", "top_k"]


@dataclass(frozen=True)
class Rule:
    """Decides which tiles of a row of scores are kept.

    Forced tiles are always kept: the first `sink_blocks`, and the last `window_blocks` up to the diagonal.
    Equal scores are kept or dropped together. A row without a positive score keeps all its tiles.

    Attributes:
        kind: "cumulative" (top-p) keeps the best tiles until these and the forced tiles have at least the
            share `threshold` of the row's sum (XAttention, section 2.2); a threshold of 1 keeps all tiles.
            "top_k" keeps the best tiles until the kept ones are the share `threshold` of the row's causal
            tiles, rounded up.
        threshold: One number, or a float tensor with one per head.
        outside: Ignore forced tiles in sums and counts. Otherwise a sink with most of a row's mass would
            reach the threshold alone.
    """

    kind: Kind
    threshold: float | torch.Tensor
    sink_blocks: int = 1
    window_blocks: int = 1
    outside: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("cumulative", "top_k"):
            raise KernelInputError(f"unknown selection rule {self.kind!r}: cumulative or top_k")
        if self.sink_blocks < 1 or self.window_blocks < 1:
            raise KernelInputError(
                f"a rule keeps at least one block of sink and of window, "
                f"got {self.sink_blocks} and {self.window_blocks}"
            )
        if not isinstance(self.threshold, float | int):
            if self.threshold.dim() != 1 or not self.threshold.is_floating_point():
                raise KernelInputError("a rule's thresholds must be one float per head")
        elif not 0.0 <= self.threshold <= 1.0:
            raise KernelInputError(f"a rule's threshold must be within 0 .. 1, got {self.threshold}")

    def thresholds(self, heads: int, device: torch.device) -> torch.Tensor:
        if isinstance(self.threshold, torch.Tensor):
            if self.threshold.shape[0] != heads:
                raise KernelInputError(f"{self.threshold.shape[0]} thresholds for {heads} query heads")
            return self.threshold.to(device, torch.float32, non_blocking=True)
        return torch.full((heads,), self.threshold, dtype=torch.float32, device=device)


def check_scores(score_BHNM: torch.Tensor, first_block: int) -> None:
    """Check that scores are float32 and that their shape fits a chunk whose first query block is
    `first_block`. Raises KernelInputError."""
    if score_BHNM.dim() != 4 or score_BHNM.numel() == 0:
        raise KernelInputError(
            f"scores must be (batch, heads, query blocks, key blocks) and not empty, "
            f"their shape is {tuple(score_BHNM.shape)}"
        )
    if score_BHNM.dtype != torch.float32:
        raise KernelInputError(f"scores must be float32, got {score_BHNM.dtype}")
    if first_block < 0 or first_block + score_BHNM.shape[2] != score_BHNM.shape[3]:
        raise KernelInputError(
            f"first block {first_block} + {score_BHNM.shape[2]} query blocks "
            f"!= {score_BHNM.shape[3]} key blocks"
        )
    if score_BHNM.shape[3] > MAX_BLOCKS:
        raise KernelInputError(f"{score_BHNM.shape[3]} key blocks, but at most {MAX_BLOCKS} can be ranked")
