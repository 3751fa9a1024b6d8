"""Retries of requests whose connection was lost."""

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from deltafront.service.errors import ConnectionLost, DeadlineExceeded, DeltafrontError

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass
class Retries:
    """Decides about retries of one request, for at most `retry_s` without an answer. deadline: seconds
    since the epoch.
    """

    retry_s: float
    deadline: float | None
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    retried: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lost_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def pause_s(self, error: DeltafrontError) -> float:
        """Return the seconds to wait before the next try.

        After a lost connection, Overloaded is retried too: pages reserved by the dead door may not be free
        yet.

        Raises:
            DeltafrontError: `error`, if it is not retried.
            DeadlineExceeded
        """
        busy = self.retried and error.retry_after_s is not None
        if not isinstance(error, ConnectionLost) and not busy:
            raise error
        self.retried = True
        now = self.clock()
        self._lost_at = now if self._lost_at is None else self._lost_at
        pause_s = max(self._pause_s, error.retry_after_s or 0.0)
        if self.retry_s <= 0 or now + pause_s > self._lost_at + self.retry_s:
            raise error
        if self.deadline is not None and self.wall() + pause_s >= self.deadline:
            raise DeadlineExceeded(f"no time is left to try again: {error.message}") from error
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s
