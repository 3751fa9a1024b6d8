"""Where an attempt runs: admitted, and its pages reserved on a decode worker.

A worker's no is passed on to the next one; only when all have said it does the client hear of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....workers.messages.requests import RefusalReason, Refused, Reservation, Reserved
from ....workers.roles import DecodeWorker
from ...errors import (
    DeadlineExceeded,
    DeltafrontError,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    TooLong,
)
from ...fleet import admission
from ...fleet.known import Charge
from ...fleet.sessions import NO_SESSION
from ..resources import Resources
from .attempt import BUSY_RETRY_S, Attempt, Mark
from .plan import Plan

ASK_ANOTHER = (RefusalReason.PAGES, RefusalReason.BUSY, RefusalReason.TOO_LARGE)
"""What one worker refuses for, and another may not."""


@dataclass(frozen=True)
class Placed:
    """Where a prompt goes: groups to ask to read it, in order, and the decode worker that has its pages."""

    groups: tuple[str, ...]
    worker: DecodeWorker
    deadline: float | None


async def place(
    resources: Resources, attempt: Attempt, plan: Plan, reservation: Reservation, mark: Mark
) -> Placed:
    """Admit a prompt and reserve its pages. Raises Overloaded, DeadlineExceeded or Unavailable.

    mark: told when the parts `worker_wait` (none was running) and `admission` of TTFT end.
    """
    fleet = resources.fleet
    await fleet.ready(resources.settings.worker_wait_s)
    mark("worker_wait")
    decision = await admitted(resources, plan, reservation.deadline)
    groups = await _with_a_place(resources, decision.groups, plan)
    worker, pages = await _reserve_somewhere(resources, attempt, decision.workers, reservation)
    fleet.charge(Charge(groups[0], plan.read_tokens, worker.name, pages))
    mark("admission")
    return Placed(groups, worker, reservation.deadline)


async def admitted(resources: Resources, plan: Plan, deadline: float | None) -> admission.Admitted:
    """Where a prompt may go. Before it is refused the workers are asked how they are now. Raises Overloaded,
    DeadlineExceeded or Unavailable."""
    decision = await _judged(resources, plan, deadline)
    if isinstance(decision, admission.Rejected):
        await resources.fleet.ask()
        decision = await _judged(resources, plan, deadline)
    if isinstance(decision, admission.Rejected):
        raise _rejection(decision)
    return decision


async def _judged(resources: Resources, plan: Plan, deadline: float | None) -> admission.Decision:
    view = await resources.fleet.ready(resources.settings.worker_wait_s)
    left = None if deadline is None else deadline - time.time()
    need = admission.Need(plan.read_tokens, plan.answer_tokens, left, plan.recompute_tokens)
    return admission.admit(need, tuple(view.groups.values()), tuple(view.workers.values()))


async def _with_a_place(resources: Resources, groups: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """From the first group on that has a place in its queue. Those whose queue looks full are asked before
    pages are reserved anywhere, so that a refusal takes one question. Raises Overloaded if all are full."""
    refused, view = list[Refused](), resources.fleet.view
    for number, name in enumerate(groups):
        if not view.groups[name].full:
            return tuple(groups[number:])
        answer = await resources.fleet.group(name).queue_refusal(plan.read_tokens)
        if answer is None:
            return tuple(groups[number:])
        refused.append(answer)
    raise refusal(min(refused, key=comes_back))


async def _reserve_somewhere(
    resources: Resources, attempt: Attempt, names: Sequence[str], reservation: Reservation
) -> tuple[DecodeWorker, int]:
    """The first worker that has the pages, and how many; only their answers count, since what the door knows
    of them is up to a second old. If all are full, waits at the one that expects to have them first."""
    soonest, best = resources.fleet.worker(names[0]), (True, math.inf)
    for name in names if len(names) > 1 else ():
        worker = resources.fleet.worker(name)
        answer = await reserve(attempt, worker, replace(reservation, wait=False))
        if isinstance(answer, Reserved):
            return worker, answer.pages
        if answer.reason not in ASK_ANOTHER:
            raise refusal(answer)
        if comes_back(answer) < best:
            soonest, best = worker, comes_back(answer)
    answer = await reserve(attempt, soonest, replace(reservation, wait=True))
    if isinstance(answer, Refused):
        raise refusal(answer)
    return soonest, answer.pages


def comes_back(refused: Refused) -> tuple[bool, float]:
    """To sort by: who may say yes soonest; who never will last."""
    never = refused.reason is RefusalReason.TOO_LARGE
    return never, math.inf if refused.retry_after_s is None else refused.retry_after_s


async def reserve(attempt: Attempt, worker: DecodeWorker, reservation: Reservation) -> Reserved | Refused:
    """Take pages, or be told why not."""
    attempt.add(worker)
    answer = await worker.reserve(reservation)
    if isinstance(answer, Refused):
        attempt.settle(worker)
    return answer


def refusal(refused: Refused) -> DeltafrontError:
    """A worker's no as the client's error."""
    if refused.reason in (RefusalReason.PAGES, RefusalReason.BUSY):
        seconds = BUSY_RETRY_S if refused.retry_after_s is None else refused.retry_after_s
        return Overloaded(f"no room now: {refused.message}", retry_after_s=seconds)
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
