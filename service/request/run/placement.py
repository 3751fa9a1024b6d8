"""Chooses the workers of an attempt. The client gets a refusal only after all workers have refused."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deltafront.service import errors
from deltafront.service.fleet import admission
from deltafront.service.fleet.fleet_view import Charge
from deltafront.service.fleet.session_ids import NO_SESSION
from deltafront.service.request.context import Resources
from deltafront.service.request.run.attempt import BUSY_RETRY_S, WorkerLeases
from deltafront.service.request.run.plan import Plan
from deltafront.service.request.run.prefix import PrefixHit
from deltafront.workers.messages.requests import RefusalReason, Refused, RequestOptions, Reservation, Reserved
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.roles import DecodeWorker

READ_TOO_LATE = "the deadline passed while the prompt was being read"
RETRY_ELSEWHERE = (RefusalReason.PAGES, RefusalReason.BUSY, RefusalReason.TOO_LARGE)
"""Errors of one worker after which another worker may accept the request."""


@dataclass(frozen=True)
class Placed:
    """The workers chosen for an attempt.

    Attributes:
        groups: Prefill groups, in the order to ask them.
        worker: The decode worker that reserved the pages (`reserved`).
    """

    groups: Sequence[str]
    worker: DecodeWorker
    plan: Plan
    reserved: Reserved


async def place(
    resources: Resources,
    leases: WorkerLeases,
    plan: Plan,
    reservation_of: Callable[[WorkerLeases, Plan], Reservation],
    hit: PrefixHit | None,
    method: str,
    lap: Callable[[str], None],
) -> Placed:
    """Reserve an attempt's pages, and choose the groups to ask. Raises Overloaded, DeadlineExceeded or
    Unavailable.

    Args:
        hit: A prefix hit. If its worker has enough pages, a group continues from the hit.
    """
    fleet = resources.fleet
    await fleet.wait_until_ready(resources.settings.worker_wait_s)
    lap("worker_wait")
    shared = plan if hit is None else replace(plan, prefix_tokens=hit.prefix.tokens)
    options = reservation_of(leases, plan).options
    tier = options.service_tier
    admitted = await admit(resources, shared, options, method)
    groups = await _groups_with_room(resources, admitted.groups, shared, tier)
    answer: Reserved | Refused | None = None
    if hit is not None:
        answer = await reserve(leases, hit.worker, reservation_of(leases, shared))
    if hit is not None and isinstance(answer, Reserved):
        worker, reserved, plan = hit.worker, answer, shared
    else:
        worker, reserved = await _reserve_on_any(
            resources, leases, admitted.workers, reservation_of(leases, plan)
        )
    need, group = _need(plan, None, method, tier), fleet.view.groups.get(groups[0])
    seconds = None if group is None else admission.alone_s(need, group)
    fleet.charge(Charge(groups[0], plan.new_tokens, worker.name, reserved.pages, seconds, tier))
    lap("admission")
    return Placed(groups, worker, plan, reserved)


def _need(plan: Plan, deadline: float | None, method: str, tier: ServiceTier) -> admission.Need:
    return admission.Need(
        plan.prefill_tokens,
        plan.answer_tokens,
        None if deadline is None else deadline - time.time(),
        plan.recompute_tokens,
        plan.prefix_tokens,
        method,
        tier,
    )


async def admit(
    resources: Resources, plan: Plan, options: RequestOptions, method: str, *, polled: bool = False
) -> admission.Admitted:
    """Return the groups and workers that can serve a plan, best first. If there are none, poll the workers'
    states and try again before refusing. Raises Overloaded, DeadlineExceeded or Unavailable."""
    view = await resources.fleet.wait_until_ready(resources.settings.worker_wait_s)
    need = _need(plan, options.deadline, method, options.service_tier)
    decision = admission.admit(need, tuple(view.groups.values()), tuple(view.workers.values()))
    if isinstance(decision, admission.Admitted):
        return decision
    if not polled:
        await resources.fleet.poll_shared()
        return await admit(resources, plan, options, method, polled=True)
    if decision.reason is admission.Reason.TOO_SLOW:
        raise errors.DeadlineExceeded(decision.message)
    raise errors.Overloaded(decision.message, retry_after_s=decision.retry_after_s)


async def place_on_worker(
    resources: Resources, leases: WorkerLeases, plan: Plan, reservation: Reservation
) -> tuple[DecodeWorker, Reserved]:
    """Reserve an attempt's pages where a decode worker prefills the whole prompt. Raises as `place`."""
    admitted = await admit(resources, plan, reservation.options, "dense")
    return await _reserve_on_any(resources, leases, admitted.workers, reservation)


async def _groups_with_room(
    resources: Resources, groups: Sequence[str], plan: Plan, tier: ServiceTier
) -> tuple[str, ...]:
    """Drop leading groups whose queue is full. Raises Overloaded if all are.

    Groups are asked before pages are reserved, so that a refusal costs only one call.
    """
    refused, view = list[Refused](), resources.fleet.view
    for number, name in enumerate(groups):
        if not view.groups[name].full:
            return tuple(groups[number:])
        refusal = await resources.fleet.group(name).queue_refusal(plan.prefill_tokens, tier)
        if refusal is None:
            return tuple(groups[number:])
        refused.append(refusal)
    raise refusal_error(_of_all_queues(refused))


def _of_all_queues(refused: Sequence[Refused]) -> Refused:
    """Combine the answers of all full groups into one. A free place in any group is enough, so the groups'
    rates are added."""
    first = soonest(refused)
    places_per_second = sum(1 / one.retry_after_s for one in refused if one.retry_after_s)
    return replace(first, retry_after_s=1 / places_per_second) if places_per_second else first


async def _reserve_on_any(
    resources: Resources, leases: WorkerLeases, names: Sequence[str], reservation: Reservation
) -> tuple[DecodeWorker, Reserved]:
    """Reserve on the first worker with enough pages.

    If all are full, wait at the one that expects pages first. Only the workers' answers count, because the
    door's view is up to a second old.
    """
    best, best_wait = resources.fleet.worker(names[0]), (True, math.inf)
    for name in names if len(names) > 1 else ():
        worker = resources.fleet.worker(name)
        answer = await reserve(leases, worker, replace(reservation, wait=False))
        if isinstance(answer, Reserved):
            return worker, answer
        if answer.reason not in RETRY_ELSEWHERE:
            raise refusal_error(answer)
        if _wait(answer) < best_wait:
            best, best_wait = worker, _wait(answer)
    answer = await reserve(leases, best, replace(reservation, wait=True))
    if isinstance(answer, Refused):
        raise refusal_error(answer)
    return best, answer


def soonest(refused: Sequence[Refused]) -> Refused:
    return min(refused, key=_wait)


def _wait(refused: Refused) -> tuple[bool, float]:
    """Return a sort key. Workers that can never accept come last."""
    never = refused.reason is RefusalReason.TOO_LARGE
    return never, math.inf if refused.retry_after_s is None else refused.retry_after_s


async def reserve(leases: WorkerLeases, worker: DecodeWorker, reservation: Reservation) -> Reserved | Refused:
    leases.add(worker)
    answer = await worker.reserve(reservation)
    if isinstance(answer, Refused):
        leases.settle(worker)
    return answer


def refusal_error(refused: Refused) -> errors.DeltafrontError:
    if refused.reason in (RefusalReason.PAGES, RefusalReason.BUSY):
        seconds = BUSY_RETRY_S if refused.retry_after_s is None else refused.retry_after_s
        return errors.Overloaded(f"no room now: {refused.message}", retry_after_s=seconds)
    others: dict[RefusalReason, errors.DeltafrontError] = {
        RefusalReason.TOO_LARGE: errors.Overloaded(f"too large for this server: {refused.message}"),
        RefusalReason.NO_SESSION: errors.NotFound(NO_SESSION),
        RefusalReason.NO_PREFIX: errors.Internal(f"read no prefix again: {refused.message}"),
        RefusalReason.POSITIONS: errors.TooLong("append", refused.message),
        RefusalReason.SELECTION: errors.InvalidArgument("page_selection", refused.message),
        RefusalReason.DEADLINE: errors.DeadlineExceeded(READ_TOO_LATE),
        RefusalReason.DUPLICATE: errors.Internal(f"a worker knows this request already: {refused.message}"),
    }
    return others[refused.reason]
