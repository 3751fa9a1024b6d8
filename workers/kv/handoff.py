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
    """A stage's end, used from the stage's thread. One request's trouble is kept until `finish_chunk`, so
    that a stage can finish the chunk and keep in step with its peers."""

    def announce(
        self,
        request_id: str,
        decode_worker: str,
        layer: int,
        start: int,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
    ) -> int:
        """Start handing over one layer's chunk; returns its bytes. k and v lie in the stage's pages: nobody
        writes to them before the `finish_chunk` of the prompt's last chunk has returned, or the request is
        over. Raises HandoffError for tensors that are no K/V."""

    def first_logits(self, request_id: str, decode_worker: str, logits_V: torch.Tensor) -> None:
        """Send the prompt's last logits."""

    def finish_chunk(self, request_id: str, *, last: bool) -> None:
        """The chunk was computed: send what is left of it. Raises HandoffError if anything of this request
        is known to have failed; with `last`, everything is on its way when this returns."""

    def forget(self, request_id: str) -> None:
        """The request is over: what its announcements end in no longer matters."""


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
