"""The states in host memory, beside the pages there (`host_tier.py`).

A state is copied to host memory as soon as it is cached, since nobody changes it afterwards. A request that
finds a state only there gets a slot on the GPU, into which it is copied back. Only the event loop's thread
uses this module.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deltafront.workers.kv.pages.state_slots import StateSlots

MoveState = Callable[[int, int, bool], Awaitable[None]]
"""Runs `HostMemory.copy_state`."""


def state_share(pages: int, states: int) -> float:
    """Return the share of host memory for states: the share that they have on the GPU, of `pages` bytes of
    pages and `states` bytes of states. Pure."""
    return states / (states + pages)


@dataclass(frozen=True)
class StateBack:
    """A cached state that is copied from a slot in host memory into a slot on the GPU."""

    name: bytes
    source: int
    target: int


class HostStates:
    """The slots of states in host memory.

    Args:
        on_gpu: The slots on the GPU.
        slots: Number of states that fit into the host memory.

    Attributes:
        slots: The slots in host memory, from 1 on.
    """

    def __init__(self, on_gpu: StateSlots, slots: int, move: MoveState) -> None:
        self.slots = on_gpu.below = StateSlots(slots)
        self._on_gpu, self._move = on_gpu, move
        self._offered: deque[bytes] = deque()
        self._wake = asyncio.Event()
        on_gpu.on_cached = self._offer

    @property
    def busy(self) -> bool:
        """True while states wait to be copied to host memory."""
        return self._wake.is_set()

    def has(self, name: bytes) -> bool:
        """Return whether a state is cached here or on the GPU."""
        return name in self._on_gpu

    def _offer(self, name: bytes) -> None:
        self._offered.append(name)
        self._wake.set()

    def hold(self, back: StateBack) -> None:
        """Protect a state in host memory from eviction until `end`."""
        self.slots.incref(back.source)

    async def bring_back(self, back: StateBack) -> None:
        await self._move(back.target, back.source, True)

    def end(self, back: StateBack, *, failed: bool) -> None:
        """End a copy. A state that did not come back is cached nowhere any more."""
        self.slots.release([back.source])
        if failed:
            self._on_gpu.drop([back.name])

    async def run(self) -> None:
        """Copy cached states to host memory, until cancelled."""
        while True:
            await self._wake.wait()
            while self._offered:
                await self._keep(self._offered.popleft())
            self._wake.clear()

    async def _keep(self, name: bytes) -> None:
        if name in self.slots:
            return
        slot = self._on_gpu.find(name)
        if slot is None or not self.slots.free:
            return
        (kept,) = self.slots.take(1)
        try:
            await self._move(slot, kept, False)
            # Else the slot was written during the copy, even if an equal name is cached there again.
            if self._on_gpu.name(slot) is name:
                self.slots.cache(name, kept)
        finally:
            self.slots.release([kept])
