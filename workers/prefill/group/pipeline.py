"""The stages of a prefill group as one thing that takes chunks.

In flight are at most one chunk per stage and one more, and the first stage has at most two: one that it
computes and one that is launched behind it, so that no stage waits for word of the chunk before. That fills
the pipeline, and bounds how long somebody else's chunks stand between a request and its pages: one chunk's
way through all stages, and one more chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...messages.stages import ChunkCommand, ChunkReport, OpenRequest, RequestFailed
from ...roles import Answer, Stage, finished, settled
from .watch import StageWatch

T = TypeVar("T")

_AHEAD = 1
"""Chunks that a stage has behind the one that it computes."""


class Pipeline:
    """Sends each command to all stages before it returns, so that they all get the same ones in one order.

    watch: told of all that stages owe. entry_free: called when the first stage is through with a chunk.
    slack_s: what a command may take before a stage is asked whether it lives.
    """

    def __init__(
        self, stages: Sequence[Stage], watch: StageWatch, entry_free: Callable[[], None], slack_s: float
    ) -> None:
        self._stages = tuple(stages)
        self._watch = watch
        self._slack_s = slack_s
        self._tell_entry_free = entry_free
        self._chunks = 0
        self._entering = 0
        self._last: asyncio.Task[list[ChunkReport]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def ready(self) -> bool:
        """Whether a chunk may enter."""
        return self._entering <= _AHEAD and self._chunks < len(self._stages) + _AHEAD

    def run_chunk(
        self, command: ChunkCommand, opening: OpenRequest | None, allowed: Callable[[], float]
    ) -> asyncio.Task[list[ChunkReport]]:
        """The stages' reports, after those of all chunks before. opening: sent first, for a request's first
        chunk. allowed: seconds that a stage may take for it, as far as is known by now. RequestFailed
        concerns the request, anything else is the end of the group."""
        opened: list[asyncio.Task[Any]] = []
        if opening is not None:
            name = f"opening {command.request_id}"
            opened = self._all(name, [stage.open(opening) for stage in self._stages])
        first, *others = self._stages
        blind = replace(command, token_ids=b"")
        replies = [first.run_chunk(command), *(stage.run_chunk(blind) for stage in others)]
        self._chunks += 1
        self._entering += 1
        name, before = f"the chunk of {command.request_id} at token {command.start}", None
        chunks: list[asyncio.Task[Any]] = []
        for stage, reply in enumerate(replies):
            chunks.append(self.spawn(_outcome(finished(reply))))
            before = self._watch.expect(stage, name, allowed, chunks[-1], before)
        chunks[0].add_done_callback(self._entry_free)
        self._last = self.spawn(self._reports([*opened, *chunks], self._last))
        return self._last

    def abandon(self, serial: int) -> None:
        """Chunks of this request that are in flight end within a layer's time."""
        for stage in self._stages:
            stage.abandon(serial)

    def close(self, request_id: str) -> list[asyncio.Task[Any]]:
        """Has every stage forget a request; their answers: whether its pages are free there."""
        return self._all(f"closing {request_id}", [stage.close(request_id) for stage in self._stages])

    async def pages(self) -> list[int]:
        """Pages of open requests by stage, each asked behind the commands it already has."""
        asked = self._all("counting its pages", [stage.pages_used() for stage in self._stages])
        return list(await asyncio.gather(*asked))

    def _all(self, what: str, replies: Sequence[Answer[Any]]) -> list[asyncio.Task[Any]]:
        """Every stage's answer to one command."""
        outcomes: list[asyncio.Task[Any]] = []
        for stage, reply in enumerate(replies):
            outcomes.append(self.spawn(_outcome(settled(reply))))
            self._watch.expect(stage, what, lambda: self._slack_s, outcomes[-1])
        return outcomes

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the group's own, so that it outlives the caller that caused it, and `idle` waits."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def idle(self) -> None:
        """Wait for everything that stages still owe, and watch over them no more."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._watch.stop()

    async def _reports(
        self, outcomes: list[asyncio.Task[Any]], before: asyncio.Task[list[ChunkReport]] | None
    ) -> list[ChunkReport]:
        """Stages finish chunks in order, but the event loop may learn of two at once and of the later one
        first, so each waits for the one `before`."""
        try:
            done = await asyncio.gather(*outcomes)
            if before is not None:
                await asyncio.wait([before])
        finally:
            self._chunks -= 1
        for outcome in done:
            if isinstance(outcome, RequestFailed):
                raise outcome
        return done[-len(self._stages) :]

    def _entry_free(self, entry: asyncio.Future[Any]) -> None:
        """A failure of the group shows in the chunk's reports."""
        self._entering -= 1
        if not entry.cancelled() and entry.exception() is None:
            self._tell_entry_free()


async def _outcome(answer: Coroutine[Any, Any, T]) -> T | RequestFailed:
    """A stage's answer; one request's failure as a value, the group's as an exception."""
    try:
        return await answer
    except RequestFailed as error:
        return error
