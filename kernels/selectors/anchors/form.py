"""Settings of DPXA's anchors, and the table of anchor slots.

Shape suffixes: A anchor slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import KernelInputError


@dataclass(frozen=True)
class SideSettings:
    """Settings for the anchor slots of q or of k. A slot holds the first row of a run.

    Attributes:
        cap: Slots per block, a power of two up to 128.
        relax: A block with more runs than slots is scanned again with `cos` lowered by `relax`. If there are
            still too many runs, every (runs / cap)-th run is kept. None: no second scan.
    """

    cap: int
    relax: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.cap <= BLOCK or self.cap & (self.cap - 1):
            raise KernelInputError(
                f"anchors per block must be a power of two within 1 .. 128, got {self.cap}"
            )


@dataclass(frozen=True)
class AnchorSettings:
    """Settings of the scan for anchors.

    Attributes:
        cos: A row joins a run if its cosine with the run's anchor is at least this.
        centred: Subtract the block's mean before comparing rows, so that a bias of q or k cancels.
    """

    cos: float
    q: SideSettings
    k: SideSettings
    centred: bool = False


@dataclass(frozen=True)
class BlockAnchors:
    """The anchor slots of consecutive blocks.

    Attributes:
        first_BGMA: int32, absolute position of a slot's first row.
        count_BGMA: float32, number of rows in a slot. 0: the slot is empty, and its vector is undefined.
    """

    vector_BGMAD: torch.Tensor
    first_BGMA: torch.Tensor
    count_BGMA: torch.Tensor

    def until(self, block: int) -> BlockAnchors:
        return BlockAnchors(
            self.vector_BGMAD[:, :, :block], self.first_BGMA[:, :, :block], self.count_BGMA[:, :, :block]
        )
