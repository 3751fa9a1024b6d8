"""Interfaces of the KV hand-off: a stage puts tensors into a `KVStream`, and a decode worker's `KVReader`
copies them into pages.

Each transport implements both. The payload of its messages is private to the transport.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from deltafront.kernels.layers.kv_int8 import BYTES
from deltafront.workers.kv.states import State, StateCache
from deltafront.workers.messages.stages import KVAnnouncement

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class HandoffError(Exception):
    """KV could not be transferred, or differs from its announcement."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The destination of a request's KV. `pages` is the request's page table in the stage's own cache,
    `state_places` as in `PrefillJob`."""

    request_id: str
    decode_worker: str
    attempt: int = 0
    pages: Sequence[int] = ()
    state_places: tuple[int, ...] = ()


class KVStream(Protocol):
    """Sends one request's KV from a stage to a decode worker.

    The stage's thread calls `put`, `copy_state`, `end_chunk` and `close`. The reporting thread calls
    `put_logits`, `put_state` and the function that `end_chunk` returns. Errors are raised only at the end of
    a chunk, so that the stage stays in step with the other stages.
    """

    pages: Sequence[int]
    """The request's page table in the cache that the stage writes to."""
    has_prefix: bool
    """True if these pages already hold the KV that the decode worker has."""

    def put(self, layer: int, start: int, *sides_T: torch.Tensor) -> int:
        """Start to send one layer's KV of a chunk.

        Args:
            start: Position of the chunk's first token.
            sides_T: The KV as in the stage's pages (`cache.Sides`). It must not change before the last chunk
                is sent.
        Returns:
            Number of bytes that will be transferred.
        Raises:
            HandoffError: The tensors' shapes or dtypes do not match one another.
        """

    def end_chunk(self) -> Callable[[], None]:
        """Start to send the rest of a chunk.

        Returns:
            A function to call once the device has computed the chunk. It waits until the whole chunk has been
                sent, and raises HandoffError if any message of the request has failed.
        """

    def put_logits(self, logits_V: torch.Tensor) -> None:
        """Send the logits at the prompt's last position: float32, in host memory."""

    def copy_state(self, tokens: int, states: StateCache, slot: int) -> State | None:
        """Launch the copy of the state after the prompt's first `tokens` tokens, which is in this slot.

        Returns:
            The copy in host memory, for `put_state`; None: it is copied into the decode worker's memory.
        """

    def put_state(self, tokens: int, layers: Sequence[int], state: State | None) -> None:
        """Send the state from `copy_state`, once the device has copied it. It is that of `layers`."""

    def close(self) -> bool:
        """End the request. Nothing more is sent, and errors are ignored.

        Returns:
            True if its pages are free. If not, the decode worker may still read them; call again later.
        """


class KVSender(Protocol):
    def open(self, destination: Destination) -> KVStream:
        """Open the stream of one attempt. Raises HandoffError."""


UsePages = Callable[[], AbstractContextManager[Sequence[int] | None]]
"""`with use_pages() as pages` keeps a request's pages allocated and yields its page table. If it yields None,
the request has ended: write nothing."""


class KVReader(Protocol):
    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        """Copy these layers of announced KV into the request's pages, and wait until they are written.

        Several calls may run at once. Only the worker's shutdown cancels a call.

        Returns:
            Number of bytes written; None if the request has ended.
        Raises:
            HandoffError: The KV is lost, or may belong to another request.
        """


def check_kv(*sides_T: torch.Tensor) -> None:
    """Raise HandoffError unless the tensors have the shapes and dtypes of `cache.Sides`."""
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
    """Return the cause of a Ray error as one line."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__
