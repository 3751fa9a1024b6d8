"""The two sides of a hand-off: a stage puts tensors into a stream, a decode worker reads them into pages.

The payload of an announcement is known to the two ends of one transport only: host arrays, a handle to a
GPU's memory, or the tensors themselves.

Shape suffixes: T tokens of a chunk, G key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from ...messages.stages import KVAnnouncement

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class HandoffError(Exception):
    """K/V could not be handed over, or what arrived is not what was announced."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where one attempt to read a prompt hands its K/V over to. pages: the request's pages in the stage's
    cache, in the order of its tokens."""

    request_id: str
    decode_worker: str
    attempt: int = 0
    pages: Sequence[int] = ()


class KVStream(Protocol):
    """One request's K/V on its way out of a stage.

    `put`, `end_chunk` and `close` are called on the stage's thread. `put_logits` and the function that
    `end_chunk` returns are called on the thread that reports. A failure of the hand-off does not show before
    a chunk is reported, so that the stage finishes the chunk and keeps in step with its peers.
    """

    def put(self, layer: int, start: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> int:
        """Start handing over one layer's chunk.

        Args:
            start: position of the chunk's first token in the prompt.
            k_TGD, v_TGD: views of the stage's pages. Nobody writes to them before the function that the last
                chunk's `end_chunk` returned has returned, or the request is over.
        Returns: bytes of the two.
        Raises: HandoffError for tensors that are not K/V.
        """

    def end_chunk(self) -> Callable[[], None]:
        """Nothing more of this chunk comes.

        Returns: a function to call once the device has computed the chunk. It returns when all of the chunk
        is on its way, and raises HandoffError if a failure of this request is known.
        """

    def put_logits(self, logits_V: torch.Tensor) -> None:
        """Send the logits of the prompt's last position, float32, on the host."""

    def close(self) -> bool:
        """The request is over: nothing more is sent, and failures no longer matter.

        Returns: whether its pages are free. If not, the decode worker may still read them: ask again. The
        worker's answer, its death or `ack_timeout_s` bound the wait.
        """


class KVSender(Protocol):
    """A stage's end of a transport, made for its paged cache."""

    def open(self, destination: Destination) -> KVStream: ...


UsePages = Callable[[], AbstractContextManager[Sequence[int] | None]]
"""`with hold() as pages`: a request's page table. No page of it is given away before the block ends. None:
the request is over, and nothing may be written."""


class KVReader(Protocol):
    """A decode worker's end of a transport, made for its paged cache."""

    async def read(self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages) -> int:
        """Write these layers of what was announced into the request's pages. Many reads run side by side.

        Returns: bytes written, once everything that runs later sees them; 0 if the request was over.
        Raises: HandoffError for K/V that is lost or is not what was announced.
        Only a worker that shuts down cancels a read; it gives no page away afterwards.
        """


def check_kv(k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> None:
    """Raises HandoffError unless these are keys and values of one chunk."""
    if k_TGD.shape != v_TGD.shape or k_TGD.dim() != 3 or k_TGD.dtype not in _FLOATS:
        shapes = f"k {tuple(k_TGD.shape)}, v {tuple(v_TGD.shape)}"
        raise HandoffError(f"cannot hand over {shapes} of {k_TGD.dtype}: expected two [tokens, heads, D]")


def described(announcement: KVAnnouncement) -> str:
    """For messages: which K/V was announced."""
    last = announcement.layer + announcement.layers - 1
    layers = f"layer {last}" if announcement.layers == 1 else f"layers {announcement.layer} .. {last}"
    return f"K/V of {announcement.request_id}, {layers} at {announcement.start}"


def plain(error: Exception) -> str:
    """One line: the cause inside Ray's wrapper, without its traceback."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__
