"""The hand-off through Ray's object store. A stage puts host copies and sends the decode actor their
reference. bfloat16 travels as uint16, since numpy has no such type."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch

from ...messages.stages import KVAnnouncement
from ...roles import KVReceiver
from ...settings import HandoffConfig
from ..cache import PagedKVCache
from ..host_copies import HostCopies, as_tensor
from .outbox import ActorOutbox, Delivery
from .protocols import HandoffError, UsePages, described, plain
from .stream import MessageSender


class ObjectStoreOutbox(ActorOutbox):
    def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None:
        if delivery.failure:
            return
        size = sum(x_TGD.nbytes for x_TGD in announcement.payload)
        try:
            reference = self._ray.put(announcement.payload)
        except Exception as error:  # the store may be full: this request's trouble, not the group's
            delivery.fail(f"the object store did not take K/V: {plain(error)}")
            return
        self._call(KVReceiver.announce, delivery, replace(announcement, payload=reference), size)


class ObjectStoreReader:
    def __init__(self, cache: PagedKVCache, thread: Executor) -> None:
        self._cache = cache
        self._thread = thread

    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        cache = self._cache
        pulled = await pull(announcement, cache.model_heads, cache.head_dim, cache.dtype)
        parts = {}
        for layer in layers:
            k_TGD, v_TGD = pulled[layer - announcement.layer]
            parts[layer] = k_TGD[:, cache.heads], v_TGD[:, cache.heads]
        with use_pages() as pages:
            if pages is None:
                return None
            await asyncio.get_running_loop().run_in_executor(
                self._thread, cache.write_layers, pages, announcement.start, parts
            )
        return sum(k_TGD.nbytes + v_TGD.nbytes for k_TGD, v_TGD in parts.values())


async def pull(
    announcement: KVAnnouncement, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return k_TGD, v_TGD of each layer on the host. They alias shared memory, so never write to them.

    Args:
        announcement: its payload is 2 · layers arrays, k then v of each layer, or an awaitable of them.
    Raises: HandoffError if the arrays are not [tokens, kv_heads, head_dim] of `dtype`, or their owner died.
    """
    payload = announcement.payload
    if inspect.isawaitable(payload):
        try:
            payload = await payload
        except Exception as error:
            raise HandoffError(f"{described(announcement)} is lost: {plain(error)}") from error
    wanted = 2 * announcement.layers
    if not isinstance(payload, tuple) or len(payload) != wanted:
        received = f"{len(payload)} things" if isinstance(payload, tuple) else type(payload).__name__
        raise HandoffError(f"{described(announcement)} holds {received}, not {wanted} arrays")
    shape = (announcement.tokens, kv_heads, head_dim)
    try:
        sides = [as_tensor(x, shape, dtype) for x in payload]
    except ValueError as error:
        raise HandoffError(
            f"{described(announcement)} has an array of {error}; prefill and decode workers must run the "
            "same model in the same dtype"
        ) from None
    return list(zip(sides[::2], sides[1::2], strict=True))


def sender(config: HandoffConfig, cache: PagedKVCache) -> MessageSender:
    """Beside a GPU a thread of its own sends; on a CPU, whose cores all compute, the stage's thread does."""
    outbox = ObjectStoreOutbox(config.max_unanswered_bytes, config.ack_timeout_s)
    return MessageSender(HostCopies(cache.device), outbox, background=cache.device.type == "cuda")


def reader(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> ObjectStoreReader:
    return ObjectStoreReader(cache, thread)
