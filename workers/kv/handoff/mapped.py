"""KV hand-off without copies on one GPU: a stage maps the decode worker's pages and writes KV into them. An
announcement only tells the decode worker that KV is complete.

The decode worker owns the memory. It keeps a request's pages allocated until the stage closes them after its
last write, or until the stage's process has ended. A stage's process ends if the decode worker whose memory
it maps ends, or if it gets a request for another decode worker (docs/decisions/0024).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from deltafront.workers.kv.cache import PagedKVCache, Sides
from deltafront.workers.kv.handoff.outbox import MAX_UNANSWERED_BYTES, ActorOutbox, PageOpener
from deltafront.workers.kv.handoff.protocols import Destination, HandoffError, UsePages, described
from deltafront.workers.kv.handoff.stream import MappedSlots, MessageStream
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.kv.peer_memory import PeerMemory, end_process, home, peer_memory, when_gone
from deltafront.workers.kv.states import StateCache
from deltafront.workers.messages.requests import DecodeFailed
from deltafront.workers.messages.stages import KVAnnouncement, OtherMemory, PageWriter
from deltafront.workers.settings import HandoffConfig


class MappedSender:
    """Opens KV streams into the pages of the decode worker whose memory this stage has mapped (`KVSender`).

    Args:
        memory: The name of the memory that the stage has mapped (`PagedKVCache.memory`).
        outbox: Opens the pages of requests on decode workers.
        background: As in `MessageSender`.
        states: The mapped states; None: the model has none.
        end: Ends this process. Called if a new decode worker has replaced the one whose memory is mapped,
            because the stage would write KV into the wrong memory.
    """

    def __init__(
        self,
        peers: PeerMemory,
        memory: str,
        outbox: PageOpener,
        *,
        background: bool,
        states: StateCache | None = None,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self._states = states
        self._peers, self._memory, self._outbox, self._end = peers, memory, outbox, end
        self._thread = ThreadPoolExecutor(1, "kv-send") if background else None

    def open(self, destination: Destination) -> MessageStream:
        writer = PageWriter(
            request_id=destination.request_id,
            attempt=destination.attempt,
            home=self._peers.home,
            pid=os.getpid(),
            memory=self._memory,
            state_places=destination.state_places,
        )
        worker = destination.decode_worker
        try:
            opened = self._outbox.open_pages(worker, writer)
        except OtherMemory as error:
            self._end(str(error))
            raise HandoffError(str(error)) from error
        close = partial(self._outbox.close_pages, worker, writer)
        return MessageStream(
            replace(destination, pages=opened.pages),
            MappedExport(self._peers.mark, close),
            self._outbox,
            self._thread,
            message_bytes=None,
            in_place=True,
            slots=None if self._states is None else MappedSlots(self._states, opened.states),
        )


class MappedExport:
    """Announces one request's KV, which the stage has written into a decode worker's pages
    (`stream.KVExport`). `mark` is `PeerMemory.mark`; `close` releases the pages."""

    def __init__(self, mark: Callable[[], Any], close: Callable[[], None]) -> None:
        self._mark, self._close = mark, close
        self._last: Any = None
        self._revoked = self._closed = False

    def layer(self, start: int, sides_T: Sides) -> tuple[None, Any]:
        return None, self._mark()

    def payload(self, layers: Sequence[Any]) -> None:
        return None

    def revoke(self) -> bool:
        """Close the pages if the device has finished all writes to them. Returns whether they are closed."""
        if not self._revoked:
            self._revoked, self._last = True, self._mark()
        if not self._closed and (self._last is None or self._last.query()):
            self._closed, self._last = True, None
            self._close()
        return self._closed


class MappedReader:
    """Accepts announced KV without a copy (`KVReader`), because the KV is already in the request's pages."""

    async def read(
        self, announcement: KVAnnouncement, layers: Sequence[int], use_pages: UsePages
    ) -> int | None:
        if announcement.payload is not None:
            raise HandoffError(f"{described(announcement)} lies elsewhere, not in the decode worker's pages")
        with use_pages() as pages:
            return None if pages is None else 0


class PageWriters:
    """Keeps the pages of requests allocated while stages write to them. Only the event loop's thread uses it.

    `memory` is the `PagedKVCache.memory` of the decode worker's pages.
    """

    def __init__(self, memory: str) -> None:
        self._memory = memory
        self._open: dict[PageWriter, ExitStack] = {}
        self._watched: set[int] = set()

    def open(self, writer: PageWriter, pages: RequestPages) -> tuple[int, ...]:
        """Keep the pages allocated until `close`, and return the page table.

        Raises:
            DecodeFailed: The stage is on another GPU or host, has opened the pages before, or the request
                has ended.
            OtherMemory: The stage has mapped another decode worker's memory.
        """
        if writer.home != home():
            raise DecodeFailed(
                f"a stage elsewhere ({writer.home}; here: {home()}) cannot write "
                "to these pages: with handoff.transport: mapped both are in one container of one host"
            )
        if writer.memory != self._memory:
            raise OtherMemory("a stage maps another decode worker's memory, so it cannot write to this one's")
        if writer in self._open:
            raise DecodeFailed(f"the stage has opened the pages of {writer.request_id} before")
        with ExitStack() as use:
            table = use.enter_context(pages.use())
            if table is None:
                raise DecodeFailed(f"request {writer.request_id} has ended")
            self._open[writer] = use.pop_all()
        if writer.pid not in self._watched:
            self._watched.add(writer.pid)
            when_gone(writer.pid, partial(self._gone, writer.pid))
        return table

    def close(self, writer: PageWriter) -> None:
        if writer in self._open:
            self._open.pop(writer).close()

    def _gone(self, pid: int) -> None:
        self._watched.discard(pid)
        for writer in [writer for writer in self._open if writer.pid == pid]:
            self.close(writer)


def sender(config: HandoffConfig, cache: PagedKVCache) -> MappedSender:
    outbox = ActorOutbox(MAX_UNANSWERED_BYTES, config.ack_timeout_s)
    peers, background = peer_memory(cache.device), cache.device.type == "cuda"
    return MappedSender(peers, cache.memory, outbox, background=background, states=cache.states)


def reader(config: HandoffConfig, cache: PagedKVCache, thread: Executor) -> MappedReader:
    return MappedReader()
