"""The endpoints `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deltafront.service.door.batches.asking import Asker
from deltafront.service.door.batches.catalog import Catalog, content_of
from deltafront.service.door.batches.lease import TURN_S
from deltafront.service.door.batches.records import BatchRecord, FileRecord, new_id, now, page_of
from deltafront.service.door.batches.runner import BatchRunner
from deltafront.service.door.batches.storage import Storage
from deltafront.service.door.batches.upload import BatchUploads
from deltafront.service.door.edges.call import EdgeCall, UnaryCall, request_id_of
from deltafront.service.door.edges.edge import Json
from deltafront.service.door.json_body import STRICT, BodyRules
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.context import Accepted
from deltafront.service.request.handler import RequestHandler

_WINDOW_S = 86_400
_PAGE = 100
"""The most records of a page, and their number if a client does not say."""
_BLOCK_BYTES = 1 << 20
_CONTENT = "application/octet-stream"
_RULES = BodyRules(labels=(), no_op_values={})
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


@dataclass(frozen=True)
class BatchOptions:
    """How a door serves batches.

    Args:
        max_bytes: Bytes of all callers' files.
        width: The most lines that are asked at once.
        door: The door's id.
        count: Counts answered lines: whether they succeeded, and their number.
        turn_s: Seconds between two looks at the queue.
    """

    storage: Storage
    max_bytes: int
    width: int
    door: str
    count: Callable[[bool, int], None]
    turn_s: float = TURN_S


class _BatchFields(BaseModel):
    model_config = STRICT

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)


class BatchDoor:
    """Makes the routes of files and batches. endpoints: what lines may call, by path."""

    def __init__(
        self,
        options: BatchOptions,
        requests: RequestHandler,
        endpoints: Mapping[str, EdgeCall],
        max_body_bytes: int,
    ) -> None:
        self._requests, self._endpoints = requests, endpoints
        self._storage = options.storage
        self._catalog = catalog = Catalog(self._storage, options.max_bytes)
        self._uploads = BatchUploads()
        self.runner = BatchRunner(
            catalog,
            Asker(requests, endpoints),
            options.door,
            options.width,
            max_body_bytes,
            options.count,
            options.turn_s,
        )
        any_edge = next(iter(endpoints.values())).edge
        self._create = UnaryCall(any_edge, requests, max_body_bytes, rpc="Batches", work=self._create_batch)

    def routes(self) -> list[Route]:
        files, batches = "/v1/files", "/v1/batches"
        return [
            Route(files, self._upload, methods=["POST"]),
            Route(files, self._list_files, methods=["GET"]),
            Route(f"{files}/{{file_id}}", self._file, methods=["GET"]),
            Route(f"{files}/{{file_id}}", self._delete_file, methods=["DELETE"]),
            Route(f"{files}/{{file_id}}/content", self._content, methods=["GET"]),
            Route(batches, self._create, methods=["POST"]),
            Route(batches, self._list_batches, methods=["GET"]),
            Route(f"{batches}/{{batch_id}}", self._batch, methods=["GET"]),
            Route(f"{batches}/{{batch_id}}/cancel", self._cancel_batch, methods=["POST"]),
        ]

    @contextlib.asynccontextmanager
    async def _owner(self, request: Request, rpc: str) -> AsyncIterator[str]:
        headers, request_id = request.headers.items(), request_id_of(request)
        accepting = self._requests.accept(rpc, headers, request_id=request_id, counted=False)
        async with accepting as accepted:
            yield accepted.caller.owner

    async def _upload(self, request: Request) -> Response:
        async with self._owner(request, "Files") as owner, self._uploads.receive(request, owner) as upload:
            content = iter(partial(upload.file.read, _BLOCK_BYTES), b"")
            add, name = self._catalog.add_file, upload.filename or "file"
            record = await self._storage.run(add, owner, name, upload.size, content)
        return _said(record)

    async def _list_files(self, request: Request) -> Response:
        after, limit = _page_fields(request)
        oldest_first = request.query_params.get("order") == "asc"
        purpose = request.query_params.get("purpose", "")
        async with self._owner(request, "Files") as owner:
            files = self._catalog.files
            page = await self._storage.run(files, owner, after, limit, oldest_first, purpose)
        return JSONResponse(page_of(*page))

    async def _file(self, request: Request) -> Response:
        async with self._owner(request, "Files") as owner:
            return _said(await self._storage.run(self._catalog.file, owner, request.path_params["file_id"]))

    async def _delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        async with self._owner(request, "Files") as owner:
            await self._storage.run(self._catalog.delete_file, owner, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        async with self._owner(request, "Files") as owner:
            record = await self._storage.run(self._catalog.file, owner, file_id)
        blocks = self._blocks(content_of(owner, file_id), record.bytes)
        return StreamingResponse(blocks, headers={"content-length": str(record.bytes)}, media_type=_CONTENT)

    async def _blocks(self, name: str, size: int) -> AsyncIterator[bytes]:
        for start in range(0, size, _BLOCK_BYTES):
            end = min(start + _BLOCK_BYTES, size)
            yield await self._storage.run(self._storage.read, name, start, end)

    async def _create_batch(self, requests: RequestHandler, accepted: Accepted, body: bytes) -> Json:
        fields = _RULES.read(_BatchFields, body, requests.model)
        if fields.endpoint not in self._endpoints:
            raise InvalidArgument("endpoint", f"must be one of {', '.join(self._endpoints)}")
        if fields.completion_window != "24h":
            raise InvalidArgument("completion_window", "must be 24h")
        created = now()
        batch = BatchRecord(
            id=new_id("batch_"),
            model=requests.model,
            created_at=created,
            expires_at=created + _WINDOW_S,
            **fields.model_dump(),
        )
        await self._storage.run(self._catalog.add_batch, accepted.caller.owner, batch)
        return batch.model_dump()

    async def _list_batches(self, request: Request) -> Response:
        after, limit = _page_fields(request)
        async with self._owner(request, "Batches") as owner:
            page = await self._storage.run(self._catalog.batches, owner, after, limit)
        return JSONResponse(page_of(*page))

    async def _batch(self, request: Request) -> Response:
        async with self._owner(request, "Batches") as owner:
            return _said(await self._storage.run(self._catalog.batch, owner, request.path_params["batch_id"]))

    async def _cancel_batch(self, request: Request) -> Response:
        cancel, batch_id = self._catalog.cancel_batch, request.path_params["batch_id"]
        async with self._owner(request, "Batches") as owner:
            return _said(await self._storage.run(cancel, owner, batch_id))


def _said(record: FileRecord | BatchRecord) -> Response:
    return JSONResponse(record.model_dump())


def _page_fields(request: Request) -> tuple[str, int]:
    """Return `after` and `limit`. A larger limit than ours is ours: clients ask for the next page. Raises
    InvalidArgument."""
    limit = request.query_params.get("limit", str(_PAGE))[:9]
    if not limit.isdecimal() or not int(limit):
        raise InvalidArgument("limit", "must be a whole number above 0")
    return request.query_params.get("after", ""), min(int(limit), _PAGE)
