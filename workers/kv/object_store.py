"""The hand-off through Ray's object store: shared memory on one node, a copy over the network between nodes.

A stage makes host copies (`host_copies`), puts them and sends the decode actor the reference; the decode
worker awaits it and copies from there into its pages.

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension. bfloat16 travels as a uint16 view,
since numpy has no such type.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..messages.stages import KVAnnouncement
from ..roles import KVTaker
from ..settings import HandoffConfig
from .actor_post import ActorPost, plain
from .cache import PagedKVCache
from .handoff import HandoffError, Hold, Sink, described
from .host_copies import NUMPY_TYPES, HostCopies
from .posting import PostingSender


class ObjectStorePost(ActorPost):
    """Puts arrays into Ray's object store and sends the reference to the decode actor."""

    def kv(self, decode_worker: str, announcement: KVAnnouncement) -> None:
        if self._dead(announcement.request_id):
            return
        size = sum(x_TGD.nbytes for x_TGD in announcement.payload)
        try:
            reference = self._ray.put(announcement.payload)
        except Exception as error:  # the store may be full: this request's trouble, not the group's
            self._fail(announcement.request_id, f"the object store did not take K/V: {plain(error)}")
            return
        self._call(KVTaker.announce, decode_worker, replace(announcement, payload=reference), size)


class ObjectStoreReceiver:
    """Copies what lies in the object store into pages. Nothing outlives `receive`."""

    def __init__(self, cache: PagedKVCache, thread: Executor) -> None:
        self._cache = cache
        self._thread = thread

    async def receive(self, announcement: KVAnnouncement, layers: Sequence[int], hold: Hold) -> int:
        cache = self._cache
        pulled = await pull(announcement, cache.kv_heads, cache.head_dim, cache.dtype)
        parts = {layer: pulled[layer - announcement.layer] for layer in layers}
        with hold() as pages:
            if pages is None:
                return 0
            await asyncio.get_running_loop().run_in_executor(
                self._thread, cache.write_layers, pages, announcement.start, parts
            )
        return sum(k_TGD.nbytes + v_TGD.nbytes for k_TGD, v_TGD in parts.values())

    def release(self, request_id: str) -> None:
        """Nothing is kept: the reference goes with the announcement."""


async def pull(
    announcement: KVAnnouncement, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """k_TGD, v_TGD of each layer, on the host. They alias shared memory: copy them into pages, never write
    to them. The payload: 2 · layers arrays, k then v of each layer, or something that is awaited for them.

    Raises HandoffError if the arrays are not [tokens, kv_heads, head_dim] of `dtype`, or if their owner
    died.
    """
    payload = announcement.payload
    if inspect.isawaitable(payload):
        try:
            payload = await payload
        except Exception as error:
            raise HandoffError(f"{described(announcement)} is lost: {plain(error)}") from error
    wanted = 2 * announcement.layers
    if not isinstance(payload, tuple) or len(payload) != wanted:
        found = f"{len(payload)} things" if isinstance(payload, tuple) else type(payload).__name__
        raise HandoffError(f"{described(announcement)} holds {found}, not {wanted} arrays")
    shape = (announcement.tokens, kv_heads, head_dim)
    sides = [_tensor(announcement, "kv"[n % 2], x, shape, dtype) for n, x in enumerate(payload)]
    return list(zip(sides[::2], sides[1::2], strict=True))


def _tensor(
    announcement: KVAnnouncement, name: str, array: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    wanted = np.dtype(NUMPY_TYPES[dtype])
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != wanted:
        found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
        raise HandoffError(
            f"{described(announcement)}: {name} is {found}, expected {wanted} {shape}; prefill and "
            "decode workers must run the same model in the same dtype"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the object store's arrays are read only
        x = torch.from_numpy(array)
    return x.view(dtype) if dtype == torch.bfloat16 else x


def sender(config: HandoffConfig, cache: PagedKVCache, sink: Sink | None) -> PostingSender:
    """Posts from a thread of its own beside a GPU; on the CPU, whose cores all compute, from the stage's."""
    post = ObjectStorePost(config.max_unanswered_bytes, config.ack_timeout_s)
    return PostingSender(HostCopies(cache.device), post, background=cache.device.type == "cuda")


def receiver(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> ObjectStoreReceiver:
    return ObjectStoreReceiver(cache, thread)
