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
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..messages.stages import FirstLogits, KVAnnouncement
from ..messages.states import NAMESPACE
from ..settings import HandoffConfig
from .cache import PagedKVCache
from .handoff import HandoffError, Hold, Sink, described
from .host_copies import NUMPY_TYPES, HostCopySender


@dataclass(frozen=True)
class _Ack:
    reply: Any
    request_id: str
    decode_worker: str
    bytes: int


class ObjectStorePost:
    """A `host_copies.Post`: puts arrays into Ray's object store and sends the reference to the decode actor.

    Announcements are not waited for, but at most max_bytes of them are unanswered at a time, so that a
    slow decode worker slows prefill down instead of filling the store. A worker that does not answer for
    ack_timeout_s then counts as failed.
    """

    def __init__(self, max_bytes: int, ack_timeout_s: float) -> None:
        import ray

        self._ray = ray
        self._max_bytes = max_bytes
        self._ack_timeout_s = ack_timeout_s
        self._actors: dict[str, Any] = {}
        self._pending: deque[_Ack] = deque()
        self._pending_bytes = 0
        self._failed: dict[str, str | None] = {}
        """Live requests: why the hand-off failed, None while it has not."""

    def kv(self, decode_worker: str, announcement: KVAnnouncement) -> None:
        if self._dead(announcement.request_id):
            return
        size = sum(x_TGD.nbytes for x_TGD in announcement.payload)
        try:
            reference = self._ray.put(announcement.payload)
        except Exception as error:  # the store may be full: this request's trouble, not the group's
            self._fail(announcement.request_id, f"the object store did not take K/V: {plain(error)}")
            return
        self._call("announce", decode_worker, replace(announcement, payload=reference), size)

    def logits(self, decode_worker: str, message: FirstLogits) -> None:
        if not self._dead(message.request_id):
            self._call("first_logits", decode_worker, message, message.logits.nbytes)

    def check(self, request_id: str) -> None:
        if self._pending:
            replies = [ack.reply for ack in self._pending]
            ready, _ = self._ray.wait(replies, num_returns=len(replies), timeout=0, fetch_local=False)
            answered = set(ready)
            done = [ack for ack in self._pending if ack.reply in answered]
            self._pending = deque(ack for ack in self._pending if ack.reply not in answered)
            for ack in done:
                self._settle(ack)
        reason = self._failed.get(request_id)
        if reason is not None:
            raise HandoffError(reason)

    def forget(self, request_id: str) -> None:
        self._failed.pop(request_id, None)

    def _dead(self, request_id: str) -> bool:
        return self._failed.setdefault(request_id, None) is not None

    def _call(self, method: str, decode_worker: str, message: Any, size: int) -> None:
        try:
            if decode_worker not in self._actors:
                self._actors[decode_worker] = self._ray.get_actor(decode_worker, namespace=NAMESPACE)
            reply = getattr(self._actors[decode_worker], method).remote(message)
        except Exception as error:
            self._not_taken(message.request_id, decode_worker, error)
            return
        self._pending.append(_Ack(reply, message.request_id, decode_worker, size))
        self._pending_bytes += size
        while self._pending_bytes > self._max_bytes and len(self._pending) > 1:
            self._settle(self._pending.popleft())

    def _settle(self, ack: _Ack) -> None:
        self._pending_bytes -= ack.bytes
        try:
            self._ray.get(ack.reply, timeout=self._ack_timeout_s)
        except Exception as error:
            self._not_taken(ack.request_id, ack.decode_worker, error)

    def _not_taken(self, request_id: str, decode_worker: str, error: Exception) -> None:
        self._actors.pop(decode_worker, None)
        self._fail(request_id, f"{decode_worker} did not take K/V: {plain(error)}")

    def _fail(self, request_id: str, reason: str) -> None:
        if request_id in self._failed and self._failed[request_id] is None:
            self._failed[request_id] = reason


def plain(error: Exception) -> str:
    """One line: the cause inside Ray's wrapper, without its traceback."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__


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


def sender(config: HandoffConfig, device: torch.device, sink: Sink | None) -> HostCopySender:
    return HostCopySender(ObjectStorePost(config.max_unanswered_bytes, config.ack_timeout_s), device)


def receiver(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> ObjectStoreReceiver:
    return ObjectStoreReceiver(cache, thread)
