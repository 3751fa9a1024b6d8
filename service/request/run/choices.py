"""Several answers of one request: choices of one prompt, and several prompts.

The first choice of a prompt keeps all but the prompt's last token as a session. The other choices continue
from this session: they share its pages, and each prefills the last token. If the session is lost, a choice
runs as a separate request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deltafront.service.errors import DeltafrontError
from deltafront.service.request.answers import ChoiceEvent, GenerateFinished, RequestEvent
from deltafront.service.request.calls import Call, Prompt
from deltafront.service.request.context import Accepted, Resources
from deltafront.service.request.run.fork import Fork
from deltafront.service.request.run.plan import constrained, tokenize
from deltafront.service.request.run.request_run import RequestRun
from deltafront.service.request.ttft_clock import TtftClock
from deltafront.workers.messages.requests import ID_BYTES

FORK_TTL_S = 600.0
"""How long a choice may wait for its first pages before the shared session ends."""
_PROMPTS_AT_ONCE = 8
_GOLDEN = 0x9E3779B97F4A7C15
_SEEDS = 1 << 64


class _ChoiceEvents(asyncio.Queue[Any]):
    """A choice's events, put into its request's queue with the choice's index."""

    def __init__(self, index: int, choice: int, events: asyncio.Queue[RequestEvent | None]) -> None:
        super().__init__()
        self._index, self._choice, self._events = index, choice, events

    def put_nowait(self, event: Any) -> None:
        if isinstance(event, GenerateFinished):
            event = replace(event, session=None)  # the session is the choices' own
        self._events.put_nowait(ChoiceEvent(self._index, self._choice, event))


@dataclass
class ChoicesRun:
    """Runs a request's choices, in place of a `RequestRun`.

    Args:
        calls: One for each prompt.
        count: Choices of each prompt.
        fork_ttl_s: Seconds for which a prompt's session is kept.
    """

    resources: Resources
    calls: Sequence[Call]
    count: int
    accepted: Accepted
    fork_ttl_s: float
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PROMPTS_AT_ONCE))

    async def run(self) -> None:
        """Run all choices to their last events. If a choice fails, cancels the other choices and raises the
        first DeltafrontError."""
        with self.accepted.use as use:
            use.run()
            calls = [await self._tokenized(call) for call in self.calls]
            self.accepted.text.release()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for number, call in enumerate(calls):
                        tasks.create_task(self._prompt(number, call))
            except ExceptionGroup as failures:
                raise _first(failures) from None

    async def _tokenized(self, call: Call) -> Call:
        call = await constrained(self.resources, call)
        text, prompt, append = self.accepted.text, call.prompt, call.append
        if prompt is not None:
            ids = await tokenize(self.resources, text, prompt, appended=False, answer=append is None)
            prompt = _as_ids(prompt, ids)
        if append is not None:
            ids = await tokenize(self.resources, text, append, appended=True, answer=True)
            append = _as_ids(append, ids)
        return replace(call, prompt=prompt, append=append)

    async def _prompt(self, number: int, call: Call) -> None:
        fork = Fork()
        async with self._room:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for choice in range(self.count):
                        run = self._choice(number * self.count + choice, choice, call, fork)
                        tasks.create_task(run.run() if choice else self._leader(run, fork))
            finally:
                fork.release(self.resources.fleet, call.owner)

    async def _leader(self, run: RequestRun, fork: Fork) -> None:
        try:
            await run.run()
        finally:
            fork.offer(None)

    def _choice(self, index: int, choice: int, call: Call, fork: Fork) -> RequestRun:
        parent = self.accepted
        accepted = Accepted(
            caller=parent.caller,
            clock=TtftClock(),
            audit=parent.audit,
            trace=parent.trace,
            use=self.resources.callers.part(parent.caller),
            text=parent.text,
            conclude=parent.conclude,
            events=_ChoiceEvents(index, choice, parent.events),
        )
        seed = (call.sampling.seed + choice * _GOLDEN) % _SEEDS if call.sampling.temperature else 0
        call = replace(call, sampling=replace(call.sampling, seed=seed))
        forks = self.count > 1 and _can_fork(call)
        if forks and not choice:
            call = _keeping(call, self.fork_ttl_s)
        return RequestRun(self.resources, call, accepted, fork if forks else None)


def _as_ids(prompt: Prompt, ids: bytes) -> Prompt:
    return replace(prompt, text=None, messages=None, token_ids=ids)


def _can_fork(call: Call) -> bool:
    ids = b"" if call.prompt is None else call.prompt.token_ids or b""
    return call.session_id is None and len(ids) > ID_BYTES


def _keeping(call: Call, ttl_s: float) -> Call:
    """Return the call with all but its prompt's last token kept as a session."""
    assert call.prompt is not None and call.prompt.token_ids is not None
    ids = call.prompt.token_ids
    return replace(
        call,
        prompt=replace(call.prompt, token_ids=ids[:-ID_BYTES]),
        append=replace(call.prompt, token_ids=ids[-ID_BYTES:]),
        options=replace(call.options, keep_ttl_s=ttl_s),
    )


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first DeltafrontError of a group of errors; if it has none, its first error."""
    found = [error for error in _leaves(failures) if isinstance(error, DeltafrontError)]
    return found[0] if found else _leaves(failures)[0]


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
