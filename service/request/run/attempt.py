"""The steps that Prefill and Generate share: tokenise, admit and reserve, read the prompt, try again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from ...workers.messages.events import PrefillReport, Progress
from ...workers.roles import Leased
from ..config import DoorConfig
from ..errors import (
    DeadlineExceeded,
    InvalidArgument,
    TooLong,
    Unavailable,
    WorkerError,
    WorkerHandoffFailed,
)
from ..fleet.view import Fleet
from ..metrics import Metrics
from ..tracing import Tracing
from .answers import RequestEvent
from .callers import Share
from .calls import Prompt
from .texts import Held
from .timings import REPLAY, TRANSPORT, TtftClock, prefill_parts
from .tokenizer import Limit, TemplateError, TextTokenizer, TextTooLong

log = logging.getLogger(__name__)

Emit = Callable[[RequestEvent], None]
Mark = Callable[[str], None]
_FIRST_PAUSE_S = 0.25
"""Before a replay, where no other worker is left; four times as long before each next one, because a worker
takes seconds to come back."""
BUSY_RETRY_S = 5.0
"""Where nobody knows yet how long work takes."""


@dataclass(frozen=True)
class Resources:
    """What every request needs; made once by the door, whose name among doors is `door`. model: tells it from
    every other."""

    door: str
    model: str
    fleet: Fleet
    tokenizer: TextTokenizer
    metrics: Metrics
    settings: DoorConfig
    vocabulary: int
    positions: int
    eos_ids: tuple[int, ...]
    tracing: Tracing


class Attempt:
    """One try at a request: its place on workers is renewed while the block runs, cancelled when it is left.

    `settle` says that a worker has ended the request by itself. Leaving never waits, so that it works in
    the middle of being cancelled.
    """

    def __init__(self, fleet: Fleet, share: Share) -> None:
        self.request_id = uuid.uuid4().hex
        self.share = share
        self._fleet = fleet
        self._open: list[Leased] = []

    def add(self, link: Leased) -> None:
        self._open.append(link)
        self._fleet.hold(link, self.request_id)

    def settle(self, link: Leased) -> None:
        self._open.remove(link)
        self._fleet.drop(link, self.request_id)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._fleet.cancel(self._open.pop(), self.request_id)


@contextlib.asynccontextmanager
async def within(deadline: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Bound a block by a moment of the wall clock. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.time()) as scope:
            yield scope
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded("the deadline passed before the answer was complete") from None


async def tokenize(resources: Resources, held: Held, prompt: Prompt, *, follows: bool, answer: bool) -> bytes:
    """Ids of a prompt, in a thread. follows: it is appended to something, so it opens nothing. answer:
    messages end with the assistant's opening. Raises InvalidArgument naming the field."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    name = "append" if follows else "prompt"
    messages = prompt.messages or ()
    try:
        tokenizer = resources.tokenizer.with_variables(prompt.chat_template_kwargs)
    except TemplateError as error:
        raise InvalidArgument(f"{name}.messages.chat_template_kwargs", str(error)) from None

    def encode(stopped: Callable[[], bool]) -> bytes:
        limit = Limit(resources.positions, stopped)
        if prompt.text is not None:
            rule = prompt.special_tokens
            return tokenizer.encode(prompt.text, opening=not follows, special_tokens=rule, limit=limit)
        if follows:
            return tokenizer.encode_chat_append(messages, limit=limit)
        return tokenizer.encode_chat(messages, answer=answer, limit=limit)

    try:
        ids = await held.work(encode)
    except TemplateError as error:
        raise InvalidArgument(f"{name}.messages", str(error)) from None
    except TextTooLong as error:
        raise TooLong(name, str(error)) from None
    if not ids:
        raise InvalidArgument(name, "has no tokens: it is empty to the model's tokenizer")
    if int(np.frombuffer(ids, dtype="<u4").max()) >= resources.vocabulary:
        raise InvalidArgument(name, "contains a special token that this model has no embedding for")
    return ids


class Replays:
    """How often a request is tried again after a worker failed, and when: at once on others, if there are any
    of its kind. streaming: whether the first token is out, so that lost time no longer belongs to TTFT."""

    def __init__(self, resources: Resources, clock: TtftClock, streaming: Callable[[], bool]) -> None:
        self._resources = resources
        self._clock = clock
        self._streaming = streaming
        self._failures = 0

    async def run(self, once: Callable[[], Awaitable[None]]) -> None:
        """Try until it succeeds. Raises Unavailable when trying again does not help."""
        while True:
            try:
                return await once()
            except WorkerError as error:
                await self.after(error)

    async def after(self, error: WorkerError) -> None:
        """Returns when there may be somebody to go to. Raises Unavailable after the last try."""
        fleet, tries = self._resources.fleet, self._resources.settings.replays + 1
        fleet.forget(error.worker)
        if isinstance(error, WorkerHandoffFailed):
            self._resources.metrics.handoff_failed()
        self._failures += 1
        if self._failures >= tries:
            raise Unavailable(
                f"{error.message}; gave up after {tries} tries", retry_after_s=BUSY_RETRY_S
            ) from error
        log.warning("try %d of %d failed: %s", self._failures, tries, error.message)
        self._resources.metrics.replayed()
        if not fleet.view.ready:
            await asyncio.sleep(_FIRST_PAUSE_S * 4 ** (self._failures - 1))
            await fleet.refresh()
        self.mark(REPLAY)

    def mark(self, part: str) -> None:
        """What passed since the last mark was `part` of TTFT."""
        if not self._streaming():
            self._clock.lap(part)

    def read(self, report: PrefillReport | None, *, lost: bool = False) -> None:
        """A prefill group did `report` since the last mark. lost: and died; the rest of that time is lost."""
        if not self._streaming():
            parts = {} if report is None else prefill_parts(report)
            self._clock.span(parts, REPLAY if lost else TRANSPORT)


class Forward:
    """Progress that only goes forward, however often a prompt is read again from an earlier point on."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._furthest = 0

    def __call__(self, event: Progress) -> None:
        if event.tokens_done > self._furthest:
            self._furthest = event.tokens_done
            self._emit(event)
