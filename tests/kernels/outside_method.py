"""An attention method that a user registers from another package. It keeps every `step`-th tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltafront.kernels.attention.block_sparse import BlockSparseBackend
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask
from deltafront.kernels.methods import register
from deltafront.kernels.options import option
from deltafront.tests.numerics import mask_of

SEEN_LAYERS: list[int] = []


@dataclass(frozen=True)
class CombOptions:
    """Options of the method."""

    step: int = option(2, 1, 64, "every step-th tile is kept, beside the diagonal and the sink", (1, 2, 4))


class CombSelector:
    """Selects tiles without looking at q and k."""

    scored_share = 0.0

    def __init__(self, options: CombOptions) -> None:
        self.step = options.step

    def new_state(self, spec: StateSpec) -> None:
        SEEN_LAYERS.append(spec.layer)

    def select(self, x: AttentionInput, state: object, phase: Phase) -> TileMask:
        return mask_of(x, torch.arange(x.key_blocks, device=x.q_BHTD.device) % self.step == 0)


register("comb", CombOptions, CombSelector, BlockSparseBackend, source="nowhere")
