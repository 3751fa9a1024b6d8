"""Limits the bytes of text that a door holds until tokenisation.

Long texts are tokenised one at a time, so that they need bounded memory. Short texts never wait for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from deltafront.service.errors import Overloaded
from deltafront.service.request.callers import RETRY_S, fits_share

_T = TypeVar("_T")
SHORT_BYTES = 1 << 18


@dataclass(eq=False)
class HeldText:
    """The bytes of a door's text budget that one request holds. `release`, or the end of the `with` block,
    returns them."""

    owner: str
    size: int
    budget: TextBudget

    def grow(self, size: int) -> None:
        """Increase the held bytes to `size` in total. Raises Overloaded."""
        if size > self.size:
            self.budget.check(self.owner, size, self)
            self.size = size

    def release(self) -> None:
        self.budget.drop(self)

    def __enter__(self) -> HeldText:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()


class TextBudget:
    """A door's budget for texts. One caller's texts may take at most the bytes that they leave free
    (`fits_share`). All long texts together may take three quarters. A text that is alone may take
    everything."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: set[HeldText] = set()
        self._long = ThreadPoolExecutor(1, "long-texts")

    def hold(self, owner: str, size: int) -> HeldText:
        """Reserve `size` bytes for a caller's text. Raises Overloaded."""
        self.check(owner, size)
        held = HeldText(owner, size, self)
        self._held.add(held)
        return held

    def drop(self, held: HeldText) -> None:
        self._held.discard(held)

    def check(self, owner: str, size: int, replaced: HeldText | None = None) -> None:
        """Check that `size` bytes are available once the bytes of `replaced` are freed. Raises Overloaded."""
        if size > self._max_bytes:
            raise Overloaded(f"{size} bytes are more than this server reads at once, {self._max_bytes}")
        size = max(size, 1)  # even a request without received bytes needs room
        others = [held for held in self._held if held is not replaced and held.size]
        everyone = size + sum(held.size for held in others)
        mine = size + sum(held.size for held in others if held.owner == owner)
        long = [held.size for held in others if held.size > SHORT_BYTES]
        full = bool(others) and not fits_share(owner, mine, everyone, self._max_bytes)
        if size > SHORT_BYTES and long:
            full |= size + sum(long) > self._max_bytes * 3 // 4
        if full:
            raise Overloaded(
                "this server has as much text to read as it can hold: try again", retry_after_s=RETRY_S
            )

    async def work(self, size: int, call: Callable[[Callable[[], bool]], _T]) -> _T:
        """Run `call` in a thread. Its argument tells whether the request has ended."""
        abandoned = threading.Event()
        loop, pool = asyncio.get_running_loop(), self._long if size > SHORT_BYTES else None
        try:
            return await loop.run_in_executor(pool, call, abandoned.is_set)
        finally:
            abandoned.set()

    def stop(self) -> None:
        self._long.shutdown(wait=False, cancel_futures=True)
