"""Asks a batch's lines as requests of its caller, at the lowest service tier."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from deltafront.service.door.batches.lines import answered_line, body_of
from deltafront.service.door.edges.call import EdgeCall
from deltafront.service.door.edges.edge import Json
from deltafront.service.door.edges.errors import status_of
from deltafront.service.errors import DeltafrontError, Overloaded, Unauthenticated, Unavailable
from deltafront.service.request.handler import RequestHandler

_TRIES = 5
"""Tries of a line whose workers fail, because a line may be what kills them."""
_LEAST_PAUSE_S = 1.0
_NO_TOKEN_PAUSE_S = 30.0
"""The pause of a batch whose caller's token is not known now. Maybe the token file is being replaced."""


@dataclass(frozen=True)
class Later:
    """A line that cannot be answered now. Its batch pauses for so long. tried: workers failed on it."""

    pause_s: float
    tried: bool = False


class Asker:
    """endpoints: the endpoints of batches, by path."""

    def __init__(self, requests: RequestHandler, endpoints: Mapping[str, EdgeCall]) -> None:
        self._requests = requests
        self.endpoints = endpoints

    async def ask(
        self, owner: str, endpoint: str, custom_id: str, raw: bytes, tries: int
    ) -> tuple[bool, bytes] | Later:
        """Return whether a line succeeded, and its line of the output or error file.

        Args:
            tries: How often workers failed on it before.
        """
        if not self._requests.ready:
            return Later(_LEAST_PAUSE_S)
        call, request_id = self.endpoints[endpoint], uuid.uuid4().hex
        status, answer = 200, Json()
        try:
            body = await self._requests.text_budget.work(len(raw), lambda _: body_of(raw))
            answer = await call.answer(self._requests.caller_of(owner), body, request_id)
        except DeltafrontError as error:
            later = _later(error, tries)
            if later is not None:
                return later
            status, answer = status_of(error), call.edge.error(error, self._requests.positions, request_id)
        return status == 200, await asyncio.to_thread(answered_line, custom_id, status, request_id, answer)


def _later(error: DeltafrontError, tries: int) -> Later | None:
    """Return when to try a line again; None: the error is its answer."""
    if isinstance(error, Unauthenticated):
        return Later(_NO_TOKEN_PAUSE_S)
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        return Later(max(error.retry_after_s, _LEAST_PAUSE_S))
    if isinstance(error, Unavailable) and tries + 1 < _TRIES:
        return Later(_LEAST_PAUSE_S, tried=True)
    return None
