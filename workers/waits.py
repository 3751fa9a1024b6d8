"""Waits that say what they wait for when they take long."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLOW_S = 30.0
"""No close should take so long: a chunk or a decode step is over in seconds."""

log = logging.getLogger(__name__)


@contextmanager
def said_when_slow(what: Callable[[], str], after_s: float | None = None) -> Iterator[None]:
    """Log what the block waits for each time that `after_s` seconds have passed.

    Args:
        what: Returns what is waited for, as it follows "waits for". It is called on another thread, since the
            block may keep its own.
        after_s: Seconds; None: SLOW_S.
    """
    over, seconds = threading.Event(), SLOW_S if after_s is None else after_s

    def say() -> None:
        waited = 0.0
        while not over.wait(seconds):
            waited += seconds
            log.warning("after %g s, waits for %s", waited, what())

    thread = threading.Thread(target=say, name="slow-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # it keeps alive what `what` looks at
