"""The hand-off of K/V as a stage and a decode worker see it: device tensors on one side, pages on the other.

What travels between them, an announcement's payload, is known to the two ends of one transport only: host
arrays, a handle to memory of a GPU, the tensors themselves.

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..messages.stages import FirstLogits, KVAnnouncement

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class HandoffError(Exception):
    """K/V could not be handed over, or what arrived is not what was announced."""


class Sender(Protocol):
    """A stage's end, made for its paged cache. `announce`, `end_chunk`, `holds` and `forget` are called from
    the stage's thread, the rest from the one that reports. One request's trouble is kept until a chunk is
    reported, so that a stage can finish the chunk and keep in step with its peers."""

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
        """Start handing over one layer's chunk; returns its bytes. k and v lie in the stage's pages: nobody
        writes to them before what `end_chunk` of the prompt's last chunk gives has returned, or the request
        is over. pages: the request's in the cache. reading: as in `PrefillJob`. Raises HandoffError for
        tensors that are no K/V."""

    def end_chunk(self, request_id: str) -> Callable[[], None]:
        """Nothing more of this chunk comes. What it returns is called once the device has computed the
        chunk: it returns when all of it is on its way, and raises HandoffError if anything of this request
        is known to have failed."""

    def first_logits(
        self, request_id: str, decode_worker: str, logits_V: torch.Tensor, reading: int = 0
    ) -> None:
        """Send the prompt's last logits, float32, on the host."""

    def forget(self, request_id: str) -> None:
        """The request is over: what its announcements end in no longer matters."""

    def holds(self, request_id: str) -> bool:
        """Whether a decode worker may still be reading the request's pages, so that they are nobody else's
        yet. To be asked again, until False: bounded by the worker's answer, death or `ack_timeout_s`."""


Hold = Callable[[], AbstractContextManager[Sequence[int] | None]]
"""`with hold() as pages`: a request's page table, and no page of it is given away before the end of the
block. None if the request is over: nothing may be written."""


class Receiver(Protocol):
    """A decode worker's end, made for one paged cache."""

    async def receive(self, announcement: KVAnnouncement, layers: Sequence[int], hold: Hold) -> int:
        """Write layers `layers` of what was announced into the pages; returns their bytes once everything
        that runs later sees them, or 0 if the request was over by then.

        Many run side by side. Only a worker that is closing cancels one, and then gives no page away.
        Raises HandoffError for what is lost or is not what was announced."""

    def release(self, request_id: str) -> None:
        """The request is over and its pages are free: let go of what is kept for it on the sender's side."""


class Sink(Protocol):
    """A decode worker in this process, as far as hand-off goes."""

    def announce(self, announcement: KVAnnouncement) -> None: ...

    def first_logits(self, message: FirstLogits) -> None: ...


def check_kv(k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> None:
    """Raises HandoffError unless these are keys and values of one chunk."""
    if k_TGD.shape != v_TGD.shape or k_TGD.dim() != 3 or k_TGD.dtype not in _FLOATS:
        shapes = f"k {tuple(k_TGD.shape)}, v {tuple(v_TGD.shape)}"
        raise HandoffError(f"cannot hand over {shapes} of {k_TGD.dtype}: expected two [tokens, heads, D]")


def described(announcement: KVAnnouncement) -> str:
    """What was announced, for messages."""
    last = announcement.layer + announcement.layers - 1
    layers = f"layer {last}" if announcement.layers == 1 else f"layers {announcement.layer} .. {last}"
    return f"K/V of {announcement.request_id}, {layers} at {announcement.start}"
