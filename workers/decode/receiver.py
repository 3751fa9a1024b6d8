"""Receives KV from prefill stages, and sends KV back to stages that resume a prompt."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from deltafront.workers.decode.ranks import LeadRunner, RanksReader, joined_heads
from deltafront.workers.decode.request import DecodeRequest, RequestTimes
from deltafront.workers.decode.request_table import DecodeRequests
from deltafront.workers.decode.tiers import KeptTasks
from deltafront.workers.kv.arrival import ArrivalError
from deltafront.workers.kv.fetch import to_host
from deltafront.workers.kv.handoff.inbox import KVInbox
from deltafront.workers.kv.handoff.mapped import PageWriters
from deltafront.workers.kv.handoff.protocols import KVReader
from deltafront.workers.kv.host_memory import RankStates
from deltafront.workers.messages.requests import DecodeFailed
from deltafront.workers.messages.stages import (
    FirstLogits,
    HandedState,
    HostKV,
    KVAnnouncement,
    KVRange,
    OpenedPages,
    PageWriter,
)
from deltafront.workers.model.directory.model_config import ModelConfig


class HandoffReceiver:
    """Copies announced KV into the pages of requests.

    Args:
        reader: Copies rank 0's heads, on `thread`.
    """

    def __init__(
        self,
        requests: DecodeRequests,
        runner: LeadRunner,
        reader: KVReader,
        thread: ThreadPoolExecutor,
        model: ModelConfig,
        clock: Callable[[], float],
    ) -> None:
        self._requests, self._runner, self._thread, self._clock = requests, runner, thread, clock
        self._ranks, self._model = runner.ranks, model
        self._reader = RanksReader(reader, runner.ranks, runner.lose) if runner.ranks else reader
        self._receiving = KeptTasks()
        self._writers = PageWriters(runner.cache.memory)

    async def close(self) -> None:
        await self._receiving.cancel()

    async def announce(self, announcement: KVAnnouncement) -> None:
        """Copy announced KV into the request's pages. Repeated announcements, and those of unknown requests
        or other attempts, are ignored.

        Every error also goes back to the sending stage. The request then fails unless another attempt begins
        before its job arrives.

        Raises:
            HandoffError: The KV could not be copied.
            ArrivalError: The announced KV does not fit the request.
        """
        request = self._requests.expecting(announcement)
        if request is None:
            return
        await asyncio.shield(self._receiving.begin(self._receive(request.inbox, request.times, announcement)))

    async def _receive(self, inbox: KVInbox, times: RequestTimes, announcement: KVAnnouncement) -> None:
        with times.receiving_kv(self._clock):
            moved = await inbox.receive(announcement, self._reader)
        times.handoff_bytes += moved

    async def first_logits(self, message: FirstLogits) -> None:
        """Receive the logits from which the first token is sampled. Ignores messages as `announce` does.
        Raises ArrivalError if their shape or values are wrong."""
        request = self._requests.expecting(message)
        if request is not None:
            vocab = 0 if request.reservation.reads else self._model.vocab
            request.inbox.put_logits(np.asarray(message.logits, dtype=np.float32), vocab)

    async def state(self, message: HandedState) -> None:
        """Write a state into the request's slots. Ignores messages as `announce` does. Raises ArrivalError or
        ValueError if it does not fit the model."""
        request = self._requests.expecting(message)
        if request is not None:
            await asyncio.shield(self._receiving.begin(self._write_state(request, message)))

    async def _write_state(self, request: DecodeRequest, message: HandedState) -> None:
        async def write(slots: Sequence[int]) -> None:
            await self._put_state(slots, message)

        with request.times.receiving_kv(self._clock):
            await request.inbox.receive_state(message, request.prompt_tokens, write)
        request.times.handoff_bytes += message.bytes

    async def _put_state(self, slots: Sequence[int], message: HandedState) -> None:
        if (states := self._runner.states) is None:
            raise ArrivalError("a state came for a model without states")
        if message.arrays:
            # Not on the event loop: with several ranks this copies a state, which may have 150 MB.
            parts = await self._in_thread(states.parts, message.arrays, 1 + len(self._ranks))
            await self._on_ranks("write", [(slots, message.layers, arrays) for arrays in parts])

    def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def _on_ranks(self, work: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every rank's `RankStates`, each with its own arguments. Return the results once
        all ranks have finished. Raises the first error."""
        own, states = arguments[0], RankStates(self._runner.cache)
        calls = [self._in_thread(getattr(states, work), *own)]
        calls += [rank.state(work, *each) for rank, each in zip(self._ranks, arguments[1:], strict=True)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for failure in failures:
            if isinstance(failure, DecodeFailed):
                self._runner.lose(failure)
        if failures:
            raise failures[0]
        return outcomes

    async def held_state(self, request_id: str) -> HandedState:
        request, cache = self._requests.live(request_id), self._runner.states
        states = None if request is None else request.pages.states
        tokens, slot = (0, None) if states is None else states.start
        if request is None or cache is None or slot is None:
            raise DecodeFailed(f"request {request_id} has no state here to continue from")
        with request.pages.use():
            await request.pages.come(self._model.layers - 1)  # a state comes before the first layer's KV
            copies = await self._on_ranks("read", [(slot,)] * (1 + len(self._ranks)))
        arrays = await self._in_thread(cache.joined, copies)
        return HandedState(request_id=request_id, tokens=tokens, layers=cache.layers, arrays=arrays)

    async def open_pages(self, writer: PageWriter) -> OpenedPages:
        request = self._requests.expecting(writer)
        if request is not None:
            await request.pages.come()
            request = self._requests.expecting(writer)
        if request is None:
            raise DecodeFailed(f"request {writer.request_id} is not being read here")
        pages, states = self._writers.open(writer, request.pages), request.pages.states
        if states is None:
            return OpenedPages(pages=pages)
        begun, whole = states.start[0], request.prompt_tokens
        slots = {place: states.arriving(place, whole) for place in writer.state_places if place > begun}
        return OpenedPages(pages=pages, states=slots)

    async def close_pages(self, writer: PageWriter) -> None:
        self._writers.close(writer)

    async def kv(self, wanted: KVRange) -> HostKV:
        request = self._requests.live(wanted.request_id)
        if request is not None:
            with request.pages.use() as pages:
                if pages is not None:
                    await request.pages.come(self._model.layers - 1 - wanted.layer)
                    own = asyncio.get_running_loop().run_in_executor(
                        self._thread, to_host, self._runner.cache, pages, wanted
                    )
                    others = [rank.kv(wanted, pages) for rank in self._ranks]
                    try:
                        return joined_heads(await asyncio.gather(own, *others))
                    except DecodeFailed as error:
                        self._runner.lose(error)
                        raise
        raise DecodeFailed(f"request {wanted.request_id} is not being read here")
