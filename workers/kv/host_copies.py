"""A stage's end of a hand-off through host memory: device to host, then to a post that delivers.

A layer's chunk of a big model is a message of its own; small ones wait for the next layers', because a
message costs every process it passes some hundred microseconds.

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..messages.stages import FirstLogits, KVAnnouncement
from .handoff import check_kv

NUMPY_TYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
}
MESSAGE_BYTES = 4 << 20
"""A message is posted once it holds this much K/V, at the latest when its chunk ends."""


class Post(Protocol):
    """Delivers messages to decode workers, by name, in order. Never raises for one request's trouble but
    remembers it until `check`."""

    def kv(self, decode_worker: str, announcement: KVAnnouncement) -> None:
        """announcement.payload: host arrays [T, G, D], k then v of each layer."""

    def logits(self, decode_worker: str, message: FirstLogits) -> None: ...

    def check(self, request_id: str) -> None:
        """Raises HandoffError if a message of this request is known to have failed."""

    def forget(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class _Staged:
    """Host copies under way; `landed` (a CUDA event) is None where they are there already."""

    decode_worker: str
    request_id: str
    layer: int
    start: int
    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    landed: Any

    @property
    def bytes(self) -> int:
        return self.k_TGD.nbytes + self.v_TGD.nbytes

    def continues(self, other: _Staged) -> bool:
        """True if this is the next layer of the same chunk."""
        return (self.request_id, self.decode_worker, self.start, self.layer) == (
            other.request_id,
            other.decode_worker,
            other.start,
            other.layer + 1,
        )


class HostCopySender:
    """A `handoff.Sender` over a post.

    On CUDA the copies run on a side stream into pinned memory while the layer computes, and a thread of
    its own posts them as they land, so that launching the next layers' kernels does not wait for the post.
    On the CPU, whose cores all compute, the stage's thread posts. background: to choose otherwise.
    """

    def __init__(self, post: Post, device: torch.device | str, *, background: bool | None = None) -> None:
        self._post = post
        cuda = torch.device(device).type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        own_thread = cuda if background is None else background
        self._poster = ThreadPoolExecutor(1, "kv-post") if own_thread else None
        self._posting: dict[str, list[Future[None]]] = {}
        """By request: what the posting thread has still to do, one chunk after another."""
        self._ended: dict[str, int] = {}
        """How many of these belong to chunks that have ended."""
        self._message: list[_Staged] = []
        """Layers of one chunk that have landed and are not posted yet. The posting thread's."""

    def announce(
        self,
        request_id: str,
        decode_worker: str,
        layer: int,
        start: int,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
    ) -> int:
        check_kv(k_TGD, v_TGD)
        k_host, v_host, landed = self._to_host(k_TGD, v_TGD)
        staged = _Staged(decode_worker, request_id, layer, start, k_host, v_host, landed)
        self._in_order(request_id, self._add, staged)
        return 2 * k_TGD.numel() * k_TGD.element_size()

    def first_logits(self, request_id: str, decode_worker: str, logits_V: torch.Tensor) -> None:
        """Synchronises with the device."""
        array = logits_V.detach().float().cpu().numpy()
        self._in_order(request_id, self._post.logits, decode_worker, FirstLogits(request_id, array))

    def finish_chunk(self, request_id: str, *, last: bool) -> None:
        """Post what is still being copied. Raises HandoffError if anything of this request failed so far.

        With a posting thread, waits for the chunks before this one, and for this one if it is the `last`:
        so a chunk is posted while the next is computed, and no more than two of a request are held.
        """
        self._in_order(request_id, self._post_message)
        self._in_order(request_id, self._post.check, request_id)
        posting = self._posting.get(request_id, [])
        due = len(posting) if last else self._ended.get(request_id, 0)
        self._posting[request_id] = posting[due:]
        self._ended[request_id] = len(posting) - due
        for work in posting[:due]:
            work.result()

    def forget(self, request_id: str) -> None:
        """The request is over: what its announcements end in no longer matters."""
        self._in_order(request_id, self._drop, request_id)
        self._posting.pop(request_id, None)
        self._ended.pop(request_id, None)

    def _in_order(self, request_id: str, work: Callable[..., None], *args: Any) -> None:
        """Here and now, or on the posting thread behind all before; `finish_chunk` raises what it raises."""
        if self._poster is None:
            work(*args)
        else:
            self._posting.setdefault(request_id, []).append(self._poster.submit(work, *args))

    def _to_host(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if self._stream is None:
            return k.detach().contiguous(), v.detach().contiguous(), None
        self._stream.wait_stream(torch.cuda.current_stream(k.device))
        with torch.cuda.stream(self._stream):
            copies = []
            for x in (k, v):
                x.record_stream(self._stream)
                host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
                copies.append(host.copy_(x.detach(), non_blocking=True))
            landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            landed.record(self._stream)
        return copies[0], copies[1], landed

    def _add(self, staged: _Staged) -> None:
        if staged.landed is not None:
            staged.landed.synchronize()
        if self._message and not staged.continues(self._message[-1]):
            self._post_message()
        self._message.append(staged)
        if sum(part.bytes for part in self._message) >= MESSAGE_BYTES:
            self._post_message()

    def _post_message(self) -> None:
        if not self._message:
            return
        first, layers = self._message[0], len(self._message)
        payload = tuple(as_numpy(x) for part in self._message for x in (part.k_TGD, part.v_TGD))
        self._message = []
        tokens = first.k_TGD.shape[0]
        announcement = KVAnnouncement(first.request_id, first.layer, first.start, tokens, payload, layers)
        self._post.kv(first.decode_worker, announcement)

    def _drop(self, request_id: str) -> None:
        self._message = [part for part in self._message if part.request_id != request_id]
        self._post.forget(request_id)


def as_numpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor of the host without copying; bfloat16 as a uint16 view."""
    array: np.ndarray[Any, Any] = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return array
