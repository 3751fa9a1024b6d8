"""Reports how far a worker has loaded: a line on stderr, which Ray copies to the service's log."""

import sys
import time
from collections.abc import Callable

Tell = Callable[[str], None]


def silent(what: str) -> None:
    del what


def progress(who: str, now: Callable[[], float] = time.monotonic) -> Tell:
    """Return a function that prints a line: the worker `who`, the step it has done, and the seconds so
    far.
    """
    began = now()

    def tell(what: str) -> None:
        print(f"{who}: {what} after {now() - began:.1f} s", file=sys.stderr, flush=True)

    return tell
