"""Files and batches as OpenAI's objects. They are stored in the same form."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, Literal

from pydantic import BaseModel, Field

from deltafront.service.door.json_body import NamedNotFound
from deltafront.service.errors import shown

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
CANCELLABLE: tuple[Status, ...] = ("validating", "in_progress")
ENDED: tuple[Status, ...] = ("completed", "failed", "expired", "cancelled")


class UnknownFile(NamedNotFound):
    param, openai_code = "file_id", "file_not_found"

    def __init__(self, file_id: str) -> None:
        super().__init__(f"there is no file {shown(file_id)} of this caller")


class UnknownBatch(NamedNotFound):
    param, openai_code = "batch_id", "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"there is no batch {shown(batch_id)} of this caller")


class FileRecord(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class LineCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class LineProblem(BaseModel):
    """An error in the input file, for which the whole batch fails. `line` begins at 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Problems(BaseModel):
    object: Literal["list"] = "list"
    data: list[LineProblem]


class BatchRecord(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: Problems | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: LineCounts = Field(default_factory=LineCounts)
    metadata: dict[str, str] | None = None

    def ended(self, status: Status) -> None:
        self.status = status
        setattr(self, f"{status}_at", now())


def now() -> int:
    return int(time.time())


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    """Make an id. Ids sort by the time at which they were made."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def is_id(text: str, prefix: str) -> bool:
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


def page_of(records: list[FileRecord] | list[BatchRecord], has_more: bool) -> dict[str, Any]:
    """Make OpenAI's list object."""
    ends = {"first_id": records[0].id, "last_id": records[-1].id} if records else {}
    return {"object": "list", "data": [one.model_dump() for one in records], "has_more": has_more, **ends}
