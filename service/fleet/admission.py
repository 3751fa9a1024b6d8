"""Admission control: chooses candidate workers for a prompt, and refuses prompts that cannot meet their
deadline. Pure functions.

The workers' states may be a second old. So they are used only to order candidates and to refuse prompts that
no worker could ever hold. Only a worker itself refuses a prompt because it is full. Without a recent rate, no
request is refused for its deadline.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from deltafront.service.fleet.fleet_view import not_draining
from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.messages.states import DecodeStats, GroupStats

_SHORTEST_RETRY_S = 1.0
_SAME_NODE = 0.25
"""A worker on the prefill group's node is ranked as if it had this additional share of free pages."""


class Reason(StrEnum):
    TOO_LARGE = "too_large"
    BACKLOG = "backlog"
    """The deadline is too soon for the backlog of every group."""
    TOO_SLOW = "too_slow"
    """Even an idle group would miss the deadline."""


@dataclass(frozen=True)
class Need:
    """The tokens that a request needs.

    Attributes:
        prefill_tokens: Tokens of the whole prompt.
        found_tokens: Tokens of the prompt that a prefix hit covers.
        method: The attention method that prefills the prompt.
        tier: The request's service tier.
        recompute_tokens: Tokens of the pages for recomputed blocks.
    """

    prefill_tokens: int
    answer_tokens: int = 0
    seconds_left: float | None = None
    recompute_tokens: int = 0
    found_tokens: int = 0
    method: str = ""
    tier: ServiceTier = ServiceTier.DEFAULT

    @property
    def new_tokens(self) -> int:
        return self.prefill_tokens - self.found_tokens

    def pages(self, page_tokens: int) -> int:
        return -(-(self.prefill_tokens + self.answer_tokens + self.recompute_tokens) // page_tokens)


@dataclass(frozen=True)
class Admitted:
    """Candidate workers, the best first."""

    groups: tuple[str, ...]
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Rejected:
    """A refusal. retry_after_s: None if the prompt will never fit."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


Decision = Admitted | Rejected


def admit(need: Need, groups: Sequence[GroupStats], workers: Sequence[DecodeStats]) -> Decision:
    """Return the prefill groups and decode workers that can serve a request, best first, or the reason to
    reject it. Neither `groups` nor `workers` is empty."""
    fitting = [w for w in not_draining(workers) if need.pages(w.page_tokens) <= w.pages_total]
    page_tokens = workers[0].page_tokens  # groups have the same size
    able = [g for g in not_draining(groups) if need.prefill_tokens <= g.pages_total * page_tokens]
    if not fitting or not able:
        again = f", with {need.recompute_tokens} computed again," if need.recompute_tokens else ""
        return Rejected(
            Reason.TOO_LARGE,
            f"{need.prefill_tokens} prompt tokens and {need.answer_tokens} of answer{again} are more than "
            "any worker can hold: shorten them, or let the operator raise cache_tokens",
        )
    rejections = [(g, _deadline_rejection(need, g)) for g in sorted(able, key=lambda g: _group_rank(need, g))]
    in_time = [g for g, rejection in rejections if rejection is None]
    if not in_time:
        return min((r for _, r in rejections if r is not None), key=lambda r: r.retry_after_s or math.inf)
    fitting.sort(key=lambda w: _worker_rank(need, in_time[0], w))
    return Admitted(tuple(g.name for g in in_time), tuple(w.name for w in fitting))


def predicted_ttft(need: Need, group: GroupStats) -> float | None:
    """Predict the seconds until the group has prefilled the prompts queued before this one, then this one;
    None without a recent measurement of the group's cost.
    """
    return group.expected_s(need.method, need.found_tokens, need.prefill_tokens, need.tier)


def alone_s(need: Need, group: GroupStats) -> float | None:
    """Predict the seconds of the prompt's own prefill; None without a recent cost."""
    return group.alone_s(need.method, need.found_tokens, need.prefill_tokens)


def _deadline_rejection(need: Need, group: GroupStats) -> Rejected | None:
    ttft, alone = predicted_ttft(need, group), alone_s(need, group)
    if need.seconds_left is None or ttft is None or alone is None or ttft <= need.seconds_left:
        return None
    if alone > need.seconds_left:
        return Rejected(
            Reason.TOO_SLOW,
            f"reading {need.new_tokens} tokens takes about {alone:.1f} s, "
            f"the deadline leaves {need.seconds_left:.1f} s",
        )
    return Rejected(
        Reason.BACKLOG,
        f"the first token is expected in {ttft:.1f} s, the deadline leaves {need.seconds_left:.1f} s",
        max(ttft - need.seconds_left, _SHORTEST_RETRY_S),
    )


def _worker_rank(need: Need, group: GroupStats, worker: DecodeStats) -> tuple[bool, float, int, str]:
    """Return a sort key: decode workers with enough free pages first, then the most free pages. A worker on
    the prefill group's node gets a bonus of _SAME_NODE times its total pages."""
    full = need.pages(worker.page_tokens) > worker.pages_free
    bonus = _SAME_NODE * worker.pages_total if worker.node in group.nodes else 0.0
    return full, -worker.pages_free - bonus, worker.running, worker.name


def _group_rank(need: Need, group: GroupStats) -> tuple[float, int, int, str]:
    """Return a sort key: the shortest wait first. A group without a rate counts as one token per second."""
    known = group.tokens_per_second > 0  # an old rate is good enough here
    wait = group.wait_s(need.new_tokens, need.tier) if known else float(group.waiting_tokens)
    return wait, group.waiting_tokens, group.running + group.waiting, group.name
