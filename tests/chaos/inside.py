"""The same service in one process without Ray: real doors with gRPC, real groups and decode workers, and the
in-process transport. Nothing can be killed here."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltafront.service.config import ServiceConfig, parse
from deltafront.service.metrics import Metrics
from deltafront.tests.workers.in_process import InProcessReader, local_controller
from deltafront.workers.decode.engine import DecodeEngine
from deltafront.workers.decode.worker import load_engine
from deltafront.workers.messages.stages import FirstLogits, KVAnnouncement
from deltafront.workers.prefill.group.controller import PrefillController

from ..service.inprocess import HANG_S, Cut, House, Loop, open_house
from .running import MODEL, Audits, Service, configuration, merge, whole_of, write_model

_ONE_RANK = {"decode": {"tensor_parallel": 1}}


class ToEngines:
    """Passes the stages' KV to the engine that has the request, on the stages' threads."""

    def __init__(self, engines: Sequence[DecodeEngine], loop: asyncio.AbstractEventLoop) -> None:
        self._engines, self._loop = engines, loop

    def announce(self, announcement: KVAnnouncement) -> None:
        self._wait(self._engine(announcement.request_id).announce(announcement))

    def first_logits(self, message: FirstLogits) -> None:
        self._wait(self._engine(message.request_id).first_logits(message))

    def _engine(self, request_id: str) -> DecodeEngine:
        known = (engine for engine in self._engines if engine._requests.find(request_id) is not None)
        return next(known, self._engines[0])  # any engine will report an unknown request

    def _wait(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(HANG_S)


class Inside(Service):
    """A service in this process. houses: its doors, which are used in turn."""

    def __init__(self, houses: Sequence[House], entries: list[Any]) -> None:
        super().__init__(os.getpid(), whole_of(0, 0, 0, 0), http="")
        self._houses, self._entries, self._turn = houses, entries, 0

    @property
    def address(self) -> str:  # type: ignore[override]
        self._turn += 1
        return self._houses[self._turn % len(self._houses)].address

    @address.setter
    def address(self, _given: str) -> None:
        """The address of the next door."""

    def audits(self) -> Audits:
        return list(self._entries)


class _Audit(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entries.append(json.loads(record.getMessage()))


async def _workers(config: ServiceConfig) -> tuple[list[PrefillController], list[DecodeEngine]]:
    names = [f"decode:d{number}" for number in range(config.decode.workers)]
    engines = [load_engine(name, config.model, config.decode, reader=InProcessReader) for name in names]
    for engine in engines:
        await engine.start()
    sink = ToEngines(engines, asyncio.get_running_loop())
    groups = [local_controller(config.model, config.prefill, sink) for _ in range(config.prefill.groups)]
    for number, group in enumerate(groups):
        group.name = f"prefill:g{number}"
    return groups, engines


@contextmanager
def running_inside(folder: Path, **sections: dict[str, Any]) -> Iterator[Service]:
    """Like `running`, but in this process."""
    content = merge(merge(configuration(write_model(folder / MODEL)), sections), _ONE_RANK)
    config, loop, audit = parse(content), Loop(), _Audit()
    logger = logging.getLogger("deltafront.audit")
    logger.addHandler(audit)
    logger.setLevel(logging.INFO)
    metrics = Metrics(folder / "metrics")
    first, server = loop.run(open_house(config, metrics, loop))
    second, other = loop.run(open_house(config, metrics, loop, [first]))
    groups, engines = loop.run(_workers(config))
    first.directory.groups[:] = [Cut(group) for group in groups]  # type: ignore[misc]
    first.directory.workers[:] = [Cut(engine) for engine in engines]  # type: ignore[misc]
    try:
        for house in (first, second):
            loop.run(house.fleet.refresh())
        yield Inside((first, second), audit.entries)
    finally:
        logger.removeHandler(audit)
        for one, house in ((server, first), (other, second)):
            loop.run(one.stop(0.2))
            loop.run(house.fleet.stop())
        for group in groups:
            loop.run(group.stop())
        for engine in engines:
            loop.run(engine.close())
        loop.stop()
