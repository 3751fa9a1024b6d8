"""What one chunk adds up on its way through a stage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from ...kernels.interface import Coverage
from ..messages.events import LayerDensity
from ..messages.stages import ChunkCommand, ChunkReport
from .phases import PhaseTimer


@dataclass
class ChunkWork:
    """A chunk, its stopwatch and its sums. Coverage is read from the device at the end."""

    command: ChunkCommand
    timer: PhaseTimer
    began: float = field(default_factory=time.perf_counter)
    coverage: list[tuple[int, Coverage]] = field(default_factory=list)
    handoff_bytes: int = 0
    finite: torch.Tensor | None = None
    """On the device: whether what came out of the chunk are numbers."""

    def report(self, stage: int) -> ChunkReport:
        """Once, after the last phase."""
        phases, density = self.timer.seconds(), self._density()
        return ChunkReport(
            request_id=self.command.request_id,
            stage=stage,
            start=self.command.start,
            wall=time.perf_counter() - self.began,
            phases=phases,
            density=density,
            sampled_share=sum(c.sampled for _, c in self.coverage) / max(1, len(self.coverage)),
            handoff_bytes=self.handoff_bytes,
        )

    def _density(self) -> tuple[LayerDensity, ...]:
        if not self.coverage:
            return ()
        computed = torch.stack([c.computed.to(torch.float64) for _, c in self.coverage]).tolist()
        pairs = zip(self.coverage, computed, strict=True)
        return tuple(LayerDensity(layer, tiles, float(c.causal)) for (layer, c), tiles in pairs)
