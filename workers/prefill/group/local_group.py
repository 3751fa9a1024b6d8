"""A whole prefill group in one process, without Ray, for tests and benchmarks: the service's own controller
and stages, each stage on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ...kv.fetch import KVSource
from ...kv.handoff.in_process import InProcessSender, LocalReceiver
from ...messages.events import PrefillDone, PrefillReport
from ...messages.methods import MethodSpec
from ...messages.requests import PrefillFailed, PrefillJob
from ...messages.stages import FirstLogits, KVAnnouncement
from ...roles import Form, Stage, stand_in
from ...settings import ModelSpec, PrefillConfig
from ..stage.activations import Activations, LinkClosed, NoActivations, QueueActivations
from ..stage.chunk_cost import ModelWork
from ..stage.loading import load_stage
from ..stage.stage import PrefillStage
from .controller import PrefillController

T = TypeVar("T")
_WORKER = "in-process"
_NO_DOOR_S = 86_400.0


class StageThread:
    """Runs a stage's commands on a thread; a controller calls `stage`. interrupt: wakes a stage that waits
    for a neighbour."""

    def __init__(self, stage: PrefillStage, threads: int, interrupt: Callable[[], None]) -> None:
        self._plain: Stage = stage
        self._interrupt = interrupt
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        self._ends = ThreadPoolExecutor(1)
        self.stage = stand_in(Stage, "a stage of this process", self._method)

    def stop(self) -> None:
        """Let commands that are still to be done raise LinkClosed."""
        self._stopped = True
        self._interrupt()
        self._thread.shutdown(wait=False)
        self._ends.shutdown(wait=False)

    def _method(self, name: str, form: Form) -> Callable[..., Any]:
        method = getattr(self._plain, name)
        made: dict[Form, Callable[..., Any]] = {
            Form.NOTICE: method,
            Form.DEFERRED: partial(self._begin, method),
        }
        return made.get(form, partial(self._send, method))

    def _begin(self, method: Callable[..., Callable[[], T]], *arguments: Any) -> Awaitable[T]:
        begun = self._thread.submit(self._run, method, *arguments)

        def end() -> T:
            return begun.result()()

        return asyncio.wrap_future(self._ends.submit(end))

    def _send(self, method: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        return asyncio.wrap_future(self._thread.submit(self._run, method, *arguments))

    def _run(self, method: Callable[..., T], *arguments: Any) -> T:
        if self._stopped:
            raise LinkClosed("the stage was stopped")
        return method(*arguments)


class LogitsReceiver:
    """It drops K/V and keeps each request's first logits (float32 [V])."""

    def __init__(self) -> None:
        self.logits: dict[str, np.ndarray[Any, Any]] = {}

    def announce(self, announcement: KVAnnouncement) -> None: ...

    def first_logits(self, message: FirstLogits) -> None:
        self.logits[message.request_id] = message.logits


def local_controller(
    model: ModelSpec, config: PrefillConfig, receiver: LocalReceiver, source: KVSource | None = None
) -> PrefillController:
    """Load a group into this process. Use it from one event loop, and `stop()` it. source: None where no
    prompt is resumed."""
    ends: Sequence[Activations] = [NoActivations()]
    if config.stages > 1:
        ends = QueueActivations.chain(config.stages)
    threads: list[StageThread] = []
    work: ModelWork | None = None
    sender = InProcessSender(receiver)
    for number, activations in enumerate(ends):
        stage = load_stage(model, config, number, activations, lambda _cache: sender, source=source)
        threads.append(StageThread(stage, config.threads, activations.close))
        work = stage.work

    def end_stages(_hanging: int | None) -> None:
        for thread in threads:
            thread.stop()

    async def pulse(_stage: int) -> None: ...

    stages = [thread.stage for thread in threads]
    return PrefillController("local", stages, config, end_stages, pulse, work=work)


def run_in_process(
    model: ModelSpec | str | Path, config: PrefillConfig, token_ids: bytes, method: MethodSpec
) -> tuple[PrefillReport, np.ndarray[Any, Any]]:
    """Prefill one prompt of little-endian uint32 ids.

    Returns: its report, without the loading of the model, and its last logits [V].
    Raises: PrefillFailed.
    """
    spec = model if isinstance(model, ModelSpec) else ModelSpec(path=str(model))
    config, receiver = replace(config, stream_lease_s=_NO_DOOR_S), LogitsReceiver()

    async def run() -> PrefillReport:
        controller = local_controller(spec, config, receiver)
        try:
            async for event in controller.prefill(
                PrefillJob(request_id="prompt", token_ids=token_ids, method=method, decode_worker=_WORKER)
            ):
                if isinstance(event, PrefillDone):
                    return event.report
            raise PrefillFailed(f"the prompt was refused: {event}")
        finally:
            await controller.stop()

    report = asyncio.run(run())
    return report, receiver.logits["prompt"]
