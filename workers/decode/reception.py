"""What stages hand over to a decode worker: K/V into the pages of its requests, and their first logits.

Used from the event loop's thread; K/V is written on the hand-off thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from ..kv.arrival import ArrivalError
from ..kv.cache import PagedKVCache
from ..kv.fetch import packed
from ..kv.handoff import Receiver
from ..messages.requests import DecodeFailed
from ..messages.stages import FirstLogits, HostKV, KVAnnouncement, KVRange
from .request import DecodeRequest
from .requests import Requests


class Reception:
    """Takes what is announced for requests that are here, and gives it back to who reads on after a death.

    receiver: writes into `cache` on `thread`. arrived: told of a request when something that it waited for
    has come. vocab: numbers of a row of logits. clock: seconds.
    """

    def __init__(
        self,
        receiver: Receiver,
        cache: PagedKVCache,
        thread: Executor,
        requests: Requests,
        arrived: Callable[[DecodeRequest], None],
        vocab: int,
        clock: Callable[[], float],
    ) -> None:
        self._receiver = receiver
        self._cache = cache
        self._thread = thread
        self._requests = requests
        self._arrived = arrived
        self._vocab = vocab
        self._clock = clock
        self._receiving: set[asyncio.Task[int]] = set()

    async def announce(self, announcement: KVAnnouncement) -> None:
        """Receive K/V into pages. Ignored for requests that are not here and for exact repetitions.

        A failed or contradictory announcement is raised, so that the sending stage stops as well:
        HandoffError, and ArrivalError for K/V that the request does not have. No answer is ever computed from
        what is incomplete then: the request fails, unless it is resumed before anybody waits for its K/V.
        """
        request = self._requests.live(announcement.request_id)
        if request is None:
            return
        began, arrival = self._clock(), request.arrival
        start, tokens, first = announcement.start, announcement.tokens, announcement.layer
        try:
            layers = range(first, first + announcement.layers)
            new = [layer for layer in layers if arrival.claim(layer, start, tokens)]
            if not new:
                return
            receiving = asyncio.create_task(self._receiver.receive(announcement, new, request.holding.hold))
            self._receiving.add(receiving)
            receiving.add_done_callback(self._receiving.discard)
            moved = await asyncio.shield(receiving)  # a caller that gives up must not stop a write half way
        except Exception as error:
            if arrival is request.arrival:  # else it belongs to a reading that was given up
                request.not_arrived(error)
            raise
        if moved:
            request.times.handoff_bytes += moved
            request.times.handoff_seconds += self._clock() - began
            for layer in new:
                arrival.written(layer, start, tokens)
            if request.arrival.complete and request.ended is None:
                request.times.complete = self._clock()
                request.settled.set()
                self._arrived(request)

    async def first_logits(self, message: FirstLogits) -> None:
        """Ignored for requests that are not here and for repetitions. Raises ArrivalError for logits that
        the request cannot use."""
        request = self._requests.live(message.request_id)
        if request is None or request.times.logits is not None:
            return
        logits_V = np.asarray(message.logits, dtype=np.float32)
        if request.order.session_id is not None or logits_V.shape != (self._vocab,):
            error = ArrivalError(f"unexpected logits {logits_V.shape}; the vocabulary is {self._vocab}")
            request.not_arrived(error)
            raise error
        request.logits = logits_V
        request.times.logits = self._clock()
        self._arrived(request)

    async def resume(self, request_id: str, points: Sequence[int]) -> int:
        """See `DecodeWorker.resume`. What is being written ends first: it must not come after, and in place
        of, what is read again."""
        await self._being_read(request_id).holding.let_go()
        request = self._being_read(request_id)  # unless it has ended meanwhile
        tokens = request.arrival.resume_point(points)
        request.resume(tokens, self._clock())
        return tokens

    def _being_read(self, request_id: str) -> DecodeRequest:
        """Raises DecodeFailed for any other."""
        request = self._requests.live(request_id)
        if request is None or request.job is not None or request.order.session_id is not None:
            raise DecodeFailed(f"request {request_id} is not being read here")
        return request

    async def kv(self, wanted: KVRange) -> HostKV:
        """See `KVTaker.kv`."""
        request = self._requests.live(wanted.request_id)
        if request is not None:
            with request.holding.hold() as pages:
                if pages is not None:
                    return await asyncio.get_running_loop().run_in_executor(
                        self._thread, packed, self._cache, pages, wanted
                    )
        raise DecodeFailed(f"request {wanted.request_id} is not being read here")

    async def close(self) -> None:
        """Stop what is being received. The worker is closing, and gives no page away."""
        receiving = list(self._receiving)
        for task in receiving:
            task.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)
