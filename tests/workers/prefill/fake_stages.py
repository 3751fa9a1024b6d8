"""Fake stages for tests of the prefill controller. They fail on calls that a stage must never get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from deltafront.kernels.methods import method_spec
from deltafront.workers.messages.events import LayerDensity
from deltafront.workers.messages.requests import PrefillJob
from deltafront.workers.messages.stages import ChunkCommand, ChunkReport, OpenRequest, RequestFailed
from deltafront.workers.prefill.group.chunks import ModelWork
from deltafront.workers.prefill.group.controller import PrefillController
from deltafront.workers.settings import PrefillConfig
from deltafront.workers.tracing import NO_TRACER, Tracer

DENSE = method_spec("dense")


class FakeStage:
    """Runs commands one by one, each after `pause()` seconds. Records calls that a stage must never get."""

    def __init__(self, stage: int, pause: Callable[[], float], trouble: Callable[[str], None]) -> None:
        self.stage, self.pause, self.trouble = stage, pause, trouble
        self.log: list[tuple[str, str, int]] = []
        self.opened: dict[str, OpenRequest] = {}
        self.serials: list[int] = []
        """The serials of all opened requests, in order."""
        self.lent: dict[str, int] = {}
        """For each request id, how often `close` still reports that its pages are being read."""
        self.batches: list[list[str]] = []
        """The request ids of each batch."""
        self.wrong: list[str] = []
        self.stopped = False
        self.stuck = False
        self._tail: asyncio.Future[Any] | None = None
        self._owed: set[asyncio.Future[Any]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, request: OpenRequest) -> Awaitable[None]:
        self.serials.append(request.serial)
        return self._send([("open", request.request_id, 0)], lambda: self._open(request))

    def run_batch(self, commands: Sequence[ChunkCommand]) -> Awaitable[list[ChunkReport | RequestFailed]]:
        for command in commands:
            if (self.stage == 0) != (len(command.token_ids) == 4 * command.tokens):
                self.wrong.append("token ids are for the first stage, all of them")
        if len({command.request_id for command in commands}) < len(commands):
            self.wrong.append("two chunks of one prompt in a batch")
        self.batches.append([command.request_id for command in commands])
        entries = [("chunk", command.request_id, command.start) for command in commands]
        return self._send(entries, lambda: [self._outcome(command) for command in commands])

    def close(self, request_id: str) -> Awaitable[bool]:
        return self._send([("close", request_id, 0)], lambda: self._close(request_id))

    def abandon(self, serial: int) -> None:
        self.log.append(("abandon", "", serial))

    def pages_used(self) -> Awaitable[int]:
        used = sum(len(request.pages) for request in self.opened.values())
        return self._send([("pages", "", 0)], lambda: used)

    def stop(self) -> None:
        self.stopped = True
        for owed in self._owed:
            if not owed.done():
                owed.set_exception(RuntimeError(f"stage {self.stage} died"))

    def _send(self, entries: Sequence[tuple[str, str, int]], work: Callable[[], Any]) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        owed: asyncio.Future[Any] = loop.create_future()
        self._owed.add(owed)
        before, self._tail = self._tail, owed
        self.log += entries

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            await asyncio.sleep(self.pause())
            while self.stuck and not self.stopped:
                await asyncio.sleep(0.01)
            try:
                result = work()
                if not owed.done():
                    owed.set_result(result)
            except Exception as error:
                if not owed.done():
                    owed.set_exception(error)

        self._tasks.append(loop.create_task(run()))
        return owed

    def _open(self, request: OpenRequest) -> None:
        for other in self.opened.values():
            if set(other.pages) & set(request.pages):
                self.wrong.append(f"{request.request_id} got pages that {other.request_id} still has")
        self.opened[request.request_id] = request

    def _close(self, request_id: str) -> bool:
        self.opened.pop(request_id, None)
        self.lent[request_id] = self.lent.get(request_id, 0) - 1
        return self.lent[request_id] < 0

    def _outcome(self, command: ChunkCommand) -> ChunkReport | RequestFailed:
        try:
            return self._chunk(command)
        except RequestFailed as error:
            return error

    def _chunk(self, command: ChunkCommand) -> ChunkReport:
        if command.request_id not in self.opened:
            self.wrong.append(f"a chunk of {command.request_id}, which is not open")
        self.trouble(command.request_id)
        density = (LayerDensity(layer=self.stage, computed=1.0, causal=2.0, attention=0.5, choosing=0.25),)
        phases = {"projection": 0.0004, "activation_wait": 0.0001}
        return ChunkReport(
            request_id=command.request_id,
            stage=self.stage,
            start=command.start,
            wall=0.0006,
            phases=phases,
            density=density,
            sampled_share=0.25,
            handoff_bytes=command.tokens,
        )


async def no_pulse(_stage: int) -> None:
    return None


def no_trouble(_request_id: str) -> None:
    return None


def make(
    stages: int = 2,
    pages: int = 64,
    pause: Callable[[], float] = lambda: 0.0005,
    trouble: Callable[[str], None] = no_trouble,
    lease: float = 60.0,
) -> tuple[PrefillController, list[FakeStage]]:
    config = PrefillConfig(stages=stages, chunk_tokens=128, cache_tokens=16 * pages, stream_lease_s=lease)
    fakes = [FakeStage(stage, pause, trouble) for stage in range(stages)]
    return controller_of(fakes, config), fakes


def controller_of(
    fakes: list[FakeStage], config: PrefillConfig, work: ModelWork | None = None, tracer: Tracer = NO_TRACER
) -> PrefillController:
    def end_stages(_hanging: int | None) -> None:
        for fake in fakes:
            fake.stop()

    async def pulse(stage: int) -> None:
        while fakes[stage].stuck:
            await asyncio.sleep(1.0)

    clock = asyncio.get_running_loop().time
    return PrefillController(
        "prefill:test", fakes, config, end_stages, pulse, clock=clock, work=work, tracer=tracer
    )


def job(name: str, tokens: int, **more: Any) -> PrefillJob:
    return PrefillJob(
        request_id=name, token_ids=bytes(4 * tokens), method=DENSE, decode_worker="decode:x", **more
    )


async def collect(controller: PrefillController, work: PrefillJob) -> list[Any]:
    return [event async for event in controller.prefill(work)]


async def assert_clean(controller: PrefillController, fakes: list[FakeStage]) -> None:
    """Check that no page is in use and nothing is open, that every stage got the same commands, and that no
    forbidden call was made."""
    stats = await controller.stats()
    assert (stats.pages_free, stats.running, stats.waiting) == (stats.pages_total, 0, 0)
    assert stats.waiting_tokens == 0
    assert await controller.stage_pages() == [0] * len(fakes)
    for fake in fakes:
        assert fake.wrong == []
        assert fake.log == fakes[0].log
