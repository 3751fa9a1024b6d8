"""The stage's side of a KV hand-off. Its messages announce which layers of a chunk can be read, and where.

Several small layers share a message, since each message takes every process some hundred microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from deltafront.workers.kv.cache import Sides
from deltafront.workers.kv.handoff.outbox import Delivery, Outbox
from deltafront.workers.kv.handoff.protocols import Destination, check_kv
from deltafront.workers.kv.states import State, StateCache, packed
from deltafront.workers.messages.stages import FirstLogits, HandedState, KVAnnouncement


class KVExport(Protocol):
    """Describes the KV of one request, so that a decode worker can read it."""

    def layer(self, start: int, sides_T: Sides) -> tuple[Any, Any]:
        """Describe one layer's KV of a chunk.

        Returns:
            The description, and the CUDA event to wait for before it is sent; None: send at once.
        """

    def payload(self, layers: Sequence[Any]) -> Any:
        """Make an announcement's payload from the descriptions of its layers."""

    def revoke(self) -> bool:
        """Invalidate all descriptions, so that another request can use the pages.

        Returns:
            True if the pages are free now. If not, call again later.
        """


class KVExporter(Protocol):
    """Makes the `KVExport` of each request, for one transport."""

    message_bytes: int
    """A message is sent once it announces this much KV, or when its chunk ends."""
    in_place: bool
    """True if decode workers read the stage's own pages."""

    def export(self, pages: Sequence[int]) -> KVExport: ...


@dataclass(frozen=True)
class MappedSlots:
    """The states of a decode worker that a stage has mapped, and the slots of one request by number of
    tokens."""

    cache: StateCache
    by_tokens: Mapping[int, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class _Layer:
    layer: int
    start: int
    tokens: int
    bytes: int
    description: Any
    ready: Any


class MessageSender:
    """Opens the KV streams of requests (`KVSender`). With `background`, a separate thread waits for the
    layers and sends, so that the stage can launch kernels meanwhile."""

    def __init__(self, exporter: KVExporter, outbox: Outbox, *, background: bool) -> None:
        self._exporter, self._outbox = exporter, outbox
        self._thread = ThreadPoolExecutor(1, "kv-send") if background else None

    def open(self, destination: Destination) -> MessageStream:
        exporter = self._exporter
        return MessageStream(
            destination,
            exporter.export(destination.pages),
            self._outbox,
            self._thread,
            message_bytes=exporter.message_bytes,
            in_place=exporter.in_place,
        )


class MessageStream:
    """Sends the KV of one request (`KVStream`): collects layers of a chunk into messages for an `Outbox`.

    Args:
        message_bytes: As in `KVExporter`; None: no KV is transferred, and one message announces each chunk.
        in_place: As in `KVExporter`.
        slots: Where states are written; None: they are sent.
    """

    def __init__(
        self,
        destination: Destination,
        export: KVExport,
        outbox: Outbox,
        thread: ThreadPoolExecutor | None,
        *,
        message_bytes: int | None,
        in_place: bool,
        slots: MappedSlots | None = None,
    ) -> None:
        self._slots = slots
        self.pages, self.has_prefix = destination.pages, message_bytes is None
        self._to, self._export = destination, export
        self._message_bytes, self._in_place = message_bytes, in_place
        self._outbox, self._delivery = outbox, Delivery(destination.decode_worker)
        self._thread = thread
        self._sending: list[Future[None]] = []
        """Messages that the sending thread may not have sent yet."""
        self._layers: list[_Layer] = []
        """Layers of a chunk that wait for the next message."""

    def put(self, layer: int, start: int, *sides_T: torch.Tensor) -> int:
        check_kv(*sides_T)
        if self._layers and (start, layer) != (self._layers[-1].start, self._layers[-1].layer + 1):
            self._send_message()
        size = sum(x.nbytes for x in sides_T)
        description, ready = self._export.layer(start, sides_T)
        self._layers.append(
            _Layer(
                layer=layer,
                start=start,
                tokens=sides_T[0].shape[0],
                bytes=size,
                description=description,
                ready=ready,
            )
        )
        if self._message_bytes is None:
            return 0
        if sum(entry.bytes for entry in self._layers) >= self._message_bytes:
            self._send_message()
        return size

    def end_chunk(self) -> Callable[[], None]:
        self._send_message()
        sending = self._sending
        self._sending = [work for work in sending if not work.done()]
        return partial(self._settle, sending)

    def put_logits(self, logits_V: torch.Tensor) -> None:
        message = FirstLogits(
            request_id=self._to.request_id, logits=logits_V.numpy(), attempt=self._to.attempt
        )
        self._outbox.send_logits(self._delivery, message)

    def copy_state(self, tokens: int, states: StateCache, slot: int) -> State | None:
        if self._slots is None:
            return states.to_host(slot)
        self._slots.cache.take(self._slots.by_tokens.get(tokens, ()), states, slot)
        return None

    def put_state(self, tokens: int, layers: Sequence[int], state: State | None) -> None:
        message = HandedState(
            request_id=self._to.request_id,
            tokens=tokens,
            layers=tuple(layers),
            arrays=packed(state),
            attempt=self._to.attempt,
        )
        self._outbox.send_state(self._delivery, message)

    def close(self) -> bool:
        self._layers = []
        sending = any(not work.done() for work in self._sending)
        if self._in_place and (sending or self._outbox.unanswered(self._delivery)):
            return False
        return self._export.revoke()

    def _settle(self, sending: Sequence[Future[None]]) -> None:
        for work in sending:
            work.result()
        self._outbox.check(self._delivery)

    def _send_message(self) -> None:
        layers, self._layers = self._layers, []
        if not layers:
            return
        if self._thread is None:
            self._send(layers)
        else:
            self._sending.append(self._thread.submit(self._send, layers))

    def _send(self, layers: Sequence[_Layer]) -> None:
        first, last = layers[0], layers[-1]
        if last.ready is not None:  # earlier layers are then ready, too
            last.ready.synchronize()
        announcement = KVAnnouncement(
            request_id=self._to.request_id,
            layer=first.layer,
            start=first.start,
            tokens=first.tokens,
            payload=self._export.payload([entry.description for entry in layers]),
            layers=len(layers),
            attempt=self._to.attempt,
        )
        self._outbox.send_kv(self._delivery, announcement)
