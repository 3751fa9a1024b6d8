"""Runs a whole prefill group and its KV hand-off in one process without Ray, for tests and benchmarks. It
uses the service's own controller and stages, each stage on a thread."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from deltafront.kernels.methods import MethodSpec
from deltafront.workers.kv.cache import PagedKVCache, Sides, row_forms
from deltafront.workers.kv.fetch import KVSource
from deltafront.workers.kv.handoff.protocols import (
    Destination,
    HandoffError,
    UsePages,
    check_kv,
    described,
)
from deltafront.workers.kv.states import State, StateCache, packed
from deltafront.workers.messages.events import PrefillDone, PrefillReport
from deltafront.workers.messages.requests import PrefillFailed, PrefillJob
from deltafront.workers.messages.stages import FirstLogits, HandedState, KVAnnouncement
from deltafront.workers.prefill.group.chunks import ModelWork
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.prefill.stage.activations import Activations, LinkClosed, NoActivations
from deltafront.workers.prefill.stage.stage import PrefillStage, load_stage
from deltafront.workers.roles import Form, Stage, stand_in
from deltafront.workers.settings import KVDtype, ModelSpec, PrefillConfig

T = TypeVar("T")
_WORKER = "in-process"
_NO_DOOR_S = 86_400.0


# --- the hand-off ---


class LocalReceiver(Protocol):
    def announce(self, announcement: KVAnnouncement) -> None: ...

    def first_logits(self, message: FirstLogits) -> None: ...

    def state(self, message: HandedState) -> None: ...


@dataclass(frozen=True)
class DeviceKV:
    """A payload with one layer's KV of a chunk. `ready` is the CUDA event after which it may be read; None on
    a CPU."""

    sides_T: Sides
    ready: Any = None


class InProcessSender:
    def __init__(self, receiver: LocalReceiver) -> None:
        self._receiver = receiver

    def open(self, destination: Destination) -> InProcessStream:
        return InProcessStream(destination, self._receiver)


class InProcessStream:
    def __init__(self, destination: Destination, receiver: LocalReceiver) -> None:
        self._to, self._receiver = destination, receiver
        self.pages, self.has_prefix = destination.pages, False
        self._failure = ""

    def put(self, layer: int, start: int, *sides_T: torch.Tensor) -> int:
        check_kv(*sides_T)
        payload = DeviceKV(tuple(x.clone() for x in sides_T), _now(sides_T[0].device))
        announcement = KVAnnouncement(
            request_id=self._to.request_id,
            layer=layer,
            start=start,
            tokens=sides_T[0].shape[0],
            payload=payload,
            attempt=self._to.attempt,
        )
        with self._noting("KV"):
            self._receiver.announce(announcement)
        return sum(x.nbytes for x in sides_T)

    def put_logits(self, logits_V: torch.Tensor) -> None:
        with self._noting("logits"):
            message = FirstLogits(
                request_id=self._to.request_id, logits=logits_V.numpy(), attempt=self._to.attempt
            )
            self._receiver.first_logits(message)

    def copy_state(self, _tokens: int, states: StateCache, slot: int) -> State | None:
        return states.to_host(slot)

    def put_state(self, tokens: int, layers: Sequence[int], state: State | None) -> None:
        with self._noting("a state"):
            message = HandedState(
                request_id=self._to.request_id,
                tokens=tokens,
                layers=tuple(layers),
                arrays=packed(state),
                attempt=self._to.attempt,
            )
            self._receiver.state(message)

    def end_chunk(self) -> Callable[[], None]:
        return self._check

    def close(self) -> bool:
        """Return True: payloads are copies, so no decode worker reads the pages."""
        self._failure = ""
        return True

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = self._failure or f"{self._to.decode_worker} did not take {what}: {error}"

    def _check(self) -> None:
        if self._failure:
            raise HandoffError(self._failure)


class InProcessReader:
    def __init__(self, cache: PagedKVCache, thread: Executor) -> None:
        self._cache = cache
        self._thread = thread

    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        kv = announcement.payload
        forms = row_forms(self._cache.model_heads, self._cache.head_dim, self._cache.dtype)
        expected = [(announcement.tokens, *shape) for shape, _dtype in forms]
        if not isinstance(kv, DeviceKV) or [tuple(x.shape) for x in kv.sides_T] != expected:
            raise HandoffError(
                f"{described(announcement)} is not {len(forms)} tensors as expected, {expected}"
            )
        own = tuple(x[:, self._cache.heads] for x in kv.sides_T)
        parts = dict.fromkeys(layers, own)
        with use_pages() as pages:
            if pages is None:
                return None
            await asyncio.get_running_loop().run_in_executor(
                self._thread, self._cache.write_layers, pages, announcement.start, parts, kv.ready
            )
        return sum(x_TGD.nbytes for x_TGD in own)


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


# --- the group ---


class QueueActivations:
    """Links stages that are threads of one process."""

    def __init__(self, before: queue.SimpleQueue[Any] | None, after: queue.SimpleQueue[Any] | None) -> None:
        self._before = before
        self._after = after

    @classmethod
    def chain(cls, stages: int) -> list[QueueActivations]:
        links: list[queue.SimpleQueue[Any] | None] = [queue.SimpleQueue() for _ in range(stages - 1)]
        return [cls(a, b) for a, b in zip([None, *links], [*links, None], strict=True)]

    def receive(self, tokens: int) -> torch.Tensor:
        hidden_TC = None if self._before is None else self._before.get()
        if hidden_TC is None:
            raise LinkClosed("the pipeline was closed")
        if hidden_TC.shape[0] != tokens:
            raise LinkClosed(f"stages out of step: {hidden_TC.shape[0]} rows came, {tokens} were expected")
        return hidden_TC  # type: ignore[no-any-return]

    def send(self, hidden_TC: torch.Tensor) -> None:
        if self._after is None:
            raise LinkClosed("the last stage cannot send: no stage is after it")
        self._after.put(hidden_TC)

    def abort(self) -> None:
        for link in (self._before, self._after):
            if link is not None:
                link.put(None)


class StageThread:
    """Runs a stage's commands on a thread; a controller calls `stage`. `interrupt` wakes a stage that waits
    for a neighbour."""

    def __init__(self, stage: PrefillStage, threads: int, interrupt: Callable[[], None]) -> None:
        self._plain: Stage = stage
        self._interrupt = interrupt
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        self._ends = ThreadPoolExecutor(1)
        self.stage = stand_in(Stage, "a stage of this process", self._method)

    def stop(self) -> None:
        """Make all remaining commands raise LinkClosed."""
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
    """Drops KV, and keeps each request's first logits (float32 [V])."""

    def __init__(self) -> None:
        self.logits: dict[str, np.ndarray[Any, Any]] = {}

    def announce(self, announcement: KVAnnouncement) -> None: ...

    def first_logits(self, message: FirstLogits) -> None:
        self.logits[message.request_id] = message.logits

    def state(self, message: HandedState) -> None: ...


def local_controller(
    model: ModelSpec,
    config: PrefillConfig,
    receiver: LocalReceiver,
    source: KVSource | None = None,
    kv_dtype: KVDtype | None = None,
    batch_tokens: int = 0,
) -> PrefillController:
    """Load a prefill group into this process. Use it from one event loop, and call `stop()` at the end.
    `source` is None if no prompt is resumed. With `batch_tokens` prompts share batches on a CPU, too."""
    ends: Sequence[Activations] = [NoActivations()]
    if config.stages > 1:
        ends = QueueActivations.chain(config.stages)
    threads: list[StageThread] = []
    work: ModelWork | None = None
    sender = InProcessSender(receiver)
    for number, activations in enumerate(ends):
        stage = load_stage(
            model, config, number, activations, lambda _cache: sender, kv_dtype=kv_dtype, source=source
        )
        threads.append(StageThread(stage, config.threads, activations.abort))
        if stage.stack.device.type == "cuda" or batch_tokens:
            work = ModelWork.of(stage.stack.config, config.stages, stage.stack.quantised)
            work = replace(work, batch_tokens=batch_tokens) if batch_tokens else work

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

    Returns the prompt's report, without the time to load the model, and its last logits [V]. Raises
    PrefillFailed.
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
