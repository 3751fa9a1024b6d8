"""Reports a worker's progress while it loads. It prints to stderr, which Ray copies to the service's log."""

import sys
import time
from collections.abc import Callable

Tell = Callable[[str], None]


def silent(what: str) -> None:
    del what


def progress(who: str, now: Callable[[], float] = time.monotonic) -> Tell:
    """Return a function that prints the worker `who`, the given text, and the seconds since this call."""
    began = now()

    def tell(what: str) -> None:
        print(f"{who}: {what} after {now() - began:.1f} s", file=sys.stderr, flush=True)

    return tell
