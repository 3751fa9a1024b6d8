"""Each caller's files and batches in the storage.

    callers/CALLER/files/ID.json, ID.jsonl      a file's record and content
    callers/CALLER/batches/ID.json, ID.cancel   a batch's record; when its cancellation was asked for
    callers/CALLER/parts/ID/                    what a batch has answered
    queue/ID.CALLER                             a batch that has not ended

A batch's record is written by the door that works on it (`lease.py`). Other doors leave ID.cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from deltafront.service.door.batches.records import (
    CANCELLABLE,
    ENDED,
    BatchRecord,
    FileRecord,
    Purpose,
    UnknownBatch,
    UnknownFile,
    is_id,
    new_id,
    now,
)
from deltafront.service.door.batches.storage import Storage
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.callers import ANYONE

FILES = 1000
"""The most files that a caller has."""
BATCHES = 1000
"""The batches of a caller that are kept. A new one takes the place of the oldest that has ended."""
_UNFINISHED = 100
"""The most batches of a caller that have not ended."""
_LONGEST_NAME = 255
_ANYONE = "anyone"
_RECORD = ".json"
_Record = TypeVar("_Record", FileRecord, BatchRecord)
Page = tuple[list[_Record], bool]
"""Records, and whether there are more."""


class Catalog:
    """Every method blocks: call it in `storage.run`.

    Args:
        max_bytes: Bytes of all callers. One caller may use at most half of them, and never more than what
            then stays free.
    """

    def __init__(self, storage: Storage, max_bytes: int) -> None:
        self.storage = storage
        self._max_bytes = max_bytes

    def room(self, owner: str) -> int:
        """Return the bytes that a caller may add, by the rule of `fits_share`."""
        sizes = self.storage.sizes("callers")
        free = max(0, self._max_bytes - sum(sizes.values()))
        return free if owner == ANYONE else max(0, free - sizes.get(owner, 0)) // 2

    def add_file(self, owner: str, filename: str, size: int, content: Iterable[bytes]) -> FileRecord:
        """Store an uploaded file. Raises InvalidArgument if the caller has no room for it."""
        if len(self._ids(owner, "files")) >= FILES:
            raise InvalidArgument("file", f"is one too many: a caller has at most {FILES} files; delete some")
        if size > (room := self.room(owner)):
            raise InvalidArgument("file", f"has {size} bytes, and this caller may add {room}: delete files")
        return self.put_file(owner, new_id("file-"), filename, "batch", content)

    def put_file(
        self, owner: str, file_id: str, filename: str, purpose: Purpose, content: Iterable[bytes]
    ) -> FileRecord:
        """Store a file. Its record follows the content, so that no file is seen before it is complete."""
        size = self.storage.write(content_of(owner, file_id), content)
        record = FileRecord(
            id=file_id, bytes=size, created_at=now(), filename=filename[:_LONGEST_NAME], purpose=purpose
        )
        self._save(owner, "files", record)
        return record

    def file(self, owner: str, file_id: str) -> FileRecord:
        """Raises UnknownFile."""
        try:
            return self._load(owner, "files", file_id, FileRecord)
        except FileNotFoundError:
            raise UnknownFile(file_id) from None

    def files(self, owner: str, after: str, limit: int, oldest_first: bool, purpose: str) -> Page[FileRecord]:
        def wanted(record: FileRecord) -> bool:
            return not purpose or record.purpose == purpose

        return self._page(owner, "files", FileRecord, after, limit, oldest_first, wanted)

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises UnknownFile, or InvalidArgument for the input of a batch that has not ended."""
        self.file(owner, file_id)
        for other, batch_id in self.queue():
            batch = self.batch(owner, batch_id) if other == owner else None
            if batch is not None and batch.input_file_id == file_id and batch.status not in ENDED:
                raise InvalidArgument("file_id", f"is the input of {batch_id}: cancel this batch first")
        self.storage.delete(_path(owner, "files", file_id + _RECORD))
        self.storage.delete(content_of(owner, file_id))

    def add_batch(self, owner: str, batch: BatchRecord) -> None:
        """Store a new batch, and queue it. Raises UnknownFile, or InvalidArgument if there are too many."""
        if self.file(owner, batch.input_file_id).purpose != "batch":
            raise InvalidArgument("input_file_id", "must be a file of purpose batch")
        unfinished = {batch_id for other, batch_id in self.queue() if other == owner}
        if len(unfinished) >= _UNFINISHED:
            raise InvalidArgument("", f"a caller has at most {_UNFINISHED} batches that have not ended")
        ended = [one for one in self._ids(owner, "batches") if one not in unfinished]
        for batch_id in ended[: max(0, len(ended) + len(unfinished) + 1 - BATCHES)]:
            self._forget(owner, batch_id)
        self.save_batch(owner, batch)
        self.storage.write(f"queue/{batch.id}.{_folder(owner)}", ())

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises UnknownBatch."""
        try:
            record = self._load(owner, "batches", batch_id, BatchRecord)
        except FileNotFoundError:
            raise UnknownBatch(batch_id) from None
        if record.status in CANCELLABLE and (asked := self.cancelled_at(owner, batch_id)) is not None:
            record.status, record.cancelling_at = "cancelling", asked
        return record

    def batches(self, owner: str, after: str, limit: int) -> Page[BatchRecord]:
        return self._page(owner, "batches", BatchRecord, after, limit, False, lambda _: True)

    def save_batch(self, owner: str, batch: BatchRecord) -> None:
        self._save(owner, "batches", batch)

    def cancel_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Ask the door that works on a batch to cancel it. Raises UnknownBatch, or InvalidArgument if it has
        ended."""
        record = self.batch(owner, batch_id)
        if record.status in CANCELLABLE:
            self.storage.write(_path(owner, "batches", f"{batch_id}.cancel"), [str(now()).encode()])
            return self.batch(owner, batch_id)
        if record.status != "cancelling":
            raise InvalidArgument("batch_id", f"cannot be cancelled: it is {record.status}")
        return record

    def cancelled_at(self, owner: str, batch_id: str) -> int | None:
        """Return when a batch's cancellation was asked for; None: it was not."""
        try:
            return int(self.storage.read(_path(owner, "batches", f"{batch_id}.cancel")))
        except FileNotFoundError:
            return None

    def queue(self) -> list[tuple[str, str]]:
        """Return owner and id of the batches that have not ended, the oldest first."""
        named = (name.partition(".") for name in self.storage.names("queue"))
        return [(ANYONE if caller == _ANYONE else caller, batch_id) for batch_id, _, caller in named]

    def end_batch(self, owner: str, batch_id: str) -> None:
        """Take an ended batch off the queue."""
        self.storage.delete(f"queue/{batch_id}.{_folder(owner)}")
        self.storage.delete(parts_of(owner, batch_id))

    def _forget(self, owner: str, batch_id: str) -> None:
        for ending in (_RECORD, ".cancel"):
            self.storage.delete(_path(owner, "batches", batch_id + ending))

    def _ids(self, owner: str, kind: str) -> list[str]:
        names = self.storage.names(_path(owner, kind))
        return [name.removesuffix(_RECORD) for name in names if name.endswith(_RECORD)]

    def _save(self, owner: str, kind: str, record: BatchRecord | FileRecord) -> None:
        self.storage.write(_path(owner, kind, record.id + _RECORD), [record.model_dump_json().encode()])

    def _load(self, owner: str, kind: str, record_id: str, form: type[_Record]) -> _Record:
        """Raises FileNotFoundError, also for what is no id, because clients' ids become paths."""
        if not is_id(record_id, "file-" if kind == "files" else "batch_"):
            raise FileNotFoundError(record_id)
        return form.model_validate_json(self.storage.read(_path(owner, kind, record_id + _RECORD)))

    def _page(
        self,
        owner: str,
        kind: str,
        form: type[_Record],
        after: str,
        limit: int,
        oldest_first: bool,
        wanted: Callable[[_Record], bool],
    ) -> Page[_Record]:
        ids: Sequence[str] = sorted(self._ids(owner, kind), reverse=not oldest_first)
        if after:
            ids = [one for one in ids if (one > after if oldest_first else one < after)]
        found: list[_Record] = []
        for record_id in ids:
            try:
                record = self._load(owner, kind, record_id, form)
            except FileNotFoundError:  # it was just deleted
                continue
            if wanted(record):
                found.append(record)
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit


def content_of(owner: str, file_id: str) -> str:
    return _path(owner, "files", f"{file_id}.jsonl")


def parts_of(owner: str, batch_id: str) -> str:
    return _path(owner, "parts", batch_id)


def _path(owner: str, kind: str, name: str = "") -> str:
    return f"callers/{_folder(owner)}/{kind}/{name}".rstrip("/")


def _folder(owner: str) -> str:
    return _ANYONE if owner == ANYONE else owner
