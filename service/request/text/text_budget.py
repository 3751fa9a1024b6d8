"""Bounds the texts that a door holds until they are tokenised, in bytes that have arrived.

Long texts are tokenised one after the other, so that they take bounded memory. Short texts never wait for
them.
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
    """One request's room. `release`, or the end of the block, gives it back."""

    owner: str
    size: int
    budget: TextBudget

    def grow(self, size: int) -> None:
        """Hold `size` bytes in all. Raises Overloaded."""
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
    """Room for texts. A caller's texts may take as much as they leave free (`fits_share`), all callers' long
    ones three quarters, and a text that is alone all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: set[HeldText] = set()
        self._long = ThreadPoolExecutor(1, "long-texts")

    def hold(self, owner: str, size: int) -> HeldText:
        """Hold room for a text. Raises Overloaded."""
        self.check(owner, size)
        held = HeldText(owner, size, self)
        self._held.add(held)
        return held

    def drop(self, held: HeldText) -> None:
        self._held.discard(held)

    def check(self, owner: str, size: int, replaced: HeldText | None = None) -> None:
        """Check that there is room, counting that of `replaced` as free. Raises Overloaded."""
        if size > self._max_bytes:
            raise Overloaded(f"{size} bytes are more than this server reads at once, {self._max_bytes}")
        size = max(size, 1)  # a request of which nothing has arrived needs room, too
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
