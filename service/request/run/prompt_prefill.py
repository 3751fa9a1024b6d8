"""Prefills a prompt on a group while its KV cache streams to a decode worker.

If the group dies, the next group resumes after the last chunk that arrived at the decode worker. If the
method cannot resume, the next group prefills the prompt from its first token.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from deltafront.kernels.methods import resume_step
from deltafront.service.errors import WorkerError, WorkerFailed, WorkerLost
from deltafront.service.fleet.fleet_view import Charge
from deltafront.service.request.calls import Call
from deltafront.service.request.context import Resources
from deltafront.service.request.run.attempt import Replays, WorkerLeases
from deltafront.service.request.run.placement import RETRY_ELSEWHERE, admit, refusal_error, soonest
from deltafront.service.request.run.plan import Plan
from deltafront.service.request.ttft_clock import REPLAY, prefill_parts
from deltafront.workers.messages.events import (
    ChunkRead,
    PrefillDone,
    PrefillQueued,
    PrefillReport,
    Progress,
    summed_by_layer,
)
from deltafront.workers.messages.prompts import state_places
from deltafront.workers.messages.requests import PrefillJob, RefusalReason, Refused
from deltafront.workers.roles import DecodeWorker, Group

log = logging.getLogger(__name__)


@dataclass
class PromptPrefill:
    """Prefills one prompt.

    Args:
        groups: Names of prefill groups, in the order to ask them.
        worker: The decode worker that reserved the pages.
    """

    resources: Resources
    leases: WorkerLeases
    groups: Sequence[str]
    worker: DecodeWorker
    plan: Plan
    call: Call
    replays: Replays

    def __post_init__(self) -> None:
        self._resume_step = resume_step(self.call.method)
        self._job = PrefillJob(
            request_id=self.leases.request_id,
            token_ids=self.plan.prefill_ids,
            method=self.call.method,
            decode_worker=self.worker.name,
            deadline=self.call.options.deadline,
            wants_logits=self.plan.max_tokens > 0,
            start=self.plan.prefix_tokens,
            trace=self.call.options.trace,
            service_tier=self.call.options.service_tier,
            state_places=self._state_places(),
        )
        self._reports: dict[int, tuple[PrefillReport, PrefillReport]] = {}
        """Two reports by number of prefilled tokens, without lost work: the last group's and all groups'
        together."""

    def _state_places(self) -> tuple[int, ...]:
        spacing = self.resources.settings.state_spacing
        return state_places(self.plan.prefill_tokens, self.plan.keep_tokens, spacing)

    async def run(self, progress: Callable[[Progress], None]) -> PrefillReport:
        """Prefill the prompt. Raises DeltafrontError, or WorkerError if the reservation is lost."""
        fleet, settings = self.resources.fleet, self.resources.settings
        while True:
            try:
                report = await self._prefill_on_any(progress)
            except WorkerError as error:
                await self._resume(error)
                await fleet.wait_until_ready(settings.worker_wait_s)
                self.replays.clock.lap("worker_wait")
                method = self.call.method.name
                self.groups = (await admit(self.resources, self.plan, self.call.options, method)).groups
                self._charge(self.groups[0])
            else:
                self.replays.clock.span(prefill_parts(report))
                return self._of_all_groups(report)

    async def _resume(self, error: WorkerError) -> None:
        """Have the next group prefill the tokens that the decode worker lacks. Ask the decode worker first:
        if the decode worker has died, the group did not fail.
        """
        if isinstance(error, WorkerLost):
            self.resources.fleet.forget(error.worker)
        points = [done for done in self._reports if self._resume_step and done % self._resume_step == 0]
        read = max(self._reports, default=self._job.start)
        try:
            start = await self.worker.resume(self._job.request_id, points, self._job.attempt + 1)
        except WorkerError:
            self.resources.metrics.count_prefilled_again(read)
            raise
        self.resources.metrics.count_prefilled_again(read - start)
        log.warning(
            "%s: %s; resuming at token %d",
            self._job.request_id,
            error.message,
            start,
            extra={"request_id": self.replays.request_id},
        )
        parts = prefill_parts(self._reports[start][0]) if start > self._job.start else {}
        self.replays.clock.span(parts, REPLAY)  # the time that the group did not report is lost
        await self.replays.back_off(error)
        self._reports = {done: reports for done, reports in self._reports.items() if done <= start}
        self._job = replace(self._job, start=start, attempt=self._job.attempt + 1)

    def _charge(self, group: str) -> None:
        tokens = self.plan.prefill_tokens - self._job.start
        tier = self.call.options.service_tier
        self.resources.fleet.charge(Charge(group, tokens, self.worker.name, 0, tier=tier))

    async def _prefill_on_any(self, progress: Callable[[Progress], None]) -> PrefillReport:
        """Prefill on the first group that accepts. If none does, raise the error with the soonest retry."""
        refused: list[Refused] = []
        for name in self.groups:
            if refused:
                self._charge(name)
            group = self.resources.fleet.group(name)
            outcome = await self._prefill_on(group, progress)
            if isinstance(outcome, Refused) and outcome.reason is RefusalReason.DUPLICATE:
                await group.cancel(self._job.request_id)  # the group was unreachable, and kept the request
                outcome = await self._prefill_on(group, progress)
            if isinstance(outcome, PrefillReport):
                return outcome
            refused.append(outcome)
            if outcome.reason not in RETRY_ELSEWHERE:
                raise refusal_error(outcome)
        raise refusal_error(soonest(refused))

    async def _prefill_on(
        self, group: Group, progress: Callable[[Progress], None]
    ) -> PrefillReport | Refused:
        """Prefill on one group. A failing group has ended the request, or ends it when its lease expires."""
        self.leases.add(group)
        try:
            async for event in group.prefill(self._job):
                if isinstance(event, PrefillQueued):
                    start, total = self._job.start, self.plan.prefill_tokens
                    after_s = self.resources.after_prefill.expected_s(self.plan.recompute_blocks)
                    s = self.replays.clock.elapsed + event.expected_s + after_s
                    progress(Progress(tokens_done=start, tokens_total=total, expected_first_token_seconds=s))
                elif isinstance(event, ChunkRead):
                    done, total, so_far = event.tokens_done, event.tokens_total, event.so_far
                    of_all = self._of_all_groups(so_far)
                    if done < total:  # the last token is always computed
                        self._reports[done] = so_far, of_all
                    progress(Progress(tokens_done=done, tokens_total=total, tiles=of_all.density))
                else:
                    self.leases.settle(group)
                    return event.report if isinstance(event, PrefillDone) else event
            raise WorkerFailed(group.name, f"{group.name} ended without a result")
        except WorkerError:
            self.leases.settle(group)
            raise

    def _of_all_groups(self, report: PrefillReport) -> PrefillReport:
        before = self._reports.get(self._job.start)
        return report if before is None else merge_reports(before[1], report)


def merge_reports(before: PrefillReport, after: PrefillReport) -> PrefillReport:
    """Merge the reports of two groups that prefilled parts of one prompt. Their numbers of stages may
    differ.
    """
    weights = [sum(layer.causal for layer in report.density) for report in (before, after)]
    sampled = before.sampled_share * weights[0] + after.sampled_share * weights[1]
    by_stage = zip_longest(before.stages, after.stages, fillvalue=dict[str, float]())
    return PrefillReport(
        queue=before.queue + after.queue,
        wall=before.wall + after.wall,
        critical=_sums(before.critical, after.critical),
        stages=tuple(_sums(a, b) for a, b in by_stage),
        density=summed_by_layer((*before.density, *after.density)),
        method=after.method,
        sampled_share=sampled / sum(weights) if sum(weights) else 0.0,
        handoff_bytes=before.handoff_bytes + after.handoff_bytes,
        launch_bound=tuple(map(sum, zip_longest(before.launch_bound, after.launch_bound, fillvalue=0.0))),
    )


def _sums(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}}
