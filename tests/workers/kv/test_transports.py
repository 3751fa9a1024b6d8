"""Tests that each transport brings a stage's tensors into a decode worker's pages."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from deltafront.tests.workers.in_process import (
    DeviceKV,
    InProcessReader,
    InProcessSender,
    InProcessStream,
)
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff.nixl import gathered_kv
from deltafront.workers.kv.handoff.nixl_agent import Agent
from deltafront.workers.kv.handoff.nixl_heads import GatherExporter, GatherSlots
from deltafront.workers.kv.handoff.outbox import Delivery
from deltafront.workers.kv.handoff.protocols import Destination, HandoffError, KVSender, UsePages
from deltafront.workers.kv.handoff.stream import MessageSender
from deltafront.workers.kv.handoff.transports import TRANSPORTS, Transport, kv_reader, kv_sender
from deltafront.workers.kv.host_copies import HostCopies
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import GenerateJob
from deltafront.workers.messages.stages import FirstLogits, KVAnnouncement
from deltafront.workers.settings import HandoffConfig

from ..prompts import SHORT, ids_of
from .export_bench import ByCudaIpc, ByNixl
from .test_object_store import Box


class EngineReceiver:
    """An engine of this process, for a stage on another thread."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def announce(self, announcement: KVAnnouncement) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.announce(announcement), self._loop).result()

    def first_logits(self, message: FirstLogits) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.first_logits(message), self._loop).result()


class Memory:
    """Memory that others read by handle. It takes the place of exported GPU memory."""

    def __init__(self) -> None:
        self.exported: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self.released: list[str] = []
        self._handles = itertools.count()

    def export(self, request_id: str, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> int:
        handle = next(self._handles)
        self.exported[handle] = request_id, k_TGD, v_TGD
        return handle

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
        held = self.exported.items()
        self.exported = {handle: kept for handle, kept in held if kept[0] != request_id}


class ToySender:
    """Announces handles of tensors that are not copied."""

    def __init__(self, memory: Memory, receiver: Any) -> None:
        self._memory, self._receiver = memory, receiver

    def open(self, destination: Destination) -> ToyStream:
        stream = ToyStream(destination, self._receiver)
        stream.memory = self._memory
        return stream


class ToyStream(InProcessStream):
    memory: Memory

    def put(self, layer: int, start: int, k_TGD: Any, v_TGD: Any) -> int:
        request_id = self._to.request_id
        handle = self.memory.export(request_id, k_TGD, v_TGD)
        self._receiver.announce(
            KVAnnouncement(request_id=request_id, layer=layer, start=start, tokens=len(k_TGD), payload=handle)
        )
        return int(k_TGD.nbytes + v_TGD.nbytes)

    def close(self) -> bool:
        self.memory.release(self._to.request_id)
        return super().close()


class ToyReader:
    """Copies tensors by handle, directly into pages."""

    def __init__(self, memory: Memory, cache: PagedKVCache) -> None:
        self._memory, self._cache = memory, cache

    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        _, k_TGD, v_TGD = self._memory.exported[announcement.payload]
        with use_pages() as pages:
            if pages is None:
                return None
            self._cache.write_layers(pages, announcement.start, dict.fromkeys(layers, (k_TGD, v_TGD)))
        return int(k_TGD.nbytes + v_TGD.nbytes)


class LocalOutbox(Box):
    """Delivers immediately to `receiver`, as an actor call would."""

    receiver: Any = None

    def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None:
        self.receiver.announce(announcement)

    def send_logits(self, delivery: Delivery, message: FirstLogits) -> None:
        self.receiver.first_logits(message)


class LocalGatheringOutbox(LocalOutbox):
    """Gathers each message by ranks before `outbox` delivers it. Slots are never used again."""

    def __init__(self, outbox: LocalOutbox, cache: PagedKVCache, agent: Agent, ranks: int) -> None:
        super().__init__()
        self._outbox, self._slots = outbox, GatherSlots(cache, agent, ranks, 1 << 17, slots=64)
        self._payload = gathered_kv(cache, agent)

    def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None:
        gathered, lease, _give_back = self._slots.gather(announcement.payload)
        self._outbox.send_kv(delivery, replace(announcement, payload=self._payload(gathered, lease)))

    def send_logits(self, delivery: Delivery, message: FirstLogits) -> None:
        self._outbox.send_logits(delivery, message)


def gathering_sender(way: ByNixl, outbox: LocalOutbox, cache: PagedKVCache, ranks: int) -> MessageSender:
    gathering = LocalGatheringOutbox(outbox, cache, way.agent(), ranks)
    return MessageSender(GatherExporter(cache.device), gathering, background=True)


def without_ray_and_gpu(name: str, outbox: LocalOutbox, ranks: int = 1) -> Transport:
    """Make a transport with stand-ins for the called actor and the device's memory."""
    if name == "object_store":
        return Transport(
            lambda _config, _cache: MessageSender(HostCopies("cpu"), outbox, background=True),
            TRANSPORTS[name].reader,
        )
    way = ByCudaIpc() if name == "cuda_ipc" else ByNixl()
    if ranks > 1 and isinstance(way, ByNixl):
        return Transport(
            lambda _config, cache: gathering_sender(way, outbox, cache, ranks),
            lambda _config, cache, thread: way.reader(cache, thread, time.monotonic),
        )
    return Transport(
        lambda config, cache: MessageSender(
            way.exporter(cache, config.ack_timeout_s, time.monotonic), outbox, background=True
        ),
        lambda _config, cache, thread: way.reader(cache, thread, time.monotonic),
    )


def send_prompt(run: Any, end: KVSender, cache: PagedKVCache, request_id: str, ids: list[int]) -> None:
    """Write and send a prompt's KV as a stage does: by chunk and layer, from its own pages."""
    prompt, pages = run.prefill(ids), (9, 2, 3, 0, 5)
    stream = end.open(Destination(request_id=request_id, decode_worker="decode:test", pages=pages))
    for start in range(0, len(ids), 32):
        for layer, sides in enumerate(prompt.kv):
            k_TGD, v_TGD = (torch.from_numpy(side[start : start + 32]) for side in sides)
            cache.write(layer, torch.tensor(pages), start, k_TGD, v_TGD)
            stream.put(layer, start, k_TGD, v_TGD)
        sent = stream.end_chunk()
        if start + 32 >= len(ids):
            stream.put_logits(torch.from_numpy(prompt.logits))
        sent()
    assert stream.close()


async def answer_by(run: Any, make_sender: Callable[[PagedKVCache], KVSender]) -> Any:
    there = run.engine._runner.cache
    cache = PagedKVCache(there.layers, there.model_heads, there.head_dim, 10, there.dtype, "cpu")
    await run.reserve("a", 70, 8)
    await asyncio.to_thread(send_prompt, run, make_sender(cache), cache, "a", ids_of(70))
    answer = await run.collect(GenerateJob(request_id="a", sampling=SHORT))
    assert run.used == 0
    return answer


async def test_in_process_transport_delivers_the_kv_a_stage_computed(bench: Any) -> None:
    wanted = await (await bench()).ask("a", ids_of(70), SHORT)
    run = await bench(reader=InProcessReader)
    answer = await answer_by(run, lambda _cache: InProcessSender(EngineReceiver(run.engine)))
    assert answer.ids == wanted.ids
    assert answer.finish.report.handoff_bytes == wanted.finish.report.handoff_bytes


@pytest.mark.parametrize("transport", ["object_store", "cuda_ipc", "nixl"])
async def test_every_transport_delivers_the_kv_a_stage_computed(
    request: pytest.FixtureRequest, bench: Any, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    ranks = request.config.getoption("--ranks")
    wanted = await (await bench()).ask("a", ids_of(70), SHORT)
    outbox, config = LocalOutbox(), HandoffConfig(transport=transport)  # type: ignore[arg-type]
    monkeypatch.setitem(TRANSPORTS, transport, without_ray_and_gpu(transport, outbox, ranks))
    run = await bench(reader=partial(kv_reader, config))
    outbox.receiver = EngineReceiver(run.engine)
    answer = await answer_by(run, partial(kv_sender, config))
    assert answer.ids == wanted.ids
    assert answer.finish.report.handoff_bytes == wanted.finish.report.handoff_bytes


@pytest.mark.usefixtures("single_rank")  # the toy transport copies all heads of a page
async def test_external_transport_is_chosen_by_its_name(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, receivers = Memory(), list[EngineReceiver]()
    toy = Transport(
        lambda _config, _cache: ToySender(memory, receivers[0]),
        lambda _config, cache, _thread: ToyReader(memory, cache),
    )
    monkeypatch.setitem(TRANSPORTS, "toy", toy)
    config = HandoffConfig(transport="toy")  # type: ignore[arg-type]
    wanted = await (await bench()).ask("a", ids_of(70), SHORT)
    run = await bench(reader=partial(kv_reader, config))
    receivers.append(EngineReceiver(run.engine))
    answer = await answer_by(run, partial(kv_sender, config))
    assert answer.ids == wanted.ids
    assert memory.released == ["a"] and not memory.exported, "released once, when the stage was through"


def test_refuses_an_unknown_transport() -> None:
    config = HandoffConfig(transport="pigeons")  # type: ignore[arg-type]
    known = r"'pigeons' is unknown; known: object_store, cuda_ipc, nixl, mapped$"
    with pytest.raises(ValueError, match=known):
        kv_sender(config, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'pigeons' is unknown"):
        kv_reader(config, None, None)  # type: ignore[arg-type]


# --- in process -----------------------------------------------------------------------------------------


class Picky:
    """Refuses all messages of one request."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def announce(self, announcement: KVAnnouncement) -> None:
        if announcement.request_id == "refused":
            raise ValueError("not here")
        self.taken.append(announcement.payload)

    def first_logits(self, message: FirstLogits) -> None:
        if message.request_id == "refused":
            raise ValueError("not here either")
        self.taken.append(message.logits)


def test_in_process_sender_copies_tensors_and_fails_at_end_of_chunk() -> None:
    sink = Picky()
    end = InProcessSender(sink)
    k, v = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16)
    streams = {}
    for name in ("refused", "other"):
        streams[name] = end.open(Destination(request_id=name, decode_worker="decode:x"))
        assert streams[name].put(4, 0, k, v) == 2 * 5 * 3 * 8 * 2
        streams[name].put_logits(torch.ones(7))
    payload, logits = sink.taken
    assert isinstance(payload, DeviceKV) and payload.ready is None
    k_before, v_before = k.clone(), v.clone()
    k.zero_(), v.zero_()  # the stage's pages belong to another prompt now
    assert all(map(torch.equal, payload.sides_T, (k_before, v_before)))
    assert logits.dtype == "float32"
    streams["other"].end_chunk()()
    with pytest.raises(HandoffError, match=r"^decode:x did not take KV: not here$"):
        streams["refused"].end_chunk()()
    assert streams["refused"].close()
    with pytest.raises(HandoffError, match="cannot hand over"):
        streams["other"].put(0, 0, k, v[:1])


@pytest.mark.parametrize("payload", [None, DeviceKV((torch.zeros(31, 2, 16), torch.zeros(32, 2, 16)))])
async def test_kv_that_differs_from_its_announcement_fails_the_request(bench: Any, payload: Any) -> None:
    run = await bench(reader=InProcessReader)
    await run.reserve("a", 70, 8)
    with pytest.raises(HandoffError, match="KV of a, layer 0 at 0 is not 2 tensors as expected"):
        await run.engine.announce(
            KVAnnouncement(request_id="a", layer=0, start=0, tokens=32, payload=payload)
        )
    assert run.used == 5, "its door may have another group go on"
    answer = await run.collect(GenerateJob(request_id="a", sampling=SHORT))
    assert answer.finish.reason is FinishReason.NO_KV
    assert run.used == 0
