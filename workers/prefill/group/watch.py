"""Detects a stage that hangs: its answer to a command is late, and it does not answer a ping (`pulse`).

A stage runs its commands in order, so only the oldest command can be late. The watch then pings the stage. A
healthy stage answers even while it computes, compiles or waits. The watch repeats the ping until the command
is answered or has taken `stall_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

CHECK_S = 0.25
"""Seconds between two checks. A longer gap counts as at most twice this, in case this process was paused."""
PULSE_S = 3.0
"""Seconds that the answer to a ping may take. Triton holds Python's GIL for up to 2.1 s while it compiles
(docs/log/2026-11-22.md at 4fe709c6)."""
ASK_AGAIN_S = 1.0


@dataclass(eq=False, kw_only=True)
class ExpectedAnswer:
    """A command that a stage has not answered yet.

    Attributes:
        command: The command's description in messages.
        allowed: Returns the seconds that the command may take once the stage can start it.
        after: The previous stage's answer for the same chunk. This stage cannot start before it.
        waited: Seconds since the stage could start the command.
        silent: Seconds since the stage was pinged.
        asked_again: The value of `waited` at which to ping the stage again.
    """

    stage: int
    command: str
    allowed: Callable[[], float]
    after: ExpectedAnswer | None = None
    waited: float = 0.0
    answered: bool = False
    asking: asyncio.Task[None] | None = None
    silent: float = 0.0
    asked_again: float = 0.0


class StageWatch:
    """Watches the stages' unanswered commands.

    Args:
        pulse: Pings the stage of this number.
        hangs: Called with the number of a stage that hangs, and a description of the fault.
        stall_s: Seconds after which a stage counts as hanging even if it answers pings.
    """

    def __init__(
        self,
        stages: int,
        pulse: Callable[[int], Awaitable[object]],
        hangs: Callable[[int, str], None],
        clock: Callable[[], float],
        stall_s: float,
    ) -> None:
        self._pulse, self._hangs, self._clock = pulse, hangs, clock
        self._stall_s = stall_s
        self._expected: list[deque[ExpectedAnswer]] = [deque() for _ in range(stages)]
        self._checked_at = 0.0
        self._next: asyncio.TimerHandle | None = None
        self._asking: set[asyncio.Task[None]] = set()

    def expect(
        self,
        stage: int,
        command: str,
        allowed: Callable[[], float],
        answer: asyncio.Future[Any],
        after: ExpectedAnswer | None = None,
    ) -> ExpectedAnswer:
        expected = ExpectedAnswer(stage=stage, command=command, allowed=allowed, after=after)
        self._expected[stage].append(expected)
        answer.add_done_callback(lambda _: self._answered(expected))
        if self._next is None:
            self._checked_at = self._clock()
            self._arm()
        return expected

    @property
    def owed(self) -> list[str]:
        """Descriptions of the commands that stages have not answered yet."""
        owed = (one for waiting in self._expected for one in tuple(waiting))
        return [f"{one.command} (stage {one.stage})" for one in owed]

    async def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def _arm(self) -> None:
        self._next = asyncio.get_running_loop().call_later(CHECK_S, self._check_oldest)

    def _answered(self, expected: ExpectedAnswer) -> None:
        expected.answered = True
        if expected.asking is not None:
            expected.asking.cancel()
        self._expected[expected.stage].remove(expected)

    def _check_oldest(self) -> None:
        now = self._clock()
        passed, self._checked_at = min(now - self._checked_at, 2 * CHECK_S), now
        for waiting in self._expected:
            first = waiting[0] if waiting else None
            if first is not None and (first.after is None or first.after.answered):
                self._judge(first, passed)
        self._next = None
        if any(self._expected):
            self._arm()

    def _judge(self, expected: ExpectedAnswer, passed: float) -> None:
        expected.waited += passed
        if expected.asking is not None:
            expected.silent += passed
        if expected.waited >= self._stall_s:
            self._blame(expected, "has not finished")
        elif expected.silent >= PULSE_S:
            self._blame(expected, "does not answer")
        elif expected.asking is None and expected.waited >= max(expected.allowed(), expected.asked_again):
            expected.asking = asyncio.get_running_loop().create_task(self._ask(expected))
            self._asking.add(expected.asking)
            expected.asking.add_done_callback(self._asking.discard)

    async def _ask(self, expected: ExpectedAnswer) -> None:
        """Ping the stage. An error is ignored: if the stage is dead, Ray fails its commands."""
        with contextlib.suppress(Exception):
            await self._pulse(expected.stage)
        expected.asking, expected.silent, expected.asked_again = None, 0.0, expected.waited + ASK_AGAIN_S

    def _blame(self, expected: ExpectedAnswer, fault: str) -> None:
        took = f"{expected.command} has taken {expected.waited:.1f} s"
        self._hangs(expected.stage, f"stage {expected.stage} {fault}: {took}")
