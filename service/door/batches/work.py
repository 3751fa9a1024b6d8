"""Works on one batch: checks its input, asks its lines, and writes its output and error files.

It can stop anywhere and begin again at any door. Lines whose answers are stored are not asked again; answers
are stored every second.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from deltafront.service.door.batches.answers import Answered, BatchAnswers
from deltafront.service.door.batches.asking import Asker, Later
from deltafront.service.door.batches.catalog import Catalog, content_of
from deltafront.service.door.batches.lines import Line, read_lines, unanswered_line
from deltafront.service.door.batches.records import (
    ENDED,
    BatchRecord,
    LineProblem,
    Problems,
    Status,
    new_id,
    now,
)

_STORE_S = 1.0


@dataclass(frozen=True)
class _Ending:
    """Why no more lines are asked: the batch's status, and the error of the lines that are left, if they
    become error lines."""

    status: Status
    code: str = ""
    message: str = ""


_COMPLETED = _Ending("completed")
_CANCELLED = _Ending("cancelled")
_EXPIRED = _Ending("expired", "batch_expired", "the line was not answered before the batch's window ended")
_FULL = _Ending("completed", "storage_full", "this caller's files have no room for more answers: delete some")


class BatchWork:
    """One batch at one door.

    Args:
        slots: A place for each line that the door may ask at once, over all batches.
        width: Number of these places.
        check: Raises LeaseLost if this door may not work any more.
        count: Counts answered lines: whether they succeeded, and their number.
    """

    def __init__(
        self,
        catalog: Catalog,
        asker: Asker,
        owner: str,
        batch: BatchRecord,
        *,
        door: str,
        slots: asyncio.Semaphore,
        width: int,
        max_line_bytes: int,
        check: Callable[[], None],
        count: Callable[[bool, int], None],
    ) -> None:
        self._catalog, self._storage, self._asker = catalog, catalog.storage, asker
        self._owner, self._batch = owner, batch
        self._answers = BatchAnswers(catalog, owner, batch.id, door)
        self._slots, self._width = slots, width
        self._max_line_bytes = max_line_bytes
        self._check, self._count = check, count
        self._lines: list[Line] = []
        self._todo: deque[int] = deque()
        self._tries: Counter[int] = Counter()
        self._buffer: list[Answered] = []
        self._resume_at = 0.0
        self._room = 0

    async def run(self) -> None:
        """Work until the batch has ended. Raises LeaseLost, or what the storage raises."""
        if self._batch.status not in ENDED and await self._begin():
            await self._end(await self._answer_lines())
        await self._storage.run(self._catalog.end_batch, self._owner, self._batch.id)

    async def _begin(self) -> bool:
        """Read the input, and what was answered before. Returns False if the batch has failed."""
        batch = self._batch
        self._lines, problems = await self._storage.run(self._read_input)
        if problems:
            batch.errors = Problems(data=problems)
            batch.ended("failed")
            await self._save()
            return False
        outcomes = await self._storage.run(self._answers.outcomes)
        self._todo.extend(number for number in range(len(self._lines)) if number not in outcomes)
        self._room = await self._storage.run(self._catalog.room, self._owner)
        counts = batch.request_counts
        counts.total, counts.completed = len(self._lines), sum(outcomes.values())
        counts.failed = len(outcomes) - counts.completed
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", now()
        await self._save()
        return True

    def _read_input(self) -> tuple[list[Line], list[LineProblem]]:
        try:
            with self._storage.open(self._input) as source:
                return read_lines(source, self._batch.endpoint, self._max_line_bytes)
        except FileNotFoundError:
            return [], [LineProblem(code="file_not_found", message="the input file is gone")]

    @property
    def _input(self) -> str:
        return content_of(self._owner, self._batch.input_file_id)

    async def _answer_lines(self) -> _Ending:
        ending = await self._ending()
        if ending is not None:
            return ending
        asking = {asyncio.create_task(self._ask_lines()) for _ in range(min(self._width, len(self._todo)))}
        try:
            while asking:
                done, asking = await asyncio.wait(asking, timeout=_STORE_S)
                for task in done:
                    task.result()
                await self._store()
                ending = await self._ending() if asking else None
                if ending is not None:
                    return ending
            return _COMPLETED
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await self._store()

    async def _ending(self) -> _Ending | None:
        batch = self._batch
        asked = await self._storage.run(self._catalog.cancelled_at, self._owner, batch.id)
        if asked is not None:
            batch.cancelling_at = asked
            return _CANCELLED
        if now() >= batch.expires_at:
            return _EXPIRED
        return _FULL if self._room <= 0 else None

    async def _ask_lines(self) -> None:
        """Ask one line after the other, until none is left."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._resume_at - clock()))
            async with self._slots:
                if self._resume_at > clock():
                    continue
                if not self._todo:
                    return
                number = self._todo.popleft()
                answer: tuple[bool, bytes] | Later | None = None
                try:
                    answer = await self._ask(number)
                finally:
                    if isinstance(answer, tuple):
                        self._buffer.append(Answered(number, *answer))
                    else:
                        self._todo.appendleft(number)
                if isinstance(answer, Later):
                    self._tries[number] += answer.tried
                    self._resume_at = clock() + answer.pause_s

    async def _ask(self, number: int) -> tuple[bool, bytes] | Later:
        line, endpoint = self._lines[number], self._batch.endpoint
        raw = await self._storage.run(self._storage.read, self._input, line.start, line.end)
        return await self._asker.ask(self._owner, endpoint, line.custom_id, raw, self._tries[number])

    async def _store(self) -> None:
        """Store the answers since the last call."""
        answers, self._buffer = self._buffer, []
        if not answers:
            return
        self._room -= await self._storage.run(self._answers.add, answers)
        good = sum(answer.good for answer in answers)
        counts = self._batch.request_counts
        counts.completed += good
        counts.failed += len(answers) - good
        self._count(True, good)
        self._count(False, len(answers) - good)
        await self._save()

    async def _end(self, ending: _Ending) -> None:
        batch, counts = self._batch, self._batch.request_counts
        left = sorted(self._todo) if ending.code else []
        batch.status, batch.finalizing_at = "finalizing", now()
        if ending is _CANCELLED:
            batch.status, batch.finalizing_at = "cancelling", None
        if counts.completed:
            batch.output_file_id = batch.output_file_id or new_id("file-")
        if counts.failed or left:
            batch.error_file_id = batch.error_file_id or new_id("file-")
        await self._save()
        ids = (self._lines[number].custom_id for number in left)
        unanswered = (unanswered_line(custom_id, ending.code, ending.message) for custom_id in ids)
        await self._storage.run(self._answers.merge, batch, unanswered)
        counts.failed += len(left)
        batch.ended(ending.status)
        await self._save()

    async def _save(self) -> None:
        self._check()
        await self._storage.run(self._catalog.save_batch, self._owner, self._batch)
