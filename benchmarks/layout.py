"""What a given number of prefill stages and decode workers, on given GPUs, can hold of a model: the other way
round than `size`, which looks for the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from deltafront.service.cli.size import GIB, RESERVE_GIB, Sizing, decode_cell, named, sizing
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.settings import Quantisation

_ANY_NUMBER = 1 << 30


@dataclass(frozen=True)
class Layout:
    """A deployment's processes and their GPUs.

    stages: of one prefill group. ranks: of a decode worker. gpus_per_stage, gpus_per_rank: less than 1 where
    a stage and a rank share a GPU: the rank then has what the stage leaves, all but a reserve where the stage
    maps the rank's memory (mapped). stage_gpu_gib, rank_gpu_gib: memory of the GPUs they run on.
    """

    groups: int
    stages: int
    gpus_per_stage: float
    stage_gpu_gib: float
    workers: int
    ranks: int
    gpus_per_rank: float
    rank_gpu_gib: float
    mapped: bool = False

    @property
    def gpus(self) -> float:
        ranks = self.workers * self.ranks
        return self.groups * self.stages * self.gpus_per_stage + ranks * self.gpus_per_rank

    @property
    def shared(self) -> bool:
        return self.gpus_per_rank < 1


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
    """With weights and KV cache in bfloat16. Raises ModelError for more stages than the model has layers, and
    ValueError for GPUs without memory."""

    def sized(contexts: int, gpu_gib: float, stages: int | None, reserve_gib: float = RESERVE_GIB) -> Sizing:
        return sizing(
            name,
            model,
            tokens,
            contexts,
            gpu_gib,
            quantisation=quantisation,
            stages=stages,
            ranks=layout.ranks,
            reserve_gib=reserve_gib,
        )

    prefill = sized(1, layout.stage_gpu_gib, layout.stages)
    stage_gib = RESERVE_GIB if layout.shared else 0.0
    stage_gib += prefill.stage_bytes / GIB if layout.shared and not layout.mapped else 0.0
    return Fit(
        layout,
        prefill=prefill,
        stages_needed=sized(1, layout.stage_gpu_gib, None).stages,
        decode=sized(_ANY_NUMBER, layout.rank_gpu_gib, None, stage_gib + RESERVE_GIB),
    )


HEADER = ("model", "context", "GPUs", "GiB of a prefill stage", "GiB of a decode rank", "held at once")


def row(found: Fit) -> list[str]:
    """A line under HEADER: stages × GiB on the fullest, workers × ranks × GiB, contexts held at once."""
    layout, prefill, decode = found.layout, found.prefill, found.decode
    stage, worker = prefill.stage_bytes / GIB, decode_cell(decode)
    needed = (
        "no number of stages fits" if found.stages_needed is None else f"needs {found.stages_needed} stages"
    )
    reads = f"{layout.groups * layout.stages} × {stage:.1f}"
    if not prefill.stages:
        reads = f"does not fit: {stage:.1f}, {needed}"
    elif layout.mapped:
        reads = "the rank's"
    return [
        named(prefill),
        f"{prefill.tokens:,}",
        "–" if found.gpus is None else f"{found.gpus:g}",
        reads,
        f"{layout.workers} × {worker}" if found.contexts else f"does not fit: {worker}",
        str(found.contexts or "–"),
    ]
