"""The requests on a decode worker: how they end, and when their pages are really free.

Ending a request and freeing its pages are two things: a step that is being computed, or K/V that is being
written, still touches the pages, and a page given away too early means wrong output for its next holder.
So work pins a request, and the last unpin frees what has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..messages import FinishReason
from .pages import DecodePages
from .request import DecodeRequest


class Lifecycle:
    """Requests by id, used from the event loop's thread only. wall: seconds since the epoch."""

    def __init__(self, pages: DecodePages, lease_s: float, wall: Callable[[], float]) -> None:
        self._pages = pages
        self._lease_s = lease_s
        self._wall = wall
        self._requests: dict[str, DecodeRequest] = {}

    def add(self, request: DecodeRequest) -> None:
        self._requests[request.request_id] = request

    def known(self, request_id: str) -> DecodeRequest | None:
        """A request that is here, ended or not."""
        return self._requests.get(request_id)

    def live(self, request_id: str) -> DecodeRequest | None:
        """A request that has not ended."""
        request = self._requests.get(request_id)
        return None if request is None or request.ended is not None else request

    def live_count(self) -> int:
        return sum(request.ended is None for request in self._requests.values())

    def close(self, request: DecodeRequest, reason: FinishReason, message: str) -> None:
        """The one place where a request ends; what comes later changes nothing."""
        if request.ended is not None:
            return
        request.ended = (reason, message)
        request.settled.set()
        request.logits = None
        if request.job is not None:
            request.events.put_nowait(request.finish(reason, message))
        self._free_if_idle(request)

    def forget(self, request: DecodeRequest) -> None:
        """Drop an ended request, which stays known until its caller has heard why. By then another one may
        have taken its id."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    def close_all(self, reason: FinishReason, message: str) -> None:
        for request in list(self._requests.values()):
            self.close(request, reason, message)

    def pin(self, request: DecodeRequest) -> None:
        request.pins += 1

    def unpin(self, request: DecodeRequest) -> None:
        request.pins -= 1
        self._free_if_idle(request)

    def renew(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].renewed = time.monotonic()

    def expire(self) -> None:
        """End sessions past their lease, and requests past their deadline or not renewed."""
        wall, now = self._wall(), time.monotonic()
        self._pages.sessions.expire(wall)
        for request in list(self._requests.values()):
            if now - request.renewed > self._lease_s:
                self.close(request, FinishReason.CANCELLED, "nobody renewed the request")
                self.forget(request)
            elif request.deadline is not None and wall >= request.deadline:
                self.close(request, FinishReason.DEADLINE, "the deadline passed")

    def _free_if_idle(self, request: DecodeRequest) -> None:
        if request.ended is not None and request.pins == 0 and not request.freed.is_set():
            self._pages.release(request.holding)
            request.freed.set()
