"""A prompt that a prefill group reads while its K/V goes to a decode worker; where the group dies, the next
one goes on after the last chunk whose K/V has arrived there.

The reservation stays the same. A method that cannot go on (`resume_step` is 0) starts over in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest

from ....workers.messages.events import ChunkRead, PrefillDone, PrefillReport, Progress, summed_by_layer
from ....workers.messages.methods import resume_step
from ....workers.messages.requests import PrefillJob, RefusalReason, Refused
from ....workers.roles import Group
from ...errors import WorkerError, WorkerFailed, WorkerLost
from ...fleet.known import Charge
from ..calls import Call
from ..resources import Resources
from .attempt import Attempt, Replays
from .placement import ASK_ANOTHER, Placed, admitted, comes_back, refusal
from .plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Reached:
    """Reports at the end of a chunk: of the group that read it, and of all groups from the prompt's start,
    without what was read twice."""

    own: PrefillReport
    whole: PrefillReport


class Reading:
    """One prompt on its way into one reservation."""

    def __init__(
        self,
        resources: Resources,
        attempt: Attempt,
        placed: Placed,
        plan: Plan,
        call: Call,
        replays: Replays,
    ) -> None:
        self._resources = resources
        self._attempt = attempt
        self._placed = placed
        self._plan = plan
        self._replays = replays
        self._step = resume_step(call.method)
        self._job = PrefillJob(
            request_id=attempt.request_id,
            token_ids=plan.read_ids,
            method=call.method,
            decode_worker=placed.worker.name,
            deadline=placed.deadline,
            wants_logits=plan.max_tokens > 0,
            trace=call.trace,
        )
        self._reached: dict[int, _Reached] = {}
        """By the number of tokens."""

    async def run(self, progress: Callable[[Progress], None]) -> PrefillReport:
        """Read the prompt, and return what it took in all, without what was lost.

        Args:
            progress: told how far it is.
        Raises: DeltafrontError; WorkerError where the reservation is lost.
        """
        fleet, settings = self._resources.fleet, self._resources.settings
        groups = self._placed.groups
        while True:
            try:
                report = await self._on_one_of(groups, progress)
            except WorkerError as error:
                await self._resume(error)
                await fleet.ready(settings.worker_wait_s)
                self._replays.mark("worker_wait")
                groups = (await admitted(self._resources, self._plan, self._placed.deadline)).groups
                self._charge(groups[0])
            else:
                self._replays.read(report)
                return self._whole(report)

    async def _resume(self, error: WorkerError) -> None:
        """From here on the next group reads what the decode worker does not have. That one is asked first:
        where it is what died, no group that lives is to blame."""
        if isinstance(error, WorkerLost):
            self._resources.fleet.forget(error.worker)
        points = [done for done in self._reached if self._step and done % self._step == 0]
        read = max(self._reached, default=0)
        try:
            start = await self._placed.worker.resume(self._job.request_id, points, self._job.attempt + 1)
        except WorkerError:
            self._resources.metrics.read_again(read)
            raise
        self._resources.metrics.read_again(read - start)
        log.warning("%s: %s; going on at token %d", self._job.request_id, error.message, start)
        self._replays.read(self._reached[start].own if start > self._job.start else None, lost=True)
        await self._replays.after(error)
        self._reached = {done: reached for done, reached in self._reached.items() if done <= start}
        self._job = replace(self._job, start=start, attempt=self._job.attempt + 1)

    def _charge(self, group: str) -> None:
        tokens = self._plan.read_tokens - self._job.start
        self._resources.fleet.charge(Charge(group, tokens, self._placed.worker.name, 0))

    async def _on_one_of(self, groups: Iterable[str], progress: Callable[[Progress], None]) -> PrefillReport:
        """A group whose queue is full passes it on to the next. Raises what the soonest of their refusals
        says if all are."""
        refused: list[Refused] = []
        for name in groups:
            if refused:
                self._charge(name)
            group = self._resources.fleet.group(name)
            outcome = await self._on(group, progress)
            if isinstance(outcome, Refused) and outcome.reason is RefusalReason.DUPLICATE:
                await group.cancel(self._job.request_id)  # it was out of reach for a while, and still has it
                outcome = await self._on(group, progress)
            if isinstance(outcome, PrefillReport):
                return outcome
            refused.append(outcome)
            if outcome.reason not in ASK_ANOTHER:
                break  # every group would say the same
        raise refusal(min(refused, key=comes_back) if refused[-1].reason in ASK_ANOTHER else refused[-1])

    async def _on(self, group: Group, progress: Callable[[Progress], None]) -> PrefillReport | Refused:
        """A group that fails a request has ended it; one that is out of reach does when nobody renews it."""
        self._attempt.add(group)
        try:
            async for event in group.prefill(self._job):
                if isinstance(event, ChunkRead):
                    self._chunk_read(event)
                    progress(Progress(tokens_done=event.tokens_done, tokens_total=event.tokens_total))
                else:
                    self._attempt.settle(group)
                    return event.report if isinstance(event, PrefillDone) else event
            raise WorkerFailed(group.name, f"{group.name} ended without a result")
        except WorkerError:
            self._attempt.settle(group)
            raise

    def _chunk_read(self, event: ChunkRead) -> None:
        if event.tokens_done < event.tokens_total:  # the last chunk is needed in any case, for its logits
            self._reached[event.tokens_done] = _Reached(event.so_far, self._whole(event.so_far))

    def _whole(self, report: PrefillReport) -> PrefillReport:
        """With what groups before this one have read."""
        before = self._reached.get(self._job.start)
        return report if before is None else together(before.whole, report)


def together(before: PrefillReport, after: PrefillReport) -> PrefillReport:
    """One report of two groups that have read parts of one prompt, one after the other; they may have other
    numbers of stages."""
    weights = [sum(layer.causal for layer in report.density) for report in (before, after)]
    sampled = before.sampled_share * weights[0] + after.sampled_share * weights[1]
    by_stage = zip_longest(before.stages, after.stages, fillvalue=dict[str, float]())
    return PrefillReport(
        queue=before.queue + after.queue,
        wall=before.wall + after.wall,
        critical=_sums(before.critical, after.critical),
        stages=tuple(_sums(one, other) for one, other in by_stage),
        density=summed_by_layer((*before.density, *after.density)),
        method=after.method,
        sampled_share=sampled / sum(weights) if sum(weights) else 0.0,
        handoff_bytes=before.handoff_bytes + after.handoff_bytes,
        launch_bound=tuple(map(sum, zip_longest(before.launch_bound, after.launch_bound, fillvalue=0.0))),
    )


def _sums(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}
