"""Receives an uploaded file. It is spooled on the door's disk until it is complete, so that the storage gets
whole files only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from deltafront.service.errors import Cancelled, InvalidArgument, Overloaded, TooSlow
from deltafront.service.request.callers import RETRY_S, fits_share

FILE_BYTES = 200 << 20
"""The largest file, as OpenAI's for batches."""
_FORM_BYTES = 1 << 16
"""Bytes of the form besides the file."""
_FIELDS = 8
_UPLOADS = 8
"""The most files that a door receives at once."""
_RECEIVE_S = 600.0
_IDLE_S = 10.0


@dataclass
class _Bounded:
    """A request's messages, until they have too many bytes or do not come."""

    request: Request
    size: int = 0

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout(_IDLE_S):
                message = await self.request.receive()
        except TimeoutError:
            raise TooSlow(f"nothing of the file arrived for {_IDLE_S:.0f} s") from None
        self.size += len(message.get("body", b""))
        if self.size > FILE_BYTES + _FORM_BYTES:
            raise InvalidArgument("file", f"is larger than {FILE_BYTES} bytes")
        return message


class BatchUploads:
    """The uploads of a door."""

    def __init__(self) -> None:
        self._owners: list[str] = []

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, owner: str) -> AsyncIterator[UploadFile]:
        """Receive the form of an upload. Its file is closed at the end of the `with` block. Raises
        DeltafrontError."""
        mine, every = self._owners.count(owner) + 1, len(self._owners) + 1
        if not fits_share(owner, mine, every, _UPLOADS):
            raise Overloaded("this server receives as many files as it can: try again", retry_after_s=RETRY_S)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > FILE_BYTES + _FORM_BYTES:
            raise InvalidArgument("file", f"is larger than {FILE_BYTES} bytes")
        self._owners.append(owner)
        try:
            async with contextlib.AsyncExitStack() as closing:
                yield await _form(request, closing)
        finally:
            self._owners.remove(owner)


async def _form(request: Request, closing: contextlib.AsyncExitStack) -> UploadFile:
    bounded = Request(request.scope, _Bounded(request).receive)
    closing.push_async_callback(bounded.close)
    try:
        async with asyncio.timeout(_RECEIVE_S):
            form = await bounded.form(max_files=1, max_fields=_FIELDS, max_part_size=_FORM_BYTES)
    except TimeoutError:
        raise TooSlow(f"the file did not arrive within {_RECEIVE_S:.0f} s") from None
    except ClientDisconnect:
        raise Cancelled("the client left while it sent the file") from None
    except HTTPException as error:
        raise InvalidArgument("", f"the form is not read: {error.detail}") from None
    for name in form.keys() - {"file", "purpose"}:
        raise InvalidArgument(name[:_FORM_BYTES], "is not supported by this server: leave it out")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidArgument("file", "is missing: send a form (multipart/form-data) with file and purpose")
    if form.get("purpose") != "batch":
        raise InvalidArgument("purpose", "must be batch: files are for batches here")
    if (file.size or 0) > FILE_BYTES:
        raise InvalidArgument("file", f"is larger than {FILE_BYTES} bytes")
    return file
