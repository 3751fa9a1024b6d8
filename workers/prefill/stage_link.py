"""What a prefill group's controller and its stages agree on, whatever is between them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from ..messages import ChunkCommand, ChunkReport, OpenRequest, RequestFailed


class StageLink(Protocol):
    """A stage, as the controller sees it. Each method sends its command before it returns; commands run
    in the order sent. What is returned is awaited for the outcome, of which RequestFailed concerns one
    request and anything else the whole group."""

    def open(self, request: OpenRequest) -> Awaitable[None]: ...

    def run_chunk(self, command: ChunkCommand) -> Awaitable[ChunkReport]: ...

    def close(self, request_id: str) -> Awaitable[None]: ...

    def abandon(self, serial: int) -> None:
        """Stop computing this request's chunks: they fail with RequestFailed, within a layer's time.
        Overtakes the commands; the request is closed all the same."""

    def pages_used(self) -> Awaitable[int]: ...

    def stop(self) -> None:
        """End the stage, even in the middle of a chunk: every outcome still awaited becomes an error."""


async def outcome(reply: Awaitable[Any]) -> Any:
    """A stage's answer; one request's failure as a value, the group's as an exception."""
    try:
        return await reply
    except RequestFailed as error:
        return error
