"""Tests a decode worker before it serves, and after it has stopped."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from deltafront.workers.decode import engine as engine_module
from deltafront.workers.decode.engine import DecodeEngine
from deltafront.workers.kv.handoff.object_store import ObjectStoreReader
from deltafront.workers.messages.requests import DecodeFailed, Reservation
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.settings import DecodeConfig

CONFIG = DecodeConfig(cache_tokens=512, page_selection="full", warm_up=True)
RESERVATION = Reservation(request_id="a", owner="me", new_tokens=10, max_tokens=4)


class WarmUp:
    """A warm-up that lasts until `release` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.began = threading.Event()
        monkeypatch.setattr(engine_module, "warm_up", self)

    def __call__(self, *_: Any) -> None:
        self.began.set()
        self.let_go.wait()


async def test_serves_no_request_before_the_warm_up_ends(
    tiny_stack: LayerStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = WarmUp(monkeypatch)
    engine = DecodeEngine("decode:test", tiny_stack, CONFIG, reader=ObjectStoreReader)
    starting = None
    for moment in ("before start", "during the warm-up"):
        for call in (engine.stats(), engine.reserve(RESERVATION)):
            with pytest.raises(DecodeFailed, match=r"^the decode worker is still starting$"):
                await call
        assert engine._manager.pool.used == 0, moment
        if starting is None:
            starting = asyncio.create_task(engine.start())
            await asyncio.to_thread(warm_up.began.wait)
    warm_up.let_go.set()
    await starting
    assert (await engine.stats()).pages_free == 32
    await engine.reserve(RESERVATION)
    assert engine._manager.pool.used == 1
    await engine.close()
    with pytest.raises(DecodeFailed, match="shutting down"):
        await engine.reserve(RESERVATION)
    assert engine._manager.pool.used == 0


async def test_closing_the_decode_engine_leaves_no_task_running(bench: Any, tiny_stack: LayerStack) -> None:
    """Neither the engine's loops, nor a KV transfer that never ends."""
    run = await bench()
    before = asyncio.all_tasks() - set(run.engine._tasks)
    engine = DecodeEngine(
        "decode:other",
        tiny_stack,
        DecodeConfig(cache_tokens=512, page_selection="full"),
        reader=ObjectStoreReader,
    )
    await engine.start()
    await engine.reserve(Reservation(request_id="a", owner="me", new_tokens=70, max_tokens=4))
    piece = run.pieces("a", run.prefill([3] * 70))[0]
    never = asyncio.get_running_loop().create_future()
    object.__setattr__(piece, "payload", never)
    announcing = asyncio.create_task(engine.announce(piece))
    await asyncio.sleep(0.05)
    await engine.close()
    with pytest.raises(asyncio.CancelledError):
        await announcing
    assert asyncio.all_tasks() - set(run.engine._tasks) == before
    assert engine._manager.pool.used == 0


async def test_an_engine_that_never_started_can_be_closed(tiny_stack: LayerStack) -> None:
    before = asyncio.all_tasks()
    engine = DecodeEngine("decode:test", tiny_stack, CONFIG, reader=ObjectStoreReader)
    await engine.close()
    assert asyncio.all_tasks() == before
    with pytest.raises(DecodeFailed, match="shutting down"):
        await engine.stats()


async def test_engine_closed_during_its_warm_up_leaves_no_task_running(
    tiny_stack: LayerStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up, before = WarmUp(monkeypatch), asyncio.all_tasks()
    engine = DecodeEngine("decode:test", tiny_stack, CONFIG, reader=ObjectStoreReader)
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(warm_up.began.wait)
    threading.Timer(0.1, warm_up.let_go.set).start()
    await engine.close()
    await starting
    assert asyncio.all_tasks() == before


async def test_a_closed_worker_refuses_a_reservation_that_was_loading(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, loaded = await bench(host_cache_gib=0.02), asyncio.Event()

    async def load(_reservation: Reservation) -> tuple[list[int], int]:
        await loaded.wait()
        return [], 0

    monkeypatch.setattr(run.engine._tiers, "_load", load)
    reserving = asyncio.create_task(run.engine.reserve(RESERVATION))
    await asyncio.sleep(0)
    run.may_fault = True
    await run.engine.close()
    loaded.set()
    with pytest.raises(DecodeFailed, match="shutting down"):
        await reserving
    assert run.used == 0
