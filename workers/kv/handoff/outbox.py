"""Sends a stage's KV messages to decode actors, and collects their answers."""

import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, TypeVar, cast

import ray

from deltafront.workers.kv.handoff.protocols import HandoffError, plain
from deltafront.workers.messages.stages import (
    FirstLogits,
    HandedState,
    KVAnnouncement,
    OpenedPages,
    OtherMemory,
    PageWriter,
)
from deltafront.workers.messages.states import NAMESPACE
from deltafront.workers.roles import KVReceiver, sent

M = TypeVar("M", KVAnnouncement, FirstLogits, HandedState)

MAX_UNANSWERED_BYTES = 256 << 20
"""Maximum bytes of copied KV in unanswered messages. A stage with more waits for answers."""


@dataclass(eq=False)
class Delivery:
    """The state of one stream's messages to its decode worker. `failure` is the first error, if any."""

    decode_worker: str
    failure: str = ""

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason


class Outbox(Protocol):
    """Sends messages in order, for one thread. Only `check` raises the errors of messages."""

    def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None: ...

    def send_logits(self, delivery: Delivery, message: FirstLogits) -> None: ...

    def send_state(self, delivery: Delivery, message: HandedState) -> None: ...

    def check(self, delivery: Delivery) -> None:
        """Raise HandoffError if a message is known to have failed. Does not wait for answers."""

    def unanswered(self, delivery: Delivery) -> bool:
        """Return True while a message of the stream is neither answered nor timed out. The decode worker may
        then still read the pages."""


class PageOpener(Outbox, Protocol):
    """An `Outbox` for a stage that writes directly into decode workers' pages (transport `mapped`)."""

    def open_pages(self, decode_worker: str, writer: PageWriter) -> OpenedPages:
        """Open a request's pages and state slots for writing.

        Raises:
            HandoffError: The decode worker did not open them.
            OtherMemory: The stage has mapped another decode worker's memory.
        """

    def close_pages(self, decode_worker: str, writer: PageWriter) -> None: ...


@dataclass(frozen=True, eq=False)
class _Unanswered:
    reply: Any
    delivery: Delivery
    bytes: int
    until: float
    over: Callable[[], None]


class ActorOutbox:
    """Sends messages to the Ray actors of decode workers (`Outbox`).

    At most `max_bytes` of copied KV may be unanswered. A slow decode worker thus slows prefill down instead
    of filling the object store.
    """

    def __init__(
        self, max_bytes: int, ack_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ray = ray
        self._max_bytes = max_bytes
        self._ack_timeout_s = ack_timeout_s
        self._clock = clock
        self._lock = Lock()
        self._actors: dict[str, Any] = {}
        self._unanswered: deque[_Unanswered] = deque()

    def open_pages(self, decode_worker: str, writer: PageWriter) -> OpenedPages:
        try:
            reply = sent(self._actor(decode_worker), KVReceiver.open_pages, writer)
            return cast(OpenedPages, self._ray.get(reply, timeout=self._ack_timeout_s))
        except Exception as error:
            self.close_pages(decode_worker, writer)
            if isinstance(cause := getattr(error, "cause", None), OtherMemory):
                raise cause from None
            raise HandoffError(f"{decode_worker} did not open its pages: {plain(error)}") from error

    def close_pages(self, decode_worker: str, writer: PageWriter) -> None:
        """Release the pages. Errors are ignored, since a dead decode worker needs no message."""
        with contextlib.suppress(Exception):
            sent(self._actor(decode_worker), KVReceiver.close_pages, writer)

    def send_kv(self, delivery: Delivery, announcement: KVAnnouncement) -> None:
        self._call(KVReceiver.announce, delivery, announcement, 0)

    def send_logits(self, delivery: Delivery, message: FirstLogits) -> None:
        self._call(KVReceiver.first_logits, delivery, message, message.logits.nbytes)

    def send_state(self, delivery: Delivery, message: HandedState) -> None:
        self._call(KVReceiver.state, delivery, message, message.bytes)

    def check(self, delivery: Delivery) -> None:
        self._settle_answered()
        if delivery.failure:
            raise HandoffError(delivery.failure)

    def unanswered(self, delivery: Delivery) -> bool:
        self._settle_answered()
        with self._lock:
            return any(message.delivery is delivery for message in self._unanswered)

    def _call(
        self,
        method: Callable[[KVReceiver, M], Awaitable[None]],
        delivery: Delivery,
        message: M,
        size: int,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a message, then wait while more than `max_bytes` are unanswered. `over` is called once the
        message is answered, has timed out or cannot be sent."""
        if delivery.failure:
            over()
            return
        name = delivery.decode_worker
        try:
            reply = sent(self._actor(name), method, message)
        except Exception as error:
            self._not_taken(delivery, error)
            over()
            return
        until = self._clock() + self._ack_timeout_s
        with self._lock:
            self._unanswered.append(_Unanswered(reply, delivery, size, until, over))
        while (oldest := self._over_limit()) is not None:
            patience = max(0.0, oldest.until - self._clock())
            self._ray.wait([oldest.reply], num_returns=1, timeout=patience, fetch_local=False)
            self._settle_answered()

    def _actor(self, name: str) -> Any:
        if name not in self._actors:
            self._actors[name] = self._ray.get_actor(name, namespace=NAMESPACE)
        return self._actors[name]

    def _over_limit(self) -> _Unanswered | None:
        with self._lock:
            over = (
                len(self._unanswered) > 1
                and sum(message.bytes for message in self._unanswered) > self._max_bytes
            )
            return self._unanswered[0] if over else None

    def _settle_answered(self) -> None:
        with self._lock:
            replies = [message.reply for message in self._unanswered]
            answered: set[Any] = set()
            if replies:
                ready, _ = self._ray.wait(replies, num_returns=len(replies), timeout=0, fetch_local=False)
                answered = set(ready)
            now = self._clock()
            done = [
                message for message in self._unanswered if message.reply in answered or message.until <= now
            ]
            self._unanswered = deque(message for message in self._unanswered if message not in done)
        for message in done:
            message.over()
            try:
                self._ray.get(message.reply, timeout=0)
            except Exception as error:
                self._not_taken(message.delivery, error)

    def _not_taken(self, delivery: Delivery, error: Exception) -> None:
        self._actors.pop(delivery.decode_worker, None)
        delivery.fail(f"{delivery.decode_worker} did not take KV: {plain(error)}")
