"""Checks of the clients' logs and of /metrics, which must hold after any schedule. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .schedule import COMPARED, Ask, Form

Samples = Mapping[str, float]
"""Values by series with labels, as in /metrics."""
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "sessions")
_STREAMS = ('method_rpc="Prefill"', 'method_rpc="Generate"')
_UNFINISHED = "\ufffd"
"""U+FFFD for an unfinished character. It is held back, but sent at the end of an answer."""
_MAY_END = {Form.CANCEL: ("cancelled", "finished"), Form.LEAVE: ("left", "finished")}


@dataclass
class Log:
    """The record of one client. ends: all terminal events: `finished`, `left`, or an error's code and
    message. calls: number of streams; lost: streams that broke. again: documents prefilled again because
    their worker died."""

    ask: Ask
    indices: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ends: list[str] = field(default_factory=list)
    calls: int = 0
    lost: int = 0
    again: int = 0
    longest_pause_s: float = 0.0


@dataclass(frozen=True)
class Reference:
    """An answer without faults: its ids and its text."""

    ids: Sequence[int]
    texts: Sequence[str]
    """The answer's text after each token."""


def lost(log: Log) -> str:
    """Return why a request counts as lost; empty if it ended exactly once, with success."""
    may = _MAY_END.get(log.ask.form, ("finished",))
    if len(log.ends) != 1 or log.ends[0] not in may:
        return f"{log.ask}: ended as {log.ends or 'nothing'}"
    if log.indices != list(range(len(log.indices))):
        return f"{log.ask}: tokens came as {log.indices}"
    answered = log.ends[0] == "finished" and log.ask.form is not Form.HTTP
    if answered and len(log.ids) != log.ask.tokens:
        return f"{log.ask}: {len(log.ids)} tokens"
    return ""


def differs(log: Log, reference: Reference) -> str:
    """Return how the received answer differs from the one without faults; empty if it does not."""
    if log.ask.form is Form.HTTP:
        wanted = reference.texts[log.ask.tokens - 1]
        rest = log.text.removeprefix(wanted).strip(_UNFINISHED)
        same = log.ends != ["finished"] or (log.text.startswith(wanted) and not rest)
        return "" if same else f"{log.ask}: {log.text!r}, {wanted!r}"
    if log.ask.form not in COMPARED:
        return ""
    same = list(log.ids) == list(reference.ids[: len(log.ids)])
    return "" if same else f"{log.ask}: {log.ids}, not {list(reference.ids)}"


def longest_wait(heard: Iterable[float], since: float) -> float:
    """Return the longest wait for a next event, given the times of a client's events in order. Waits before
    `since` do not count."""
    longest, at = 0.0, since
    for now in heard:
        longest, at = max(longest, now - at), max(now, since)
    return longest


def parse(exposed: str) -> dict[str, float]:
    """Parse /metrics into values by series. The values of a series from two nodes are added."""
    found: dict[str, float] = {}
    for line in exposed.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            found[series] = found.get(series, 0.0) + float(value)
    return found


def total(samples: Samples, name: str, *labels: str) -> float:
    """Sum a metric's series that have all these labels."""
    return sum(
        value
        for series, value in samples.items()
        if re.split(r"[{ ]", series)[0] == name and all(label in series for label in labels)
    )


def busy(samples: Samples) -> list[str]:
    """Return the gauges that have not returned to zero."""
    return [
        f"{series} {value:g}"
        for series, value in samples.items()
        if value and any(series.startswith(f"deltafront_{gauge}") for gauge in _GAUGES)
    ]


def from_below(samples: Samples) -> str:
    """Describe the number of tokens loaded from host memory and disk."""
    counts = {
        source: total(samples, "deltafront_cached_tokens_total", f'source="{source}"')
        for source in ("host", "disk")
    }
    return ", ".join(f"{count:,.0f} tokens from {source}" for source, count in counts.items())


def unfilled(samples: Samples) -> list[str]:
    """Return the tiers that have not evicted anything yet, so they may still be filling."""
    gone = "deltafront_kv_tier_evicted_pages"
    return [f"{series} 0" for series, value in samples.items() if series.startswith(gone) and not value]


def overfull(samples: Samples) -> list[str]:
    """Return the tiers with more pages than their size."""
    room = "deltafront_kv_tier_room_pages"
    return [
        f"{series}: {value:g} pages, {samples[held]:g} held"
        for series, value in samples.items()
        if series.startswith(room)
        and samples[held := series.replace(room, "deltafront_kv_tier_pages", 1)] > value
    ]


def inconsistent(before: Samples, after: Samples, logs: Iterable[Log], entries: int) -> list[str]:
    """Return contradictions between counters and the clients' logs.

    Every stream at a door has one outcome, unless the door died. `entries`: how many doors and proxies died;
    then a client that left may not have noticed it. An answer that finished at a client has finished at a
    door.
    """

    def grown(name: str, *labels: str) -> float:
        return total(after, name, *labels) - total(before, name, *labels)

    seen = list(logs)
    calls, broken = sum(log.calls for log in seen), sum(log.lost for log in seen)
    left = sum(log.ends == ["left"] for log in seen) if entries else 0
    ended = sum(grown("deltafront_requests_total", rpc) for rpc in _STREAMS)
    timed = sum(grown("deltafront_e2e_request_latency_seconds_count", rpc) for rpc in _STREAMS)
    finished = grown("deltafront_requests_total", _STREAMS[1], 'outcome="finished"')
    answers = sum(log.ends == ["finished"] for log in seen)
    problems = []
    if not calls - broken - left <= ended <= calls:
        problems.append(f"{calls} streams, {broken} of them broken, have {ended:g} outcomes")
    if broken and not entries:
        problems.append(f"{broken} streams broke, and no door nor proxy died")
    if timed != ended:
        problems.append(f"{ended:g} outcomes, {timed:g} times")
    if finished < answers:
        problems.append(f"{answers} clients have an answer, {finished:g} are counted")
    falls = [series for series, value in before.items() if _counts(series) and after.get(series, 0) < value]
    return problems + [f"{series} fell" for series in falls]


def _counts(series: str) -> bool:
    return series.startswith("deltafront_") and re.split(r"[{ ]", series)[0].endswith(
        ("_total", "_count", "_bucket")
    )
