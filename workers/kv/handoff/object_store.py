"""KV hand-off through Ray's object store: a stage stores host copies and sends the decode actor an ObjectRef.

bfloat16 is sent as uint16, since numpy has no bfloat16.
"""

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch

from deltafront.workers.kv.cache import PagedKVCache, Sides, row_forms
from deltafront.workers.kv.handoff.outbox import MAX_UNANSWERED_BYTES, ActorOutbox, Delivery
from deltafront.workers.kv.handoff.protocols import HandoffError, UsePages, described, plain
from deltafront.workers.kv.handoff.stream import MessageSender
from deltafront.workers.kv.host_copies import HostCopies, as_tensor
from deltafront.workers.messages.stages import KVAnnouncement
from deltafront.workers.roles import KVReceiver
from deltafront.workers.settings import HandoffConfig


class ObjectStoreOutbox(ActorOutbox):
    def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None:
        if delivery.failure:
            return
        size = sum(x_TGD.nbytes for x_TGD in announcement.payload)
        try:
            reference = self._ray.put(announcement.payload)
        except Exception as error:  # a full object store fails this request, not the prefill group
            delivery.fail(f"the object store did not take KV: {plain(error)}")
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
            parts[layer] = tuple(x[:, cache.heads] for x in pulled[layer - announcement.layer])
        with use_pages() as pages:
            if pages is None:
                return None
            await asyncio.get_running_loop().run_in_executor(
                self._thread, cache.write_layers, pages, announcement.start, parts
            )
        return sum(x.nbytes for sides_T in parts.values() for x in sides_T)


async def pull(announcement: KVAnnouncement, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Sides]:
    """Return each layer's KV as host tensors. They alias shared memory, so never write to them.

    Args:
        announcement: Its payload is a tuple with every layer's KV as arrays, or an awaitable of this tuple.
        dtype: The dtype of k and v in the cache.
    Raises:
        HandoffError: The arrays have other shapes or dtypes, or their owner has died.
    """
    payload = announcement.payload
    if inspect.isawaitable(payload):
        try:
            payload = await payload
        except Exception as error:
            raise HandoffError(f"{described(announcement)} is lost: {plain(error)}") from error
    forms = row_forms(kv_heads, head_dim, dtype)
    wanted = len(forms) * announcement.layers
    if not isinstance(payload, tuple) or len(payload) != wanted:
        received = f"{len(payload)} things" if isinstance(payload, tuple) else type(payload).__name__
        raise HandoffError(f"{described(announcement)} holds {received}, not {wanted} arrays")
    try:
        sides = [
            as_tensor(x, (announcement.tokens, *shape), kind)
            for x, (shape, kind) in zip(payload, forms * announcement.layers, strict=True)
        ]
    except ValueError as error:
        raise HandoffError(
            f"{described(announcement)} has an array of {error}; prefill and decode workers must run the "
            "same model in the same dtype"
        ) from None
    return [tuple(sides[n : n + len(forms)]) for n in range(0, wanted, len(forms))]


def sender(config: HandoffConfig, cache: PagedKVCache) -> MessageSender:
    """Make a stage's sender. On a GPU a separate thread sends; on a CPU, where all cores compute, the stage's
    own thread does."""
    outbox = ObjectStoreOutbox(MAX_UNANSWERED_BYTES, config.ack_timeout_s)
    return MessageSender(HostCopies(cache.device), outbox, background=cache.device.type == "cuda")


def reader(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> ObjectStoreReader:
    return ObjectStoreReader(cache, thread)
