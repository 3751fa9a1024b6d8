"""What a given number of prefill stages and decode workers, on given GPUs, can hold of a model: the other way
round than `size`, which looks for the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ..service.cli.size import GIB, Sizing, sizing
from ..workers.model.directory.model_config import ModelConfig
from ..workers.settings import Quantisation

_ANY_NUMBER = 1 << 30


@dataclass(frozen=True)
class Layout:
    """A deployment's processes and their GPUs.

    stages: of one prefill group. gpus_per_stage, gpus_per_worker: above 0; less than 1 where processes share
    a GPU, and each may fill its part. stage_gpu_gib, worker_gpu_gib: memory of the GPUs they run on.
    """

    groups: int
    stages: int
    gpus_per_stage: float
    stage_gpu_gib: float
    workers: int
    gpus_per_worker: float
    worker_gpu_gib: float

    @property
    def gpus(self) -> float:
        return self.groups * self.stages * self.gpus_per_stage + self.workers * self.gpus_per_worker


@dataclass(frozen=True)
class Fit:
    """A model with contexts of a given length in a layout.

    prefill: with the layout's stages; its `stages` is None if they do not fit. stages_needed: the fewest that
    do, with a GPU of that memory each; None if no split fits. decode: its `contexts_per_worker` is how many
    contexts a worker holds beside the weights, 0 if none.
    """

    layout: Layout
    prefill: Sizing
    stages_needed: int | None
    decode: Sizing

    @property
    def gpus(self) -> float | None:
        """None: something does not fit."""
        return self.layout.gpus if self.prefill.stages and self.decode.contexts_per_worker else None

    @property
    def contexts(self) -> int:
        """That all decode workers hold at once."""
        return self.layout.workers * self.decode.contexts_per_worker


def fit(
    layout: Layout, name: str, model: ModelConfig, tokens: int, quantisation: Quantisation | None = None
) -> Fit:
    """With weights and K/V of bfloat16. Raises ModelError for more stages than the model has layers, and
    ValueError for GPUs without memory."""

    def sized(contexts: int, gpu_gib: float, stages: int | None = None) -> Sizing:
        return sizing(name, model, tokens, contexts, gpu_gib, quantisation=quantisation, stages=stages)

    stage_gib = layout.stage_gpu_gib * min(layout.gpus_per_stage, 1.0)
    worker_gib = layout.worker_gpu_gib * min(layout.gpus_per_worker, 1.0)
    return Fit(
        layout,
        prefill=sized(1, stage_gib, layout.stages),
        stages_needed=sized(1, layout.stage_gpu_gib).stages,
        decode=sized(_ANY_NUMBER, worker_gib),
    )


HEADER = ("model", "context", "GPUs", "GiB of a prefill stage", "GiB of a decode worker", "held at once")


def row(found: Fit) -> list[str]:
    """A line under HEADER: stages × GiB on the fullest, workers × GiB, contexts that decode workers hold."""
    layout, prefill, decode = found.layout, found.prefill, found.decode
    stage, worker = prefill.stage_bytes / GIB, decode.decode_bytes / GIB
    needed = (
        "no number of stages fits" if found.stages_needed is None else f"needs {found.stages_needed} stages"
    )
    return [
        prefill.model if prefill.quantisation is None else f"{prefill.model}, {prefill.quantisation}",
        f"{prefill.tokens:,}",
        "–" if found.gpus is None else f"{found.gpus:g}",
        f"{layout.groups * layout.stages} × {stage:.1f}"
        if prefill.stages
        else f"does not fit: {stage:.1f}, {needed}",
        f"{layout.workers} × {worker:.1f}" if found.contexts else f"does not fit: {worker:.1f}",
        str(found.contexts or "–"),
    ]
