"""When a lost connection is worth another try: within the caller's deadline, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import ConnectionLost, DeadlineExceeded, DeltafrontError

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Losses:
    """The connection losses of one request.

    patience_s: how long to go on trying without hearing anything; 0: not at all. deadline: seconds since the
    epoch, or None.
    """

    def __init__(
        self,
        patience_s: float,
        deadline: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._patience_s = patience_s
        self._deadline = deadline
        self._clock, self._wall, self._sleep = clock, wall, sleep
        self._since: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self.any = False
        """Whether the connection was lost at least once."""

    def heard(self) -> None:
        """The service answers (again)."""
        self._since, self._pause_s = None, _FIRST_PAUSE_S

    def pause(self, error: DeltafrontError) -> None:
        """Wait before the next try. Raises `error` when it is none of a lost connection or patience is at its
        end, and DeadlineExceeded when there is no time left.

        Once the connection was lost, being told to come back later is no refusal either: what the dead door
        held may not be free yet.
        """
        busy = self.any and error.retry_after_s is not None
        if not isinstance(error, ConnectionLost) and not busy:
            raise error
        self.any = True
        now = self._clock()
        self._since = now if self._since is None else self._since
        wait = max(self._pause_s, error.retry_after_s or 0.0)
        if self._patience_s <= 0 or now + wait > self._since + self._patience_s:
            raise error
        if self._deadline is not None and self._wall() + wait >= self._deadline:
            raise DeadlineExceeded(f"no time is left to try again: {error.message}") from error
        self._sleep(wait)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
