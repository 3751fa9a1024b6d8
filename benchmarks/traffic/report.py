"""Summarises answers: percentiles, throughput, and goodput under limits. Nothing here does I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deltafront.benchmarks.traffic.client import Answer
from deltafront.benchmarks.traffic.play import Played

Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """An answer within both limits counts as good. gap_s bounds the 95th percentile of its gaps."""

    ttft_s: float = 5.0
    gap_s: float = 0.060


def gaps(answer: Answer) -> list[float]:
    """Return the seconds between events that brought tokens. Tokens of one event arrive together."""
    return [after - before for before, after in pairwise(answer.arrivals_s)]


def ttft(answer: Answer) -> float | None:
    return answer.arrivals_s[0] - answer.due_s if answer.arrivals_s else None


def good(answer: Answer, limits: Limits) -> bool:
    first, between = ttft(answer), sorted(gaps(answer))
    in_time = first is not None and first <= limits.ttft_s
    return bool(answer.done_s) and in_time and (not between or quantile(between, 0.95) <= limits.gap_s)


def gaps_during(answers: Iterable[Answer], begin_s: float, end_s: float) -> list[float]:
    """Return the gaps that overlap a time span."""
    return [
        after - before
        for answer in answers
        for before, after in pairwise(answer.arrivals_s)
        if before < end_s and after > begin_s
    ]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the ordered values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(name: str, values: Iterable[float | None], unit: str) -> Row:
    """Return p50, p90, p95, p99 and the maximum of values in seconds. unit: s or ms. Empty without values."""
    scale = {"s": 1.0, "ms": 1e3}[unit]
    ordered = sorted(scale * value for value in values if value is not None)
    if not ordered:
        return {}
    shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {f"{name}_{key}_{unit}": round(quantile(ordered, share), 3) for key, share in shares.items()}


def summary(answers: Sequence[Answer], seconds: float) -> Row:
    """Summarise answers. Unfinished ones, too, have first tokens and gaps."""
    done = [answer for answer in answers if answer.done_s]
    off = [abs(a.expected_s / first - 1) for a in answers if a.expected_s and (first := ttft(a))]
    cached = [answer.cached for answer in done if answer.cached is not None]
    read = sum(answer.turn.tokens for answer in done)
    return {
        "requests_done": len(done),
        "requests_failed": sum(bool(answer.error) for answer in answers),
        "requests_unfinished": sum(not answer.error and not answer.done_s for answer in answers),
        "retries": sum(answer.retries for answer in answers),
        "prompt_tokens": read,
        "cached_share": round(sum(cached) / read, 4) if cached and read else None,
        "answer_tokens": sum(answer.tokens for answer in answers),
        "answer_tokens_per_s": round(sum(answer.tokens for answer in answers) / seconds, 2),
        **spread("ttft", map(ttft, answers), "s"),
        **spread("gap", (gap for answer in answers for gap in gaps(answer)), "ms"),
        **spread("answer", (answer.done_s - answer.due_s for answer in done), "s"),
        **({"expected_off_p90": round(quantile(sorted(off), 0.9), 3)} if off else {}),
    }


def report(played: Played, limits: Limits) -> Row:
    """Summarise a played load: all answers, each part of it, its goodput, and the load generator's lag."""
    answers = played.answers
    passed = [answer for answer in answers if good(answer, limits)]
    parts = sorted({answer.turn.part for answer in answers} - {""})
    by_part = {part: [answer for answer in answers if answer.turn.part == part] for part in parts}
    return {
        "seconds": round(played.seconds, 3),
        **summary(answers, played.seconds),
        "good_share": round(len(passed) / len(answers), 4) if answers else None,
        "goodput_per_s": round(len(passed) / played.seconds, 4),
        **spread("client_lag", played.lags_s, "ms"),
        "client_cpu": round(played.cpu, 3),
        **({"while_long_is_read": _disturbed(by_part)} if "long" in parts else {}),
        **({"parts": {p: summary(of, played.seconds) for p, of in by_part.items()}} if parts else {}),
    }


def _disturbed(by_part: Mapping[str, Sequence[Answer]]) -> Row:
    """Summarise the chats' gaps from the long prompt's sending to its first token."""
    (long,) = by_part["long"]
    end_s = long.arrivals_s[0] if long.arrivals_s else math.inf
    return spread("gap", gaps_during(by_part["chat"], long.due_s, end_s), "ms")


def medians(rows: Sequence[Row]) -> Row:
    """Return the median of every number over the runs of one load. Numbers that a run lacks do not count."""
    made: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        if values and isinstance(values[0], Mapping):
            made[name] = medians(values)
        else:
            made[name] = round(statistics.median(values), 4) if values else None
    return made


def merged(old: Sequence[Row], new: Row) -> list[Row]:
    """Return the rows of a file with a new row, which replaces the one of the same server and load."""
    kept = {(row["server"], row["load"]): row for row in (*old, new)}
    return [kept[key] for key in sorted(kept)]
