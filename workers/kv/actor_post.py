"""Messages to decode actors, and what these owe for them: answers.

Ray is needed only to find an actor and to wait for its answers; a test brings a stand-in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from ..messages.stages import FirstLogits, KVAnnouncement
from ..messages.states import NAMESPACE
from ..roles import KVTaker, sent
from .handoff import HandoffError

M = TypeVar("M", KVAnnouncement, FirstLogits)


@dataclass(frozen=True, eq=False)
class _Owed:
    """An answer that a decode worker owes, and until when it counts."""

    reply: Any
    request_id: str
    decode_worker: str
    bytes: int
    until: float


class ActorPost:
    """A `posting.Post`: sends what it is given to the decode actor. Safe to use from several threads.

    Announcements are not waited for, but at most max_bytes of them are unanswered at a time, so that a
    slow decode worker slows prefill down instead of filling a store. A worker that does not answer for
    ack_timeout_s counts as failed. clock: seconds, of this host.
    """

    def __init__(
        self, max_bytes: int, ack_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        import ray

        self._ray = ray
        self._max_bytes = max_bytes
        self._ack_timeout_s = ack_timeout_s
        self._clock = clock
        self._lock = Lock()
        self._actors: dict[str, Any] = {}
        self._owed: deque[_Owed] = deque()
        self._failed: dict[str, str | None] = {}
        """Live requests: why the hand-off failed, None while it has not."""

    def kv(self, decode_worker: str, announcement: KVAnnouncement) -> None:
        """The payload travels inside the message."""
        if not self._dead(announcement.request_id):
            self._call(KVTaker.announce, decode_worker, announcement, 0)

    def logits(self, decode_worker: str, message: FirstLogits) -> None:
        if not self._dead(message.request_id):
            self._call(KVTaker.first_logits, decode_worker, message, message.logits.nbytes)

    def check(self, request_id: str) -> None:
        self._settle_answered()
        reason = self._failed.get(request_id)
        if reason is not None:
            raise HandoffError(reason)

    def owed(self, request_id: str) -> bool:
        self._settle_answered()
        with self._lock:
            return any(one.request_id == request_id for one in self._owed)

    def forget(self, request_id: str) -> None:
        self._failed.pop(request_id, None)

    def _dead(self, request_id: str) -> bool:
        return self._failed.setdefault(request_id, None) is not None

    def _call(
        self, method: Callable[[KVTaker, M], Awaitable[None]], decode_worker: str, message: M, size: int
    ) -> None:
        try:
            if decode_worker not in self._actors:
                self._actors[decode_worker] = self._ray.get_actor(decode_worker, namespace=NAMESPACE)
            reply = sent(self._actors[decode_worker], method, message)
        except Exception as error:
            self._not_taken(message.request_id, decode_worker, error)
            return
        until = self._clock() + self._ack_timeout_s
        with self._lock:
            self._owed.append(_Owed(reply, message.request_id, decode_worker, size, until))
        while (oldest := self._too_much()) is not None:
            patience = max(0.0, oldest.until - self._clock())
            self._ray.wait([oldest.reply], num_returns=1, timeout=patience, fetch_local=False)
            self._settle_answered()

    def _too_much(self) -> _Owed | None:
        """The answer to wait for before more may be sent."""
        with self._lock:
            over = len(self._owed) > 1 and sum(one.bytes for one in self._owed) > self._max_bytes
            return self._owed[0] if over else None

    def _settle_answered(self) -> None:
        """Take note of the answers that have come, and of those that can no longer."""
        with self._lock:
            replies = [one.reply for one in self._owed]
            answered: set[Any] = set()
            if replies:
                ready, _ = self._ray.wait(replies, num_returns=len(replies), timeout=0, fetch_local=False)
                answered = set(ready)
            now = self._clock()
            done = [one for one in self._owed if one.reply in answered or one.until <= now]
            self._owed = deque(one for one in self._owed if one not in done)
        for one in done:
            self._settle(one)

    def _settle(self, owed: _Owed) -> None:
        try:
            self._ray.get(owed.reply, timeout=0)
        except Exception as error:
            self._not_taken(owed.request_id, owed.decode_worker, error)

    def _not_taken(self, request_id: str, decode_worker: str, error: Exception) -> None:
        self._actors.pop(decode_worker, None)
        self._fail(request_id, f"{decode_worker} did not take K/V: {plain(error)}")

    def _fail(self, request_id: str, reason: str) -> None:
        if request_id in self._failed and self._failed[request_id] is None:
            self._failed[request_id] = reason


def plain(error: Exception) -> str:
    """One line: the cause inside Ray's wrapper, without its traceback."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__
