"""What stages hand over to a decode worker: K/V into the pages of its requests, and their first logits.

Used from the event loop's thread; K/V is written on the hand-off thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from ..kv.arrival import ArrivalError
from ..kv.handoff import Receiver
from ..messages.events import FinishReason
from ..messages.stages import FirstLogits, KVAnnouncement
from .request import DecodeRequest
from .requests import Requests


class Reception:
    """Takes what is announced for requests that are here.

    arrived: told of a request when something that it waited for has come. vocab: numbers of a row of logits.
    clock: seconds.
    """

    def __init__(
        self,
        receiver: Receiver,
        requests: Requests,
        arrived: Callable[[DecodeRequest], None],
        vocab: int,
        clock: Callable[[], float],
    ) -> None:
        self._receiver = receiver
        self._requests = requests
        self._arrived = arrived
        self._vocab = vocab
        self._clock = clock
        self._receiving: set[asyncio.Task[int]] = set()

    async def announce(self, announcement: KVAnnouncement) -> None:
        """Receive K/V into pages. Ignored for requests that are not here and for exact repetitions.

        A failed or contradictory announcement ends its request as failed, so that no answer is ever computed
        from incomplete K/V, and is raised, so that the sending stage stops as well: HandoffError, and
        ArrivalError for K/V that the request does not have.
        """
        request = self._requests.live(announcement.request_id)
        if request is None:
            return
        began = self._clock()
        tokens, first = announcement.tokens, announcement.layer
        try:
            layers = range(first, first + announcement.layers)
            new = [layer for layer in layers if request.arrival.claim(layer, announcement.start, tokens)]
            if not new:
                return
            receiving = asyncio.create_task(self._receiver.receive(announcement, new, request.holding.hold))
            self._receiving.add(receiving)
            receiving.add_done_callback(self._receiving.discard)
            moved = await asyncio.shield(receiving)  # a caller that gives up must not stop a write half way
        except Exception as error:
            _not_arrived(request, error)
            raise
        if moved:
            request.times.handoff_bytes += moved
            request.times.handoff_seconds += self._clock() - began
            request.arrival.written(tokens * len(new))
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
            _not_arrived(request, error)
            raise error
        request.logits = logits_V
        request.times.logits = self._clock()
        self._arrived(request)

    async def close(self) -> None:
        """Stop what is being received. The worker is closing, and gives no page away."""
        receiving = list(self._receiving)
        for task in receiving:
            task.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)


def _not_arrived(request: DecodeRequest, error: Exception) -> None:
    request.close(FinishReason.NO_KV, f"the prompt's K/V did not arrive: {error}")
