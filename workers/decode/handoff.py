"""The decode side of the hand-off: announced K/V is pulled and written into the request's pages.

A failed or contradictory announcement ends its request as failed, so that no answer is ever computed from
incomplete K/V, and is raised, so that the sending stage stops as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from ..kv.arrival import ArrivalError
from ..messages import FinishReason, FirstLogits, KVAnnouncement
from ..model.config import ModelConfig
from .lifecycle import Lifecycle
from .request import DecodeRequest
from .runner import DecodeCompute


class Receiver(Protocol):
    """The receiving end of the K/V transport."""

    async def pull(self, announcement: KVAnnouncement, /) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """(k_TGD, v_TGD) of each layer of an announcement, on any device."""


class Handoff:
    """Receives K/V and first logits. Writes run on `executor`; `arrived` hears of every step forward."""

    def __init__(
        self,
        model: ModelConfig,
        receiver: Receiver,
        compute: DecodeCompute,
        executor: ThreadPoolExecutor,
        lifecycle: Lifecycle,
        arrived: Callable[[DecodeRequest], None],
    ) -> None:
        self._model = model
        self._receiver = receiver
        self._compute = compute
        self._executor = executor
        self._lifecycle = lifecycle
        self._arrived = arrived

    async def announce(self, announcement: KVAnnouncement) -> None:
        """Ignored for requests that are not here and for exact repetitions. Raises what the transport
        raises, and ArrivalError for K/V that the request does not have."""
        request = self._lifecycle.live(announcement.request_id)
        if request is None:
            return
        try:
            layers = range(announcement.layer, announcement.layer + announcement.layers)
            start, tokens = announcement.start, announcement.tokens
            new = [layer for layer in layers if request.arrival.claim(layer, start, tokens)]
            if new:
                await self._pull(request, announcement, new)
        except Exception as error:
            self._fail(request, error)
            raise

    async def _pull(self, request: DecodeRequest, announcement: KVAnnouncement, new: list[int]) -> None:
        """Pull an announcement and write its layers `new`."""
        began = time.perf_counter()
        pulled = await self._receiver.pull(announcement)
        expected = (announcement.tokens, self._model.kv_heads, self._model.head_dim)
        for k_TGD, v_TGD in pulled:
            if k_TGD.shape != expected or v_TGD.shape != expected:
                raise ArrivalError(
                    f"pulled {tuple(k_TGD.shape)} and {tuple(v_TGD.shape)}, expected {expected}"
                )
        if request.ended is not None:
            return
        parts = {layer: pulled[layer - announcement.layer] for layer in new}
        self._lifecycle.pin(request)
        writing = asyncio.get_running_loop().run_in_executor(
            self._executor,
            self._compute.write,
            request.holding.table,
            announcement.start,
            parts,
        )
        writing.add_done_callback(lambda _done: self._lifecycle.unpin(request))
        await asyncio.shield(writing)  # a caller that is cancelled must not look like a finished write
        request.times.handoff_bytes += sum(k.nbytes + v.nbytes for k, v in parts.values())
        request.times.handoff_seconds += time.perf_counter() - began
        request.arrival.written(announcement.tokens * len(parts))
        if request.arrival.complete and request.ended is None:
            request.times.complete = time.perf_counter()
            request.settled.set()
            self._arrived(request)

    async def first_logits(self, message: FirstLogits) -> None:
        """Ignored for requests that are not here and for repetitions. Raises ArrivalError for logits that
        the request cannot use."""
        request = self._lifecycle.live(message.request_id)
        if request is None or request.times.logits is not None:
            return
        logits_V = np.asarray(message.logits, dtype=np.float32)
        if request.order.session_id is not None or logits_V.shape != (self._model.vocab,):
            error = ArrivalError(f"unexpected logits {logits_V.shape}; the vocabulary is {self._model.vocab}")
            self._fail(request, error)
            raise error
        request.logits = logits_V
        request.times.logits = time.perf_counter()
        self._arrived(request)

    def _fail(self, request: DecodeRequest, error: Exception) -> None:
        self._lifecycle.close(request, FinishReason.FAILED, f"the prompt's K/V did not arrive: {error}")
