"""A stage that exports its pages, and a decode worker that copies them, with each transport. Devices, network
and Ray are stand-ins. If NIXL is installed, `nixl` also runs with the real NIXL, inside this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.handoff.cuda_ipc import CudaIpcExporter, CudaIpcReader
from deltafront.workers.kv.handoff.nixl import NixlExporter, NixlReader
from deltafront.workers.kv.handoff.nixl_agent import Agent, new_agent
from deltafront.workers.kv.handoff.outbox import ActorOutbox
from deltafront.workers.kv.handoff.protocols import Destination, KVReader
from deltafront.workers.kv.handoff.stream import MessageSender, MessageStream
from deltafront.workers.messages.stages import KVAnnouncement

from .fake_nixl import Fabric
from .test_object_store import FakeRay

HEADS, DIM = 2, 8


class Neighbours:
    """A host's memory and processes. Mapped memory is a view, as on a GPU."""

    def __init__(self) -> None:
        self.home = "a host"
        self.exported: dict[int, torch.Tensor] = {}
        self.opened: list[int] = []
        self.gone: dict[int, list[Callable[[], None]]] = {}
        self.dead = False

    def export(self, x: torch.Tensor) -> int:
        self.exported[len(self.exported)] = x
        return len(self.exported) - 1

    def open(self, handle: int) -> torch.Tensor:
        if self.dead:
            raise RuntimeError("invalid resource handle\nand a traceback")
        self.opened.append(handle)
        return self.exported[handle][:]

    def mark(self) -> None:
        """Return None: everything is computed immediately."""

    def when_gone(self, pid: int, on_end: Callable[[], None]) -> None:
        self.gone.setdefault(pid, []).append(on_end)

    def end(self, pid: int) -> None:
        self.dead = True
        for on_end in self.gone.pop(pid):
            on_end()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ByCudaIpc:
    """Makes the stage's and the decode worker's side of a CUDA IPC hand-off."""

    def __init__(self) -> None:
        self.peers = Neighbours()

    def exporter(self, cache: PagedKVCache, lease_s: float, clock: Callable[[], float]) -> Any:
        return CudaIpcExporter(cache, self.peers, lease_s, clock)

    def reader(self, cache: PagedKVCache, thread: Executor, clock: Callable[[], float]) -> KVReader:
        return CudaIpcReader(cache, thread, self.peers, clock)

    @property
    def touched(self) -> bool:
        """Return whether a decode worker has mapped a stage's memory."""
        return bool(self.peers.opened)


class ByNixl:
    """Makes the stage's and the decode worker's side of a NIXL hand-off, with a stand-in for NIXL."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.agent: Callable[[], Agent] = self.fabric.agent

    def exporter(self, cache: PagedKVCache, _lease_s: float, _clock: Callable[[], float]) -> Any:
        return NixlExporter(cache, self.agent())

    def reader(self, cache: PagedKVCache, thread: Executor, _clock: Callable[[], float]) -> KVReader:
        return NixlReader(cache, thread, self.agent)

    @property
    def touched(self) -> bool:
        return self.fabric.begun > 0


class ByRealNixl(ByNixl):
    """Makes the two ends of a hand-off with real NIXL agents of this process. Needs the package."""

    def __init__(self) -> None:
        super().__init__()
        self.agent = new_agent


Way = ByCudaIpc | ByNixl


class Bench:
    """A stage's cache, its sender, and a decode worker's end. `deliver` connects them. Unwritten KV is NaN on
    both sides."""

    def __init__(self, way: Way, lease_s: float = 60.0, dtype: torch.dtype = torch.float32) -> None:
        self.way, self.clock, self.ray = way, Clock(), FakeRay()
        self.stage = PagedKVCache(range(3, 6), HEADS, DIM, 20, dtype, "cpu")
        self.worker = PagedKVCache(range(8), HEADS, DIM, 30, dtype, "cpu")
        for cache in (self.stage, self.worker):
            for side in (cache.k_LPSGD, cache.v_LPSGD):
                side.fill_(torch.nan)
        self.outbox = ActorOutbox(1 << 20, lease_s, self.clock)
        self.outbox._ray = self.ray
        self.exporter = way.exporter(self.stage, lease_s, self.clock)
        self.sender = MessageSender(self.exporter, self.outbox, background=False)
        self.streams: dict[str, MessageStream] = {}
        self.reader: Any = way.reader(self.worker, ThreadPoolExecutor(1), self.clock)
        self.held = 0

    def stream(self, name: str, pages: Sequence[int]) -> MessageStream:
        """Return the request's stream, opened with its pages."""
        if name not in self.streams:
            to = Destination(request_id=name, decode_worker="decode:x", pages=pages)
            self.streams[name] = self.sender.open(to)
        return self.streams[name]

    def in_use(self, name: str) -> bool:
        """Return whether the pages of an ended request are not free yet."""
        if not self.streams[name].close():
            return True
        del self.streams[name]
        return False

    def announce(self, pages: Sequence[int], start: int, tokens: int, name: str = "r") -> dict[int, Any]:
        """Write a chunk into the stage's pages and announce it, layer by layer."""
        made, stream = {}, self.stream(name, pages)
        for layer in self.stage.layers:
            k, v = torch.randn(2, tokens, HEADS, DIM).to(self.stage.dtype)
            self.stage.write(layer, torch.tensor(pages), start, k, v)
            size = stream.put(layer, start, k, v)
            assert size == 2 * tokens * HEADS * DIM * self.stage.dtype.itemsize
            made[layer] = k, v
        stream.end_chunk()()
        return made

    async def deliver(self, message: KVAnnouncement, pages: Sequence[int] | None) -> int:
        """Deliver announcements to the decode worker. `held`: deliveries that keep their pages in use."""

        @contextmanager
        def use_pages() -> Iterator[Sequence[int] | None]:
            self.held += 1
            try:
                yield pages
            finally:
                self.held -= 1

        layers = range(message.layer, message.layer + message.layers)
        moved: int = await self.reader.read(message, layers, use_pages)
        return moved

    def taken(self, pages: Sequence[int], layer: int, tokens: int) -> tuple[torch.Tensor, ...]:
        k, v = self.worker.gather(layer, torch.tensor(pages), tokens)
        return k.transpose(0, 1), v.transpose(0, 1)

    def written(self) -> int:
        """Return the rows of the worker's cache that are not NaN in any layer and tensor."""
        sides = torch.stack((self.worker.k_LPSGD, self.worker.v_LPSGD))
        return int((~sides.isnan()).any(-1).any(-1).sum())
