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

from ...workers.messages import (
    MethodSpec,
    PrefillDone,
    PrefillJob,
    PrefillReport,
    Progress,
    RefusalReason,
    Refused,
    Reserve,
    Reserved,
)
from ...workers.roles import DecodeWorker, Group, Leased
from ..config import DoorConfig
from ..errors import (
    DeadlineExceeded,
    DeltafrontError,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    TooLong,
    Unavailable,
    WorkerError,
    WorkerFailed,
    WorkerLost,
)
from ..fleet import admission
from ..fleet.sessions import NO_SESSION
from ..fleet.view import Charge, Fleet
from ..metrics import Metrics
from .answers import RequestEvent
from .calls import Prompt
from .plan import Plan
from .timings import REPLAY, TtftClock
from .tokenizer import TemplateError, TextTokenizer

Emit = Callable[[RequestEvent], None]
Mark = Callable[[str], None]

_FIRST_PAUSE_S = 0.25
"""Before a replay; four times as long before each next one, because a group takes seconds to come back."""
_BUSY_RETRY_S = 5.0


@dataclass(frozen=True)
class Resources:
    """What every request needs; made once by the door."""

    fleet: Fleet
    tokenizer: TextTokenizer
    metrics: Metrics
    settings: DoorConfig
    vocabulary: int
    positions: int
    eos_ids: tuple[int, ...]


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


async def place(
    resources: Resources, attempt: Attempt, plan: Plan, wish: Reserve, deadline: float | None, mark: Mark
) -> tuple[Group, DecodeWorker]:
    """Admit a prompt and reserve its pages. Raises Overloaded, DeadlineExceeded or Unavailable.

    Workers are asked in admission's order until one has the pages: only their answers count, since what
    the door knows of them is up to a second old. mark: told when the parts `worker_wait` (none was running)
    and `admission` of TTFT end.
    """
    settings, fleet = resources.settings, resources.fleet
    view = await fleet.ready(settings.worker_wait_s)
    mark("worker_wait")
    left = None if deadline is None else deadline - time.time()
    need = admission.Need(plan.read_tokens, plan.max_tokens, left)
    groups, workers = tuple(view.groups.values()), tuple(view.workers.values())
    decision = admission.admit(need, groups, workers, settings.max_waiting)
    if isinstance(decision, admission.Rejected):
        raise _rejection(decision)
    group = fleet.group(decision.group)
    refused: Refused | None = None
    for name in decision.workers:
        worker = fleet.worker(name)
        answer = await reserve(attempt, worker, wish)
        if isinstance(answer, Reserved):
            fleet.charge(Charge(group.name, plan.read_tokens, name, answer.pages))
            mark("admission")
            return group, worker
        refused = answer
        if answer.reason not in (RefusalReason.PAGES, RefusalReason.TOO_LARGE):
            break  # every worker would say the same
    assert refused is not None, "admission names at least one worker"
    raise refusal(refused, admission.retry_after(view.groups[decision.group]))


async def reserve(attempt: Attempt, worker: DecodeWorker, wish: Reserve) -> Reserved | Refused:
    """Take pages, or be told why not."""
    attempt.add(worker)
    answer = await worker.reserve(wish)
    if isinstance(answer, Refused):
        attempt.settle(worker)
    return answer


async def read(
    attempt: Attempt, group: Group, worker: DecodeWorker, plan: Plan, method: MethodSpec,
    deadline: float | None, emit: Emit,
) -> PrefillReport:  # fmt: skip
    """Have a prefill group read the prompt; its K/V goes to `worker` meanwhile."""
    job = PrefillJob(attempt.request_id, plan.read_ids, method, worker.name, deadline, plan.max_tokens > 0)
    attempt.add(group)
    async for event in group.prefill(job):
        if isinstance(event, Progress):
            emit(event)
        elif isinstance(event, PrefillDone):
            attempt.settle(group)
            return event.report
        else:
            attempt.settle(group)
            raise refusal(event, _BUSY_RETRY_S)
    raise WorkerFailed(group.name, f"{group.name} ended without a result")


async def with_replays(
    resources: Resources,
    clock: TtftClock,
    once: Callable[[], Awaitable[None]],
    streaming: Callable[[], bool],
) -> None:
    """Try again after a worker failed. Raises Unavailable when that does not help.

    streaming: whether the first token is out, so that lost time no longer belongs to TTFT.
    """
    fleet, tries = resources.fleet, resources.settings.replays + 1
    for number in range(tries):
        try:
            return await once()
        except WorkerError as error:
            if isinstance(error, WorkerLost):
                fleet.forget(error.worker)
            if number + 1 == tries:
                raise Unavailable(
                    f"{error.message}; gave up after {tries} tries", retry_after_s=_BUSY_RETRY_S
                ) from error
        resources.metrics.replayed()
        await asyncio.sleep(_FIRST_PAUSE_S * 4**number)
        await fleet.refresh()
        if not streaming():
            clock.lap(REPLAY)


def refusal(refused: Refused, retry_after_s: float | None = _BUSY_RETRY_S) -> DeltafrontError:
    """A worker's no as the client's error."""
    if refused.reason is RefusalReason.PAGES:
        return Overloaded(f"no room now: {refused.message}", retry_after_s=retry_after_s)
    fixed: dict[RefusalReason, DeltafrontError] = {
        RefusalReason.TOO_LARGE: Overloaded(f"too large for this server: {refused.message}"),
        RefusalReason.NO_SESSION: NotFound(NO_SESSION),
        RefusalReason.POSITIONS: TooLong("append", refused.message),
        RefusalReason.SELECTION: InvalidArgument("page_selection", refused.message),
        RefusalReason.DEADLINE: DeadlineExceeded("the deadline passed while the prompt was being read"),
        RefusalReason.DUPLICATE: Internal(f"a worker knows this request already: {refused.message}"),
    }
    return fixed[refused.reason]


def _rejection(rejected: admission.Rejected) -> DeltafrontError:
    if rejected.reason is admission.Reason.TOO_SLOW:
        return DeadlineExceeded(rejected.message)
    return Overloaded(rejected.message, retry_after_s=rejected.retry_after_s)
