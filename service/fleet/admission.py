"""Where may a prompt go, and is there time? Pure: worker states in, a decision out.

States are up to a second old. So they order the groups and the decode workers, but only a worker's own
answer says that its queue is full or its pages are taken; what is refused here for room is what no worker
could ever hold. Predicted time to first token is the group's backlog plus the prompt, at the group's
recent rate; a group that has not prefilled anything yet, or not lately, predicts nothing, and nobody is
refused for time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ...workers.messages.states import DecodeStats, GroupStats
from .known import staying

_SHORTEST_RETRY_S = 1.0
_NEAR = 0.25
"""Being on a node of the prefill group is worth so much of a decode worker's pages: K/V does not leave the
node, but a much emptier worker elsewhere is still the better one."""


class Reason(StrEnum):
    TOO_LARGE = "too_large"
    """No worker could ever hold it."""
    BACKLOG = "backlog"
    """The deadline falls into the backlog of every group."""
    TOO_SLOW = "too_slow"
    """Even an idle group would miss the deadline."""


@dataclass(frozen=True)
class Need:
    """read_tokens to prefill, answer_tokens at most to generate; seconds until the deadline, if any.
    recompute_tokens: room beside, for what is computed again."""

    read_tokens: int
    answer_tokens: int = 0
    seconds_left: float | None = None
    recompute_tokens: int = 0

    def pages(self, page_tokens: int) -> int:
        return -(-(self.read_tokens + self.answer_tokens + self.recompute_tokens) // page_tokens)


@dataclass(frozen=True)
class Admitted:
    """groups: where to prefill, shortest wait first. workers: decode workers to ask for pages, best first.
    ttft_s: predicted for the first group, or None."""

    groups: tuple[str, ...]
    workers: tuple[str, ...]
    ttft_s: float | None


@dataclass(frozen=True)
class Rejected:
    """retry_after_s: when it may fit; None if it never will."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


Decision = Admitted | Rejected


def admit(need: Need, groups: Sequence[GroupStats], workers: Sequence[DecodeStats]) -> Decision:
    """Decide about one prompt. There are some of both; who drains is asked where all do."""
    fitting = [w for w in staying(workers) if need.pages(w.page_tokens) <= w.pages_total]
    room = _page_tokens(workers)
    able = [g for g in staying(groups) if need.read_tokens <= g.pages_total * room]
    if not fitting or not able:
        again = f", with {need.recompute_tokens} computed again," if need.recompute_tokens else ""
        return Rejected(
            Reason.TOO_LARGE,
            f"{need.read_tokens} prompt tokens and {need.answer_tokens} of answer{again} are more than any "
            "worker can hold: shorten them, or raise cache_tokens in the server's configuration",
        )
    judged = [(g, _too_late(need, g)) for g in sorted(able, key=_order)]
    in_time = [g for g, late in judged if late is None]
    if not in_time:
        return min((late for _, late in judged if late is not None), key=_comes_back)
    fitting.sort(key=lambda w: _preference(need, in_time[0], w))
    names = tuple(g.name for g in in_time)
    return Admitted(names, tuple(w.name for w in fitting), predicted_ttft(need, in_time[0]))


def predicted_ttft(need: Need, group: GroupStats) -> float | None:
    """Seconds until the prompt is read, if it queues behind everything that waits now."""
    if group.rate <= 0:
        return None
    return (group.waiting_tokens + need.read_tokens) / group.rate


def _too_late(need: Need, group: GroupStats) -> Rejected | None:
    ttft = predicted_ttft(need, group)
    if need.seconds_left is None or ttft is None or ttft <= need.seconds_left:
        return None
    alone = need.read_tokens / group.rate
    if alone > need.seconds_left:
        return Rejected(
            Reason.TOO_SLOW,
            f"reading {need.read_tokens} tokens takes about {alone:.1f} s, "
            f"the deadline leaves {need.seconds_left:.1f} s",
        )
    return Rejected(
        Reason.BACKLOG,
        f"the first token is expected in {ttft:.1f} s, the deadline leaves {need.seconds_left:.1f} s",
        max(ttft - need.seconds_left, _SHORTEST_RETRY_S),
    )


def _comes_back(late: Rejected) -> float:
    return math.inf if late.retry_after_s is None else late.retry_after_s


def _preference(need: Need, group: GroupStats, worker: DecodeStats) -> tuple[bool, float, int, str]:
    """Who has room now comes first, then who has more of it, or is near."""
    near = worker.node in group.nodes
    full = need.pages(worker.page_tokens) > worker.pages_free
    return full, -worker.pages_free - near * _NEAR * worker.pages_total, worker.running, worker.name


def _order(group: GroupStats) -> tuple[float, int, int, str]:
    """Shortest wait first; a group that has no rate yet counts as reading one token a second."""
    rate = group.tokens_per_second  # for an order an old one is better than none
    wait = group.waiting_tokens / rate if rate > 0 else float(group.waiting_tokens)
    return wait, group.waiting_tokens, group.running + group.waiting, group.name


def _page_tokens(workers: Sequence[DecodeStats]) -> int:
    """Prefill groups use pages of the same size as decode workers."""
    return workers[0].page_tokens
