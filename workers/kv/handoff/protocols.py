"""The two sides of a hand-off: a stage puts tensors into a stream, and a decode worker reads them into pages.

Only the two ends of a transport know its payload.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from deltafront.kernels.layers.kv_int8 import BYTES
from deltafront.workers.messages.stages import KVAnnouncement

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class HandoffError(Exception):
    """KV could not be handed over, or it is not what was announced."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The destination of one attempt's KV. `pages` are the request's pages in the stage's cache, in token
    order.
    """

    request_id: str
    decode_worker: str
    attempt: int = 0
    pages: Sequence[int] = ()


class KVStream(Protocol):
    """Sends one request's KV from a stage to a decode worker.

    The stage's thread calls `put`, `end_chunk` and `close`. The reporting thread calls `put_logits` and the
    function that `end_chunk` returns. A failure is raised only when a chunk is reported, so that the
    stage stays in step with its peers.
    """

    pages: Sequence[int]
    """The request's pages in the stage's cache, in token order."""
    has_prefix: bool
    """True if these pages already hold the part of the prompt that the decode worker has."""

    def put(self, layer: int, start: int, *sides_T: torch.Tensor) -> int:
        """Start to send one layer's KV of a chunk.

        Args:
            start: Position of the chunk's first token.
            sides_T: `cache.Sides`, as the stage's pages hold them. They must not change before the last chunk
                is sent.
        Returns:
            Bytes that will be transferred.
        Raises:
            HandoffError: The tensors are not the KV of one chunk.
        """

    def end_chunk(self) -> Callable[[], None]:
        """Send the rest of a chunk.

        Returns:
            A function to call once the device has computed the chunk. It returns when the whole chunk has
                been sent, and raises HandoffError if the request has failed.
        """

    def put_logits(self, logits_V: torch.Tensor) -> None:
        """Send the last position's logits: float32, on the host."""

    def close(self) -> bool:
        """End the request: send nothing more and ignore failures.

        Returns:
            Whether its pages are free. If not, call again later: the decode worker may still read them.
        """


class KVSender(Protocol):
    def open(self, destination: Destination) -> KVStream:
        """Open the stream of one attempt. Raises HandoffError."""


UsePages = Callable[[], AbstractContextManager[Sequence[int] | None]]
"""`with use_pages() as pages` keeps a request's page table in use. None: the request is over, so write
nothing."""


class KVReader(Protocol):
    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        """Write these layers of an announcement into the request's pages.

        Several reads may run at once. Only the worker's shutdown cancels a read.

        Returns:
            Bytes written, once later work on the device sees them; None if the request has ended.
        Raises:
            HandoffError: The KV is lost, or belongs to another request.
        """


def check_kv(*sides_T: torch.Tensor) -> None:
    """Raise HandoffError unless these tensors are keys and values of one chunk."""
    k_TGD, v_TGD, *scales = sides_T
    fits = k_TGD.shape == v_TGD.shape and k_TGD.dim() == 3 and k_TGD.dtype == v_TGD.dtype
    if k_TGD.dtype == BYTES:
        fits &= len(scales) == 2 and all(x.dtype == BYTES and x.shape == k_TGD.shape[:2] for x in scales)
    else:
        fits &= k_TGD.dtype in _FLOATS and not scales
    if not fits:
        given = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in sides_T)
        raise HandoffError(
            f"cannot hand over {given}: expected two [tokens, heads, D], in 8 bits with their scales"
        )


def described(announcement: KVAnnouncement) -> str:
    last = announcement.layer + announcement.layers - 1
    layers = f"layer {last}" if announcement.layers == 1 else f"layers {announcement.layer} .. {last}"
    return f"KV of {announcement.request_id}, {layers} at {announcement.start}"


def plain(error: Exception) -> str:
    """Return the cause of one of Ray's errors as one line."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__
