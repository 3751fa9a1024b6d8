"""The pipeline of a prefill group's stages.

At most one batch of chunks per stage is in flight, and one more is queued at the first stage, so that this
stage never idles. The limit keeps a new request's wait for chunks of other requests short.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from deltafront.workers.messages.stages import ChunkCommand, ChunkReport, OpenRequest, RequestFailed
from deltafront.workers.prefill.group.watch import StageWatch
from deltafront.workers.roles import Answer, Stage, finished, settled
from deltafront.workers.waits import said_when_slow

T = TypeVar("T")

_AHEAD = 1
"""Number of batches that are queued at the first stage while it computes another."""

Outcome = list[ChunkReport] | RequestFailed
"""The reports of all stages of one chunk, or the error that ends its request."""


class Pipeline:
    """Sends each command to all stages before it returns.

    Args:
        on_entry_free: Called when the first stage has finished a batch.
        slack_s: Seconds that a command may take before its stage is pinged (`watch`).
    """

    def __init__(
        self, stages: Sequence[Stage], watch: StageWatch, on_entry_free: Callable[[], None], slack_s: float
    ) -> None:
        self._stages = tuple(stages)
        self._watch = watch
        self._slack_s = slack_s
        self._on_entry_free = on_entry_free
        self._batches = 0
        self._entering = 0
        self._last: asyncio.Task[list[Outcome]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def ready(self) -> bool:
        return self._entering <= _AHEAD and self._batches < len(self._stages) + _AHEAD

    def run_batch(
        self,
        commands: Sequence[ChunkCommand],
        openings: Sequence[OpenRequest],
        allowed: Callable[[], float],
    ) -> asyncio.Task[list[Outcome]]:
        """Send a batch of chunks to all stages.

        Args:
            commands: Chunks of different requests.
            openings: The commands to send before the first chunks of requests.
            allowed: Returns the seconds that a stage may take for the batch.
        Returns:
            A task that returns each chunk's outcome. It finishes after the tasks of all earlier batches, and
                raises the errors of `Stage`.
        """
        opened = {
            opening.request_id: self._all(
                f"opening {opening.request_id}", [stage.open(opening) for stage in self._stages]
            )
            for opening in openings
        }
        first, *others = self._stages
        blind = [replace(command, token_ids=b"") for command in commands]
        replies = [first.run_batch(commands), *(stage.run_batch(blind) for stage in others)]
        self._batches += 1
        self._entering += 1
        places = (f"the chunk of {command.request_id} at token {command.start}" for command in commands)
        name, before = ", ".join(places), None
        batches: list[asyncio.Task[list[ChunkReport | RequestFailed]]] = []
        for stage, reply in enumerate(replies):
            batches.append(self.spawn(finished(reply)))
            before = self._watch.expect(stage, name, allowed, batches[-1], before)
        batches[0].add_done_callback(self._entry_left)
        self._last = self.spawn(self._outcomes(commands, opened, batches, self._last))
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

    async def _outcomes(
        self,
        commands: Sequence[ChunkCommand],
        opened: Mapping[str, Sequence[asyncio.Task[Any]]],
        batches: Sequence[asyncio.Task[list[ChunkReport | RequestFailed]]],
        before: asyncio.Task[list[Outcome]] | None,
    ) -> list[Outcome]:
        """Return each chunk's outcome. Waits for earlier batches first, because answers may arrive out of
        order."""
        try:
            await asyncio.gather(*itertools.chain(*opened.values()), *batches)
            if before is not None:
                await asyncio.wait([before])
        finally:
            self._batches -= 1
        each = zip(*(batch.result() for batch in batches), strict=True)
        return [
            _outcome_of([*(task.result() for task in opened.get(command.request_id, ())), *answers])
            for command, answers in zip(commands, each, strict=True)
        ]

    def _entry_left(self, entry: asyncio.Future[Any]) -> None:
        self._entering -= 1
        if not entry.cancelled() and entry.exception() is None:
            self._on_entry_free()


def _outcome_of(answers: Sequence[Any]) -> Outcome:
    failed = next((answer for answer in answers if isinstance(answer, RequestFailed)), None)
    return failed or [answer for answer in answers if isinstance(answer, ChunkReport)]


async def _outcome(answer: Coroutine[Any, Any, T]) -> T | RequestFailed:
    """Await an answer. Returns RequestFailed as a value; raises any other error, which ends the group."""
    try:
        return await answer
    except RequestFailed as error:
        return error
