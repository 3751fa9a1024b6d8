"""The transport seam: tensors of a stage into pages of a decode worker, by any of its implementations."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff import HandoffError, Hold, Sender
from deltafront.workers.kv.host_copies import HostCopies
from deltafront.workers.kv.in_process import DeviceKV, InProcessSender
from deltafront.workers.kv.posting import PostingSender
from deltafront.workers.kv.transports import TRANSPORTS, Transport, receiver, sender
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import GenerateJob
from deltafront.workers.messages.stages import FirstLogits, KVAnnouncement
from deltafront.workers.settings import HandoffConfig

from ..prompts import SHORT, ids_of
from .lending_bench import ByCudaIpc, ByNixl
from .test_object_store import Box


class EngineSink:
    """An engine of this process, for a stage on another thread."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def announce(self, announcement: KVAnnouncement) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.announce(announcement), self._loop).result()

    def first_logits(self, message: FirstLogits) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.first_logits(message), self._loop).result()


class Memory:
    """What is left for others to pull, by handle: the toy's stand-in for exported GPU memory."""

    def __init__(self) -> None:
        self.exported: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self.released: list[str] = []
        self._handles = itertools.count()

    def export(self, request_id: str, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> int:
        handle = next(self._handles)
        self.exported[handle] = request_id, k_TGD, v_TGD
        return handle


class ToySender(InProcessSender):
    """Announces handles of tensors that stay where they are."""

    def __init__(self, memory: Memory, sink: Any) -> None:
        super().__init__(sink)
        self._memory = memory

    def announce(
        self,
        request_id: str,
        decode_worker: str,
        layer: int,
        start: int,
        k_TGD: Any,
        v_TGD: Any,
        pages: Sequence[int] = (),
    ) -> int:
        handle = self._memory.export(request_id, k_TGD, v_TGD)
        self._sink.announce(KVAnnouncement(request_id, layer, start, len(k_TGD), handle))
        return int(k_TGD.nbytes + v_TGD.nbytes)


class ToyReceiver:
    """Pulls by handle, straight into pages."""

    def __init__(self, memory: Memory, cache: PagedKVCache) -> None:
        self._memory, self._cache = memory, cache

    async def receive(self, announcement: KVAnnouncement, layers: Sequence[int], hold: Hold) -> int:
        _, k_TGD, v_TGD = self._memory.exported[announcement.payload]
        with hold() as pages:
            if pages is None:
                return 0
            self._cache.write_layers(pages, announcement.start, dict.fromkeys(layers, (k_TGD, v_TGD)))
        return int(k_TGD.nbytes + v_TGD.nbytes)

    def release(self, request_id: str) -> None:
        self._memory.released.append(request_id)
        held = self._memory.exported.items()
        self._memory.exported = {handle: kept for handle, kept in held if kept[0] != request_id}


class SinkPost(Box):
    """Delivers to a sink at once, as an actor would be called."""

    def __init__(self, sink: Any) -> None:
        super().__init__()
        self._sink = sink

    def kv(self, decode_worker: str, announcement: KVAnnouncement) -> None:
        self._sink.announce(announcement)

    def logits(self, decode_worker: str, message: FirstLogits) -> None:
        self._sink.first_logits(message)


def without_ray_and_gpu(name: str) -> Transport:
    """A transport with stand-ins for the actor that is called and for the device's memory."""
    if name == "object_store":
        return Transport(
            lambda _config, _cache, sink: PostingSender(HostCopies("cpu"), SinkPost(sink), background=True),
            TRANSPORTS[name].receiver,
        )
    way = ByCudaIpc() if name == "cuda_ipc" else ByNixl()
    return Transport(
        lambda config, cache, sink: PostingSender(
            way.lender(cache, config.ack_timeout_s, time.monotonic), SinkPost(sink), background=True
        ),
        lambda _config, cache, thread: way.receiver(cache, thread, time.monotonic),
    )


def send_prompt(run: Any, end: Sender, cache: PagedKVCache, request_id: str, ids: list[int]) -> None:
    """As a stage does it: chunk by chunk, layer by layer, into its pages and on from there."""
    prompt, pages = run.prefill(ids), (9, 2, 3, 0, 5)
    for start in range(0, len(ids), 32):
        for layer, sides in enumerate(prompt.kv):
            k_TGD, v_TGD = (torch.from_numpy(side[start : start + 32]) for side in sides)
            cache.write(layer, torch.tensor(pages), start, k_TGD, v_TGD)
            end.announce(request_id, "decode:test", layer, start, k_TGD, v_TGD, pages)
        sent = end.end_chunk(request_id)
        if start + 32 >= len(ids):
            end.first_logits(request_id, "decode:test", torch.from_numpy(prompt.logits))
        sent()
    end.forget(request_id)


async def answer_by(bench: Callable[..., Any], transport: str) -> Any:
    run = await bench(transport=transport)
    there = run.engine._runner.cache
    cache = PagedKVCache(there.layers, there.kv_heads, there.head_dim, 10, there.dtype, "cpu")
    end = sender(HandoffConfig(transport=transport), cache, EngineSink(run.engine))
    await run.reserve("a", 70, 8)
    await asyncio.to_thread(send_prompt, run, end, cache, "a", ids_of(70))
    assert not end.holds("a")
    answer = await run.collect(GenerateJob("a", SHORT))
    assert run.used == 0
    return answer


@pytest.mark.parametrize("transport", ["in_process", "object_store", "cuda_ipc", "nixl"])
async def test_what_a_stage_computed_is_what_is_decoded(
    bench: Any, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    wanted = await (await bench()).ask("a", ids_of(70), SHORT)
    if transport != "in_process":
        monkeypatch.setitem(TRANSPORTS, transport, without_ray_and_gpu(transport))
    answer = await answer_by(bench, transport)
    assert answer.ids == wanted.ids
    assert answer.finish.report.handoff_bytes == wanted.finish.report.handoff_bytes


async def test_a_transport_from_outside_is_chosen_by_its_name(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    toy = Transport(
        lambda _config, _cache, sink: ToySender(memory, sink),
        lambda _config, cache, _thread: ToyReceiver(memory, cache),
    )
    monkeypatch.setitem(TRANSPORTS, "toy", toy)
    wanted = await (await bench()).ask("a", ids_of(70), SHORT)
    answer = await answer_by(bench, "toy")
    assert answer.ids == wanted.ids
    assert memory.released == ["a"] and not memory.exported, "released once, when its pages were free"


def test_a_transport_needs_a_name_that_is_known_and_what_it_works_with() -> None:
    config = HandoffConfig(transport="pigeons")
    with pytest.raises(
        ValueError, match=r"'pigeons' is unknown; known: object_store, cuda_ipc, nixl, in_process$"
    ):
        sender(config, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'pigeons' is unknown"):
        receiver(config, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in one process"):
        sender(HandoffConfig(transport="in_process"), None)  # type: ignore[arg-type]


# --- in process -----------------------------------------------------------------------------------------


class Picky:
    """Takes nothing of the request that it refuses."""

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


def test_tensors_are_copied_where_they_are_and_trouble_shows_at_the_end_of_the_chunk() -> None:
    sink = Picky()
    end = InProcessSender(sink)
    k, v = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16)
    for name in ("refused", "other"):
        assert end.announce(name, "decode:x", 4, 0, k, v) == 2 * 5 * 3 * 8 * 2
        end.first_logits(name, "decode:x", torch.ones(7))
    payload, logits = sink.taken
    assert isinstance(payload, DeviceKV) and payload.ready is None
    k_before, v_before = k.clone(), v.clone()
    k.zero_(), v.zero_()  # the stage's pages belong to another prompt by now
    assert torch.equal(payload.k_TGD, k_before) and torch.equal(payload.v_TGD, v_before)
    assert logits.dtype == "float32"
    end.end_chunk("other")()
    with pytest.raises(HandoffError, match=r"^decode:x did not take K/V: not here$"):
        end.end_chunk("refused")()
    end.forget("refused")
    end.end_chunk("refused")()
    with pytest.raises(HandoffError, match="cannot hand over"):
        end.announce("other", "decode:x", 0, 0, k, v[:1])


@pytest.mark.parametrize("payload", [None, DeviceKV(torch.zeros(31, 2, 16), torch.zeros(32, 2, 16))])
async def test_what_is_not_as_announced_fails_the_request(bench: Any, payload: Any) -> None:
    run = await bench(transport="in_process")
    await run.reserve("a", 70, 8)
    with pytest.raises(HandoffError, match="K/V of a, layer 0 at 0 is not two tensors as expected"):
        await run.engine.announce(KVAnnouncement("a", 0, 0, 32, payload))
    assert run.used == 5, "its door may have another group go on"
    answer = await run.collect(GenerateJob("a", SHORT))
    assert answer.finish.reason is FinishReason.NO_KV
    assert run.used == 0
