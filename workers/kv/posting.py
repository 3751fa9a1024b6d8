"""A stage's end of a hand-off by messages: what is announced is kept, and posted when it may be.

A layer's chunk of a big model is a message of its own; small ones wait for the next layers', because a
message costs every process it passes some hundred microseconds.

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..messages.stages import FirstLogits, KVAnnouncement
from .handoff import check_kv


class Post(Protocol):
    """Delivers messages to decode workers, by name, those of one thread in order. Never raises for one
    request's trouble but remembers it until `check`. Used from several threads."""

    def kv(self, decode_worker: str, announcement: KVAnnouncement) -> None: ...

    def logits(self, decode_worker: str, message: FirstLogits) -> None: ...

    def check(self, request_id: str) -> None:
        """Raises HandoffError if a message of this request is known to have failed."""

    def owed(self, request_id: str) -> bool:
        """Whether a decode worker still owes an answer to a message of this request, and may be reading what
        it was told of."""

    def forget(self, request_id: str) -> None: ...


class Packer(Protocol):
    """What is kept of a layer's chunk until it is posted, and what a message of several layers carries."""

    message_bytes: int
    """A message is posted once it stands for this much K/V, at the latest when its chunk ends."""
    lends: bool
    """Whether what is posted is read from the request's pages."""

    def keep(
        self, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor, pages: Sequence[int]
    ) -> tuple[Any, Any]:
        """What to keep, and the CUDA event after which it may be posted (None: at once)."""

    def payload(self, request_id: str, kept: Sequence[Any]) -> Any:
        """For an announcement of these layers of one chunk, in order."""

    def take_back(self, request_id: str) -> None:
        """What was lent of this request is about to be somebody else's: nothing posted so far may be taken
        any more."""


@dataclass(frozen=True)
class _Part:
    """A layer that was announced and is not posted yet."""

    decode_worker: str
    request_id: str
    layer: int
    start: int
    tokens: int
    bytes: int
    kept: Any
    ready: Any
    reading: int

    def continues(self, other: _Part) -> bool:
        """True if this is the next layer of the same chunk."""
        return (self.request_id, self.decode_worker, self.start, self.layer) == (
            other.request_id,
            other.decode_worker,
            other.start,
            other.layer + 1,
        )


class PostingSender:
    """A `handoff.Sender` over a packer and a post.

    With `background`, a thread of its own waits until a message's layers are ready and posts it, so that
    launching the next layers' kernels waits for neither; else the stage's thread does.
    """

    def __init__(self, packer: Packer, post: Post, *, background: bool) -> None:
        self._packer = packer
        self._post = post
        self._poster = ThreadPoolExecutor(1, "kv-post") if background else None
        self._posting: dict[str, list[Future[None]]] = {}
        """By request: what the posting thread has still to do for it."""
        self._message: list[_Part] = []
        """Layers of one chunk whose message is not full yet."""

    def announce(
        self,
        request_id: str,
        decode_worker: str,
        layer: int,
        start: int,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        pages: Sequence[int] = (),
        reading: int = 0,
    ) -> int:
        check_kv(k_TGD, v_TGD)
        kept, ready = self._packer.keep(start, k_TGD, v_TGD, pages)
        size = 2 * k_TGD.numel() * k_TGD.element_size()
        part = _Part(decode_worker, request_id, layer, start, k_TGD.shape[0], size, kept, ready, reading)
        if self._message and not part.continues(self._message[-1]):
            self._post_message()
        self._message.append(part)
        if sum(one.bytes for one in self._message) >= self._packer.message_bytes:
            self._post_message()
        return size

    def end_chunk(self, request_id: str) -> Callable[[], None]:
        self._post_message()
        self._in_order(request_id, _all_before)
        mine = self._posting.pop(request_id, [])
        self._posting[request_id] = [work for work in mine if not work.done()]
        return partial(self._settle, request_id, mine)

    def first_logits(
        self, request_id: str, decode_worker: str, logits_V: torch.Tensor, reading: int = 0
    ) -> None:
        self._post.logits(decode_worker, FirstLogits(request_id, logits_V.numpy(), reading))

    def holds(self, request_id: str) -> bool:
        posting = self._posting.get(request_id, [])
        begun = any(part.request_id == request_id for part in self._message)
        if self._packer.lends and (
            begun or any(not work.done() for work in posting) or self._post.owed(request_id)
        ):
            return True
        self._packer.take_back(request_id)
        self._posting.pop(request_id, None)
        return False

    def forget(self, request_id: str) -> None:
        self._message = [part for part in self._message if part.request_id != request_id]
        if self._poster is None:
            self._post.forget(request_id)
        else:
            self._poster.submit(self._post.forget, request_id)  # behind what is still to be posted

    def _settle(self, request_id: str, works: Sequence[Future[None]]) -> None:
        for work in works:
            work.result()
        self._post.check(request_id)

    def _in_order(self, request_id: str, work: Callable[..., None], *args: Any) -> None:
        """Here and now, or on the posting thread behind all before."""
        if self._poster is None:
            work(*args)
        else:
            self._posting.setdefault(request_id, []).append(self._poster.submit(work, *args))

    def _post_message(self) -> None:
        """Hand what was kept to whoever posts it."""
        parts, self._message = self._message, []
        if parts:
            self._in_order(parts[0].request_id, self._post_parts, parts)

    def _post_parts(self, parts: Sequence[_Part]) -> None:
        first, last = parts[0], parts[-1]
        if last.ready is not None:  # and with it those before: a stage launches in order
            last.ready.synchronize()
        payload = self._packer.payload(first.request_id, [part.kept for part in parts])
        announcement = KVAnnouncement(
            first.request_id,
            first.layer,
            first.start,
            first.tokens,
            payload,
            len(parts),
            first.reading,
        )
        self._post.kv(first.decode_worker, announcement)


def _all_before() -> None:
    """When this has run, what was to be posted or forgotten before it has been."""
