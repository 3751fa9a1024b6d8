"""The stage's side of `nixl` for tensor-parallel decode workers: gathers each rank's KV heads.

A row of a stage's pages has the heads of all ranks. If a rank read its heads from there, it would need a
descriptor for each token, layer and side. So the stage copies each message into a slot of registered memory,
where the heads of a rank are contiguous. A slot is used again once the decode worker has answered, or the
answer has timed out. A reader that is too late detects the reuse from the slot's lease.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from deltafront.workers.kv.cache import PagedKVCache, Sides, token_bytes
from deltafront.workers.kv.handoff.exported_pages import Runs
from deltafront.workers.kv.handoff.nixl_agent import Agent, RegisteredWords, Span, memory_of
from deltafront.workers.kv.handoff.outbox import ActorOutbox, Delivery
from deltafront.workers.kv.peer_memory import launched
from deltafront.workers.messages.stages import KVAnnouncement
from deltafront.workers.roles import KVReceiver

MESSAGE_BYTES = 64 << 20
SLOTS = 5


@dataclass(frozen=True)
class Gathered:
    """Layout of a message in a slot. Its KV is ordered by rank, then layer, then side, then token.

    Attributes:
        address: The slot's address at the stage.
        row_bytes: Bytes of one token in each side, with the heads of all ranks.
    """

    address: int
    ranks: int
    layers: int
    tokens: int
    row_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.layers * self.tokens * sum(self.row_bytes)

    def part(self, rank: int, layer: int, side: int) -> Span:
        """Return the address and bytes of one rank's part of a side. `layer` counts from the message's first
        layer."""
        mine = [size // self.ranks for size in self.row_bytes]
        start = self.tokens * ((rank * self.layers + layer) * sum(mine) + sum(mine[:side]))
        return self.address + start, self.tokens * mine[side]

    def reads(
        self, rank: int, layer: int, side: int, target: int, rows: Runs
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (address at the stage, address at the decode rank, bytes) for each run of rows.

        Args:
            target: Address of row 0 of the side in the decode rank's cache, which has its own heads only.
            rows: Runs (first row, count) of that cache which receive the message's tokens, in their order.
        """
        source, size = self.part(rank, layer, side)[0], self.row_bytes[side] // self.ranks
        for row, count in rows:
            yield source, target + row * size, count * size
            source += count * size


@dataclass(frozen=True)
class SlotLease:
    """A slot's lease: the word at `span` in the stage's memory equals `serial` while the slot has the
    message."""

    span: Span
    serial: int


class GatherSlots:
    """Registered memory for gathered messages.

    Args:
        ranks: Tensor-parallel ranks of each decode worker.
        slot_bytes: Size of a slot: the maximum bytes of a message.
    """

    def __init__(
        self, cache: PagedKVCache, agent: Agent, ranks: int, slot_bytes: int, slots: int = SLOTS
    ) -> None:
        self.slot_bytes, self.slots = slot_bytes, slots
        self._cache, self._ranks = cache, ranks
        self._agent = agent  # other processes can reach it only while it lives
        self._memory_SB = torch.empty((slots, slot_bytes), dtype=torch.uint8, device=cache.device)
        memory_of(cache.device).register(agent, [(self._memory_SB.data_ptr(), self._memory_SB.nbytes)])
        self._leases, self._serials = RegisteredWords(agent, slots), itertools.count(1)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)

    @torch.inference_mode()
    def gather(self, layers: Sequence[Sides]) -> tuple[Gathered, SlotLease, Callable[[], None]]:
        """Copy a message's layers into a free slot, and wait until they are copied.

        Returns:
            The layout of the message, the slot's lease, and a function that frees the slot.
        """
        slot = self._free.get_nowait()  # `GatheringOutbox` leaves one free
        self._leases[slot] = next(self._serials)  # before anything is overwritten
        row_bytes = tuple(prod(side_T.shape[1:]) * side_T.element_size() for side_T in layers[0])
        memory_B = self._memory_SB[slot]
        tokens = layers[0][0].shape[0]
        gathered = Gathered(memory_B.data_ptr(), self._ranks, len(layers), tokens, row_bytes)
        with self._cache.moving():
            for layer, sides_T in enumerate(layers):
                for side, side_T in enumerate(sides_T):
                    for rank, own_T in enumerate(side_T.chunk(self._ranks, dim=1)):
                        address, size = gathered.part(rank, layer, side)
                        start = address - gathered.address
                        memory_B[start : start + size].view(own_T.dtype).view(own_T.shape).copy_(own_T)
        lease = SlotLease(self._leases.span(slot), self._leases[slot])
        return gathered, lease, partial(self._free.put, slot)


class GatherExporter:
    """`KVExporter` and `KVExport` for tensor-parallel decode workers over NIXL. Passes KV through unchanged;
    `GatheringOutbox` then packs each rank's heads into staging slots. One instance serves all requests,
    because it keeps no state.
    """

    message_bytes = MESSAGE_BYTES
    in_place = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def export(self, pages: Sequence[int]) -> GatherExporter:
        return self

    def layer(self, start: int, sides_T: Sides) -> tuple[Sides, Any]:
        return sides_T, launched(self._device)

    def payload(self, layers: Sequence[Sides]) -> tuple[Sides, ...]:
        return tuple(layers)

    def revoke(self) -> bool:
        """Return True: decode workers read slots, never the stage's pages."""
        return True


class GatheringOutbox(ActorOutbox):
    """Copies each message into a slot of `GatherSlots` before sending it. After each message it waits for
    answers until a slot is free.

    Args:
        described: Makes an announcement's payload from the message's layout and the slot's lease.
    """

    def __init__(
        self, slots: GatherSlots, described: Callable[[Gathered, SlotLease], Any], ack_timeout_s: float
    ) -> None:
        super().__init__((slots.slots - 1) * slots.slot_bytes, ack_timeout_s)
        self._slots, self._described = slots, described

    def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None:
        if delivery.failure:
            return
        gathered, lease, give_back = self._slots.gather(announcement.payload)
        message = replace(announcement, payload=self._described(gathered, lease))
        self._call(KVReceiver.announce, delivery, message, self._slots.slot_bytes, give_back)


def slot_bytes(cache: PagedKVCache, chunk_tokens: int) -> int:
    """Return the maximum bytes of a message. A message is sent after the layer that brings it to
    `MESSAGE_BYTES`, or after the last layer."""
    layer = chunk_tokens * token_bytes(cache.kv_heads, cache.head_dim, cache.dtype)
    return min(MESSAGE_BYTES + layer, len(cache.layers) * layer)
