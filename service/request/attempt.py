"""The steps that Prefill and Generate share: tokenise, admit and reserve, read the prompt, try again."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from ...workers.roles import Leased
from ..config import DoorConfig
from ..errors import (
    DeadlineExceeded,
    InvalidArgument,
    Unavailable,
    WorkerError,
    WorkerHandoffFailed,
)
from ..fleet.view import Fleet
from ..metrics import Metrics
from ..tracing import Tracing
from .answers import RequestEvent
from .calls import Prompt
from .timings import REPLAY, TtftClock
from .tokenizer import TemplateError, TextTokenizer

Emit = Callable[[RequestEvent], None]
Mark = Callable[[str], None]
Take = Callable[[int], None]
"""How many tokens of K/V the request is going to hold. Raises Overloaded where its caller may not."""

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

    def __init__(self, fleet: Fleet) -> None:
        self.request_id = uuid.uuid4().hex
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
async def within(deadline: float | None) -> AsyncIterator[None]:
    """Bound a block by a moment of the wall clock. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.time()) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded("the deadline passed before the answer was complete") from None


async def tokenize(resources: Resources, prompt: Prompt, *, follows: bool, answer: bool) -> bytes:
    """Ids of a prompt, in a thread. follows: it is appended to something, so it opens nothing. answer:
    messages end with the assistant's opening. Raises InvalidArgument naming the field."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    name, tokenizer = "append" if follows else "prompt", resources.tokenizer
    try:
        if prompt.text is not None:
            ids = await asyncio.to_thread(tokenizer.encode, prompt.text, opening=not follows)
        elif follows:
            ids = await asyncio.to_thread(tokenizer.encode_chat_append, prompt.messages or ())
        else:
            ids = await asyncio.to_thread(tokenizer.encode_chat, prompt.messages or (), answer=answer)
    except TemplateError as error:
        raise InvalidArgument(f"{name}.messages", str(error)) from None
    if not ids:
        raise InvalidArgument(name, "has no tokens: it is empty to the model's tokenizer")
    if int(np.frombuffer(ids, dtype="<u4").max()) >= resources.vocabulary:
        raise InvalidArgument(name, "contains a special token that this model has no embedding for")
    return ids


async def with_replays(
    resources: Resources,
    clock: TtftClock,
    once: Callable[[], Awaitable[None]],
    streaming: Callable[[], bool],
) -> None:
    """Try again after a worker failed: at once on others, if there are any of its kind. Raises Unavailable
    when that does not help.

    streaming: whether the first token is out, so that lost time no longer belongs to TTFT.
    """
    fleet, tries = resources.fleet, resources.settings.replays + 1
    for number in range(tries):
        try:
            return await once()
        except WorkerError as error:
            fleet.forget(error.worker)
            if isinstance(error, WorkerHandoffFailed):
                resources.metrics.handoff_failed()
            if number + 1 == tries:
                raise Unavailable(
                    f"{error.message}; gave up after {tries} tries", retry_after_s=BUSY_RETRY_S
                ) from error
        resources.metrics.replayed()
        if not fleet.view.ready:
            await asyncio.sleep(_FIRST_PAUSE_S * 4**number)
            await fleet.refresh()
        if not streaming():
            clock.lap(REPLAY)
