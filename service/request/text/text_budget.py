"""TextBudget that a door holds until it has their ids: as they were sent, as strings, in the tokenizer.

They are counted in bytes as sent, and what exceeds the door's room is refused. Long ones are tokenised one
after the other, so that memory does not depend on how many there are; short ones never wait for long ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from ...errors import Overloaded
from ..callers import RETRY_S

_T = TypeVar("_T")
SHORT = 1 << 18
"""Bytes."""


@dataclass(eq=False)
class HeldText:
    """A request's texts. Leaving the block gives their room back, as `release` does before."""

    owner: str
    size: int
    budget: TextBudget

    def grow(self, size: int) -> None:
        """To so many bytes. Raises Overloaded."""
        if size > self.size:
            self.budget.check(self.owner, size, self)
            self.size = size

    async def work(self, call: Callable[[Callable[[], bool]], _T]) -> _T:
        """The call's result, from a thread. It gets a function that says whether it was given up."""
        return await self.budget.work(self.size, call)

    def release(self) -> None:
        self.budget.drop(self)

    def __enter__(self) -> HeldText:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class TextBudget:
    """most: bytes at once. One caller's long texts take half of it at most, all callers' three quarters; what
    is alone may take all."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: set[HeldText] = set()
        self._long = ThreadPoolExecutor(1, "long-texts")

    def hold(self, owner: str, size: int) -> HeldText:
        """Raises Overloaded."""
        self.check(owner, size)
        held = HeldText(owner, size, self)
        self._held.add(held)
        return held

    def drop(self, held: HeldText) -> None:
        self._held.discard(held)

    def check(self, owner: str, size: int, instead_of: HeldText | None = None) -> None:
        """Raises Overloaded if so many bytes more have no room."""
        if size > self._most:
            raise Overloaded(f"{size} bytes are more than this server reads at once, {self._most}")
        others = [held for held in self._held if held is not instead_of]
        long = [held for held in others if held.size > SHORT]
        full = sum(held.size for held in others) + size > self._most
        if size > SHORT:
            full |= bool(long) and sum(held.size for held in long) + size > self._most * 3 // 4
            mine = [held.size for held in long if held.owner == owner]
            full |= bool(mine) and sum(mine) + size > self._most // 2
        if full:
            raise Overloaded(
                "this server has as much text to read as it can hold: try again", retry_after_s=RETRY_S
            )

    async def work(self, size: int, call: Callable[[Callable[[], bool]], _T]) -> _T:
        given_up = threading.Event()
        loop, pool = asyncio.get_running_loop(), self._long if size > SHORT else None
        try:
            return await loop.run_in_executor(pool, call, given_up.is_set)
        finally:
            given_up.set()

    def stop(self) -> None:
        self._long.shutdown(wait=False, cancel_futures=True)
