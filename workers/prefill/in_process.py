"""A whole prefill group in one process, without Ray: each stage on a thread, activations by queue.

The same controller and stages as in the service, so that tests and benchmarks measure the real thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..kv.handoff import Sink
from ..kv.transports import sender
from ..messages import (
    ChunkCommand,
    ChunkReport,
    FirstLogits,
    KVAnnouncement,
    MethodSpec,
    OpenRequest,
    PrefillDone,
    PrefillFailed,
    PrefillJob,
    PrefillReport,
)
from ..settings import HandoffConfig, ModelSpec, PrefillConfig
from .activations import Activations, LinkClosed, NoActivations, QueueActivations
from .controller import PrefillController
from .stage import PrefillStage, load_stage

T = TypeVar("T")
_WORKER = "in-process"


class LocalStageLink:
    """A stage on a thread of its own. `interrupt` wakes the stage if it blocks on a neighbour."""

    def __init__(self, stage: PrefillStage, threads: int, interrupt: Callable[[], None]) -> None:
        self._stage = stage
        self._interrupt = interrupt
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))

    def open(self, request: OpenRequest) -> Awaitable[None]:
        return self._send(self._stage.open, request)

    def run_chunk(self, command: ChunkCommand) -> Awaitable[ChunkReport]:
        return self._send(self._stage.run_chunk, command)

    def close(self, request_id: str) -> Awaitable[None]:
        return self._send(self._stage.close, request_id)

    def abandon(self, serial: int) -> None:
        self._stage.abandon(serial)

    def pages_used(self) -> Awaitable[int]:
        return self._send(self._stage.pages_used)

    def stop(self) -> None:
        self._stopped = True
        self._interrupt()
        self._thread.shutdown(wait=False)

    def _send(self, method: Callable[..., T], *args: Any) -> Awaitable[T]:
        return asyncio.wrap_future(self._thread.submit(self._run, method, *args))

    def _run(self, method: Callable[..., T], *args: Any) -> T:
        if self._stopped:
            raise LinkClosed("the stage was stopped")
        return method(*args)


class LogitsSink:
    """Takes hand-offs and keeps only each request's first logits (float32 [V])."""

    def __init__(self) -> None:
        self.logits: dict[str, np.ndarray[Any, Any]] = {}

    def announce(self, announcement: KVAnnouncement) -> None: ...

    def first_logits(self, message: FirstLogits) -> None:
        self.logits[message.request_id] = message.logits


def local_controller(model: ModelSpec, config: PrefillConfig, sink: Sink) -> PrefillController:
    """Load a group into this process. `stop()` it when done; use it from one event loop."""
    handoff = HandoffConfig(transport="in_process")
    ends: Sequence[Activations] = [NoActivations()]
    if config.stages > 1:
        ends = QueueActivations.chain(config.stages)
    links = []
    for number, activations in enumerate(ends):
        stage = load_stage(model, config, number, activations, sender(handoff, config.device, sink))
        links.append(LocalStageLink(stage, config.threads, activations.close))
    return PrefillController("local", links, config)


def run_in_process(
    model: ModelSpec | str | Path, config: PrefillConfig, token_ids: bytes, method: MethodSpec
) -> tuple[PrefillReport, np.ndarray[Any, Any]]:
    """Prefill one prompt (little-endian uint32 ids) here; returns its report and its last logits [V].

    Loading the model is not part of the report. Raises PrefillFailed.
    """
    spec = model if isinstance(model, ModelSpec) else ModelSpec(str(model))
    sink = LogitsSink()

    async def run() -> PrefillReport:
        controller = local_controller(spec, config, sink)
        try:
            async for event in controller.prefill(PrefillJob("prompt", token_ids, method, _WORKER)):
                if isinstance(event, PrefillDone):
                    return event.report
            raise PrefillFailed(f"the prompt was refused: {event}")
        finally:
            await controller.stop()

    report = asyncio.run(run())
    return report, sink.logits["prompt"]
