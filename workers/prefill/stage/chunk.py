from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ....kernels.interface import Coverage
from ...messages.events import LayerDensity
from ...messages.stages import ChunkCommand, ChunkReport
from .phases import PhaseTimer


@dataclass(kw_only=True)
class ChunkWork:
    """Adds up what one chunk does on its way through a stage.

    `seal` launches the copies of results to the host. After `wait` any thread can read them while the device
    computes the next chunk.
    """

    command: ChunkCommand
    timer: PhaseTimer
    began: float = field(default_factory=time.perf_counter)
    coverage: list[tuple[int, Coverage]] = field(default_factory=list)
    handoff_bytes: int = 0
    finite: torch.Tensor | None = None
    logits_V: torch.Tensor | None = None
    """Float32, after the prompt's last token; None where nobody wants them."""
    launched: float = 0.0
    through: float = 0.0
    """When the host had launched the chunk, and when the device had computed it (perf_counter)."""
    _computed_L: torch.Tensor | None = None
    _sealed: Any = None

    def seal(self) -> None:
        """Call it after the last phase, on the thread that launches."""
        if self.coverage:
            self._computed_L = _to_host(torch.stack([c.computed for _, c in self.coverage]).to(torch.float64))
        if self.finite is not None:
            self.finite = _to_host(self.finite)
        if self.logits_V is not None:
            self.logits_V = _to_host(self.logits_V)
        self._sealed = self.timer.mark()
        self.launched = time.perf_counter()

    def wait(self) -> None:
        if self._sealed is not None:
            self._sealed.synchronize()
        self.through = time.perf_counter()

    def report(self, stage: int, after: float) -> ChunkReport:
        """Report the chunk, after `wait`. after: when the chunk before was computed; this one's time begins
        no earlier."""
        phases, density = self.timer.seconds(), self._density()
        return ChunkReport(
            request_id=self.command.request_id,
            stage=stage,
            start=self.command.start,
            wall=max(self.through - max(self.began, after), sum(phases.values())),
            phases=phases,
            density=density,
            sampled_share=sum(c.sampled for _, c in self.coverage) / max(1, len(self.coverage)),
            handoff_bytes=self.handoff_bytes,
            launched_ahead=None if self._sealed is None else self.through - self.launched,
        )

    def _density(self) -> tuple[LayerDensity, ...]:
        if self._computed_L is None:
            return ()
        seconds = self.timer.layers()
        densities = []
        for (layer, coverage), tiles in zip(self.coverage, self._computed_L.tolist(), strict=True):
            parts = seconds.get(layer, {})
            attention = parts.get("attention", 0.0)
            choosing = sum(parts.values()) - attention
            densities.append(
                LayerDensity(
                    layer=layer,
                    computed=tiles,
                    causal=float(coverage.causal),
                    attention=attention,
                    choosing=choosing,
                )
            )
        return tuple(densities)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """On a GPU the copy is still under way, into pinned memory."""
    return x.to("cpu", non_blocking=True)
