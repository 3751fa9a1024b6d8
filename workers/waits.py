import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLOW_S = 30.0
"""Seconds after which a wait is logged. Closing waits for a chunk or a decode step, which takes a few
seconds."""

log = logging.getLogger(__name__)


@contextmanager
def said_when_slow(
    what: Callable[[], str],
    after_s: float | None = None,
    say: Callable[[str], object] = log.warning,
) -> Iterator[None]:
    """While a `with` block runs, log every `after_s` seconds what it waits for.

    Args:
        what: Returns the text after "waits for". It is called on another thread.
        after_s: Seconds; None: SLOW_S.
        say: Called with each line. The default logs a warning.
    """
    over, seconds = threading.Event(), SLOW_S if after_s is None else after_s

    def repeat() -> None:
        waited = 0.0
        while not over.wait(seconds):
            waited += seconds
            say(f"after {waited:g} s, waits for {what()}")

    thread = threading.Thread(target=repeat, name="slow-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # else the timer keeps the objects of `what` alive
