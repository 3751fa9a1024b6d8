"""A batch's answers, stored in parts. Object storage cannot append to a file, so each part is a file.

A part has lines of `NUMBER OUTCOME JSON`: the line of the input, from 0 on, `+` or `-`, and a line of the
output or the error file.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deltafront.service.door.batches.catalog import Catalog, parts_of
from deltafront.service.door.batches.records import BatchRecord

_AT_ONCE = 64
"""Parts that are read at once, because each takes object storage a round trip."""


@dataclass(frozen=True)
class Answered:
    """The answer of one line of the input. good: it belongs into the output file, not the error file."""

    number: int
    good: bool
    line: bytes

    def packed(self) -> bytes:
        return b"%d %s %s" % (self.number, b"+" if self.good else b"-", self.line)

    @staticmethod
    def unpacked(packed: bytes) -> Answered:
        number, outcome, line = packed.split(b" ", 2)
        return Answered(int(number), outcome == b"+", line)


class BatchAnswers:
    """The parts of one batch. Every method blocks: call it in `storage.run`. door: in the parts' names."""

    def __init__(self, catalog: Catalog, owner: str, batch_id: str, door: str) -> None:
        self._catalog = catalog
        self._storage = catalog.storage
        self._owner = owner
        self._folder = parts_of(owner, batch_id)
        self._door = door

    def add(self, answers: Iterable[Answered]) -> int:
        """Store answers as a part, and return its bytes."""
        name = f"{self._folder}/{time.time_ns():020d}-{self._door}"
        return self._storage.write(name, (answer.packed() for answer in answers))

    def read(self) -> Iterator[Answered]:
        """Yield each line's first answer. There are two if a door that had lost its lease went on."""
        seen: set[int] = set()
        names = [f"{self._folder}/{name}" for name in self._storage.names(self._folder)]
        for first in range(0, len(names), _AT_ONCE):
            for part in self._storage.read_all(names[first : first + _AT_ONCE]):
                for packed in part.splitlines(keepends=True):
                    answer = Answered.unpacked(packed)
                    if answer.number not in seen:
                        seen.add(answer.number)
                        yield answer

    def outcomes(self) -> dict[int, bool]:
        return {answer.number: answer.good for answer in self.read()}

    def merge(self, batch: BatchRecord, unanswered: Iterable[bytes]) -> None:
        """Write the output file and the error file, as far as the batch names them.

        Args:
            unanswered: Lines of the error file for lines that were not asked.
        """
        for good, file_id in ((True, batch.output_file_id), (False, batch.error_file_id)):
            if file_id is not None:
                lines = (answer.line for answer in self.read() if answer.good is good)
                name = f"{batch.id}_{'output' if good else 'error'}.jsonl"
                content = itertools.chain(lines, () if good else unanswered)
                self._catalog.put_file(self._owner, file_id, name, "batch_output", content)
