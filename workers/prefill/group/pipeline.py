"""The pipeline of a prefill group's stages.

At most one chunk per stage is in flight, and one more is queued at the first stage, so that this stage never
idles. The limit keeps a new request's wait for chunks of other requests short.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from deltafront.workers.messages.stages import ChunkCommand, ChunkReport, OpenRequest, RequestFailed
from deltafront.workers.prefill.group.watch import StageWatch
from deltafront.workers.roles import Answer, Stage, finished, settled
from deltafront.workers.waits import said_when_slow

T = TypeVar("T")

_AHEAD = 1
"""Number of chunks that are queued at the first stage while it computes another."""


class Pipeline:
    """Sends each command to all stages before it returns.

    Args:
        on_entry_free: Called when the first stage has finished a chunk.
        slack_s: Seconds that a command may take before its stage is pinged (`watch`).
    """

    def __init__(
        self, stages: Sequence[Stage], watch: StageWatch, on_entry_free: Callable[[], None], slack_s: float
    ) -> None:
        self._stages = tuple(stages)
        self._watch = watch
        self._slack_s = slack_s
        self._on_entry_free = on_entry_free
        self._chunks = 0
        self._entering = 0
        self._last: asyncio.Task[list[ChunkReport]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def ready(self) -> bool:
        return self._entering <= _AHEAD and self._chunks < len(self._stages) + _AHEAD

    def run_chunk(
        self, command: ChunkCommand, opening: OpenRequest | None, allowed: Callable[[], float]
    ) -> asyncio.Task[list[ChunkReport]]:
        """Send a chunk to all stages.

        Args:
            opening: The command to send before a request's first chunk.
            allowed: Returns the seconds that a stage may take for the chunk.
        Returns:
            A task that returns the stages' reports. It finishes after the tasks of all earlier chunks, and
                raises the errors of `Stage`.
        """
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
        chunks[0].add_done_callback(self._entry_left)
        self._last = self.spawn(self._reports([*opened, *chunks], self._last))
        return self._last

    def abandon(self, serial: int) -> None:
        for stage in self._stages:
            stage.abandon(serial)

    def close(self, request_id: str) -> list[asyncio.Task[Any]]:
        """Close a request on all stages. Each task returns whether the request's pages are free there."""
        return self._all(f"closing {request_id}", [stage.close(request_id) for stage in self._stages])

    async def pages(self) -> list[int]:
        asked = self._all("counting its pages", [stage.pages_used() for stage in self._stages])
        return list(await asyncio.gather(*asked))

    def _all(self, command: str, replies: Sequence[Answer[Any]]) -> list[asyncio.Task[Any]]:
        outcomes: list[asyncio.Task[Any]] = []
        for stage, reply in enumerate(replies):
            outcomes.append(self.spawn(_outcome(settled(reply))))
            self._watch.expect(stage, command, lambda: self._slack_s, outcomes[-1])
        return outcomes

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that may outlive its caller. `idle` waits for all such tasks."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def idle(self) -> None:
        """Wait for all outstanding answers of the stages, then stop the watch."""
        with said_when_slow(lambda: f"answers that stages owe: {'; '.join(self._watch.owed)}"):
            while self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._watch.stop()

    async def _reports(
        self, outcomes: list[asyncio.Task[Any]], before: asyncio.Task[list[ChunkReport]] | None
    ) -> list[ChunkReport]:
        """Return a chunk's reports. Waits for earlier chunks first, because answers may arrive out of
        order."""
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

    def _entry_left(self, entry: asyncio.Future[Any]) -> None:
        self._entering -= 1
        if not entry.cancelled() and entry.exception() is None:
            self._on_entry_free()


async def _outcome(answer: Coroutine[Any, Any, T]) -> T | RequestFailed:
    """Await an answer. Returns RequestFailed as a value; raises any other error, which ends the group."""
    try:
        return await answer
    except RequestFailed as error:
        return error
