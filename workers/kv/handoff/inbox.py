"""The decode worker's side of a KV hand-off: receives the KV of one attempt at a prompt.

A resumed prompt gets a new inbox, so that late messages of the old attempt write nothing. Only the event
loop's thread uses an inbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from deltafront.workers.kv.arrival import ArrivalError, KVArrival, StateArrival
from deltafront.workers.kv.handoff.protocols import KVReader
from deltafront.workers.kv.pages.request_pages import RequestPages
from deltafront.workers.messages.stages import HandedState, KVAnnouncement


class KVInbox:
    """Receives the KV, states and logits of one attempt, until KV and states are complete or lost, or the
    inbox is closed.

    `changed` is called when the KV is complete or lost, and when the logits arrive.
    """

    def __init__(
        self,
        arrival: KVArrival,
        pages: RequestPages,
        changed: Callable[[], None],
        attempt: int = 0,
        states: StateArrival | None = None,
    ) -> None:
        self.attempt = attempt
        self.logits_V: np.ndarray | None = None
        """The logits at the prompt's last position; None until they arrive."""
        self.lost = ""
        """The reason why the KV cannot arrive any more; empty if nothing has failed."""
        self._arrival, self._pages, self._changed = arrival, pages, changed
        self._states = states or StateArrival()
        self._settled = asyncio.Event()
        self._closed = False

    @property
    def complete(self) -> bool:
        return self._arrival.complete and self._states.complete

    async def receive(self, announcement: KVAnnouncement, reader: KVReader) -> int:
        """Copy announced KV into the pages. Layers that were announced before are skipped.

        Returns:
            Number of bytes copied; 0 if nothing was written or the inbox has been closed.
        Raises:
            HandoffError, ArrivalError: The KV cannot be copied, or does not fit the prompt. This sets `lost`.
        """
        first, start, tokens = announcement.layer, announcement.start, announcement.tokens
        layers = range(first, first + announcement.layers)
        try:
            new = [layer for layer in layers if self._arrival.claim(layer, start, tokens)]
            moved = await reader.read(announcement, new, self._use_pages) if new else None
        except Exception as error:
            self.lose(error)
            raise
        if moved is None or self._closed:
            return 0
        for layer in new:
            self._arrival.written(layer, start, tokens)
        if self.complete:
            self._settle()
        return moved

    async def receive_state(
        self, message: HandedState, prompt_tokens: int, write: Callable[[Sequence[int]], Awaitable[None]]
    ) -> None:
        """Write a state into the request's slots.

        Args:
            write: Writes the message's state into these slots.
        Raises:
            ArrivalError, ValueError: The state does not fit the model. This sets `lost`.
        """
        try:
            self._states.check(message.layers)
            with self._use_pages() as pages:
                states = self._pages.states
                if pages is None or states is None:
                    return
                await write(states.arriving(message.tokens, prompt_tokens))
        except Exception as error:
            self.lose(error)
            raise
        if self._closed:
            return
        self._states.written(message.tokens, message.layers)
        if self._states.has(message.tokens):
            states.arrived(message.tokens)
        if self.complete:
            self._settle()

    def put_logits(self, logits_V: np.ndarray, vocab: int) -> None:
        """Store the first token's logits, unless they have arrived before. Raises ArrivalError if their size
        is not `vocab`."""
        if self.logits_V is not None:
            return
        if logits_V.shape != (vocab,):
            error = ArrivalError(f"unexpected logits {logits_V.shape}; the vocabulary is {vocab}")
            self.lose(error)
            raise error
        self.logits_V = logits_V
        self._changed()

    def lose(self, error: Exception) -> None:
        if not self._closed:
            self.lost = f"the prompt's KV did not arrive: {error}"
            self._settle()

    def resumed(self, points: Sequence[int], attempt: int) -> tuple[int, KVInbox]:
        """Close this inbox and make one for the next attempt.

        Returns:
            The resume point (a token position), and the inbox for the KV after it.
        """
        tokens = self._arrival.resume_point(points)
        self.close()
        arrival, states = self._arrival.until(tokens), self._states.until(tokens)
        return tokens, KVInbox(arrival, self._pages, self._changed, attempt, states)

    def close(self) -> None:
        self._closed, self.logits_V = True, None
        self._settled.set()

    async def settled(self) -> None:
        await self._settled.wait()

    def _settle(self) -> None:
        self._settled.set()
        self._changed()

    @contextmanager
    def _use_pages(self) -> Iterator[Sequence[int] | None]:
        with self._pages.use() as pages:
            yield None if self._closed else pages
