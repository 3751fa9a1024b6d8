"""K/V on its way from a prefill stage to the decode worker that reserved pages for it.

The stage announces, the decode worker pulls: `kv_sender.KVSender` makes host copies and gives them to a
`Post`; the message that arrives is a `KVAnnouncement`, which `KVReceiver.pull` turns into tensors. Two
posts: `InProcessPost` (arrays by reference) and `ObjectStorePost` (Ray's shared memory).

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension. bfloat16 travels as a uint16 view,
since numpy has no such type.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from ..messages import NAMESPACE, FirstLogits, KVAnnouncement

NUMPY_TYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
}


class HandoffError(Exception):
    """K/V could not be handed over, or what arrived is not what was announced."""


class Post(Protocol):
    """Delivers messages to decode workers, by name, in order. Never raises for one request's trouble but
    remembers it until `check`, so that a stage can finish the chunk and keep in step with its peers."""

    def kv(self, decode_worker: str, announcement: KVAnnouncement) -> None:
        """announcement.payload: host arrays [T, G, D], k then v of each layer."""

    def logits(self, decode_worker: str, message: FirstLogits) -> None: ...

    def check(self, request_id: str) -> None:
        """Raises HandoffError if a message of this request is known to have failed."""

    def forget(self, request_id: str) -> None: ...


class Sink(Protocol):
    """A decode worker in this process, as far as hand-off goes."""

    def announce(self, announcement: KVAnnouncement) -> None: ...

    def first_logits(self, message: FirstLogits) -> None: ...


class InProcessPost:
    """Hands the arrays themselves to a sink, on the stage's thread."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._failed: dict[str, str] = {}

    def kv(self, decode_worker: str, announcement: KVAnnouncement) -> None:
        try:
            self._sink.announce(announcement)
        except Exception as error:
            self._failed.setdefault(announcement.request_id, f"{decode_worker} did not take K/V: {error}")

    def logits(self, decode_worker: str, message: FirstLogits) -> None:
        try:
            self._sink.first_logits(message)
        except Exception as error:
            self._failed.setdefault(message.request_id, f"{decode_worker} did not take logits: {error}")

    def check(self, request_id: str) -> None:
        if request_id in self._failed:
            raise HandoffError(self._failed[request_id])

    def forget(self, request_id: str) -> None:
        self._failed.pop(request_id, None)


@dataclass(frozen=True)
class _Ack:
    reply: Any
    request_id: str
    decode_worker: str
    bytes: int


class ObjectStorePost:
    """Puts arrays into Ray's object store and sends the reference to the decode actor.

    Announcements are not waited for, but at most max_bytes of them are unanswered at a time, so that a
    slow decode worker slows prefill down instead of filling the store. A worker that does not answer for
    ack_timeout_s then counts as failed.
    """

    def __init__(self, max_bytes: int = 256 << 20, ack_timeout_s: float = 60.0) -> None:
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
        reference = self._ray.put(announcement.payload)
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
            self._fail(message.request_id, decode_worker, error)
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
            self._fail(ack.request_id, ack.decode_worker, error)

    def _fail(self, request_id: str, decode_worker: str, error: Exception) -> None:
        self._actors.pop(decode_worker, None)
        if request_id in self._failed and self._failed[request_id] is None:
            self._failed[request_id] = f"{decode_worker} did not take K/V: {_plain(error)}"


def _plain(error: Exception) -> str:
    """One line: the cause inside Ray's wrapper, without its traceback."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__


class KVReceiver:
    """A decode worker's end: what is announced, as tensors over the sender's memory (read only)."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._shape = (kv_heads, head_dim)
        self._dtype = dtype

    async def pull(self, announcement: KVAnnouncement) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """k_TGD, v_TGD of each layer, on the host. They alias shared memory: copy them into pages, never
        write to them.

        Raises HandoffError if the arrays are not [tokens, kv_heads, head_dim] of the model's dtype, or if
        their owner died.
        """
        payload = announcement.payload
        if inspect.isawaitable(payload):
            try:
                payload = await payload
            except Exception as error:
                raise HandoffError(f"{self._what(announcement)} is lost: {_plain(error)}") from error
        wanted = 2 * announcement.layers
        if not isinstance(payload, tuple) or len(payload) != wanted:
            found = f"{len(payload)} things" if isinstance(payload, tuple) else type(payload).__name__
            raise HandoffError(f"{self._what(announcement)} holds {found}, not {wanted} arrays")
        sides = [self._tensor(announcement, "kv"[n % 2], x) for n, x in enumerate(payload)]
        return list(zip(sides[::2], sides[1::2], strict=True))

    def _tensor(self, announcement: KVAnnouncement, name: str, array: Any) -> torch.Tensor:
        expected = (announcement.tokens, *self._shape)
        wanted = np.dtype(NUMPY_TYPES[self._dtype])
        if not isinstance(array, np.ndarray) or array.shape != expected or array.dtype != wanted:
            found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
            raise HandoffError(
                f"{self._what(announcement)}: {name} is {found}, expected {wanted} {expected}; prefill and "
                "decode workers must run the same model in the same dtype"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the object store's arrays are read only
            x = torch.from_numpy(array)
        return x.view(self._dtype) if self._dtype == torch.bfloat16 else x

    @staticmethod
    def _what(announcement: KVAnnouncement) -> str:
        last = announcement.layer + announcement.layers - 1
        layers = f"layer {last}" if announcement.layers == 1 else f"layers {announcement.layer} .. {last}"
        return f"K/V of {announcement.request_id}, {layers} at {announcement.start}"
