"""Makes the tables of `deltafront top` from two scrapes. Workers measure nothing extra for these tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

_QUANTILES = (0.5, 0.9, 0.99)
_RPCS = ("Prefill", "Generate")
_TTFT, _GAPS = "time_to_first_token_seconds", "inter_token_latency_seconds"
_REQUESTS = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
_COLUMNS = {
    "prefill": {**_REQUESTS, "queue": "queue_tokens", "tokens/s": "prefill_tokens_per_second"},
    "decode": {**_REQUESTS, "sessions": "sessions", "cached": "kv_pages_remembered"},
}
"""The gauges of workers that are shown, by role and heading."""


_table = partial(Table, box=SIMPLE_HEAD)


@dataclass(frozen=True)
class Scrape:
    """One answer of the metrics port. at: seconds on a monotonic clock."""

    at: float
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sum the samples of metric `deltafront_…` by the values of the labels."""
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for given, value in self.samples.get(f"deltafront_{name}", ()):
            sums[tuple(given.get(label, "") for label in labels)] += value
        return sums

    @property
    def tokens(self) -> float:
        """Count the tokens sent. `generation_tokens_total` would count an answer only at its end."""
        return sum(self.by(f"{name}_count")[()] for name in (_TTFT, _GAPS))


def parse_scrape(text: str, at: float) -> Scrape:
    """Parse Prometheus' text format. Raises ValueError."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name].append((sample.labels, sample.value))
    if not any(name.startswith("deltafront_") for name in samples):
        raise ValueError("it holds no metrics of Deltafront")
    return Scrape(at, samples)


def overview(before: Scrape, now: Scrape, title: str) -> Group:
    """Make the tables. Rates and recent percentiles are of the time between the two scrapes."""
    tiers = [_tiers(now)] if now.by("kv_tier_room_pages") else []
    workers = [_workers(now, role) for role in _COLUMNS]
    return Group(_load(before, now, title), _ttft(before, now), *workers, *tiers)


def _load(before: Scrape, now: Scrape, title: str) -> Table:
    seconds = now.at - before.at
    table = _table(title=escape(title), title_justify="left", show_header=False)
    table.add_row("tokens a second", f"{_rate(before.tokens, now.tokens, seconds):.1f}")
    table.add_row("prompt tokens in the queue", f"{now.by('queue_tokens')[()]:.0f}")
    ended, earlier = (scrape.by("requests_total", "method_rpc", "outcome") for scrape in (now, before))
    for (rpc, outcome), count in sorted(ended.items()):
        if count and rpc in _RPCS:
            rate = _rate(earlier[rpc, outcome], count, seconds)
            table.add_row(f"{rpc}: {escape(outcome)}", f"{count:.0f}, {rate:.2f} a second")
    return table


def _rate(before: float, now: float, seconds: float) -> float:
    return max(0.0, now - before) / seconds if seconds > 0 else 0.0


def _ttft(before: Scrape, now: Scrape) -> Table:
    headers = (f"p{quantile * 100:.0f}" for quantile in _QUANTILES)
    table = _table("time to first token", *headers, "requests")
    ever, earlier = (scrape.by(f"{_TTFT}_bucket", "le") for scrape in (now, before))
    recent = {bound: max(0.0, count - earlier[bound]) for bound, count in ever.items()}
    for name, counts in ((f"last {now.at - before.at:.0f} s", recent), ("since the start", ever)):
        buckets = sorted((float(bound), count) for (bound,), count in counts.items())
        values = (percentile(buckets, quantile) for quantile in _QUANTILES)
        shown = ("–" if value is None else f"{value:.2f} s" for value in values)
        table.add_row(name, *shown, f"{buckets[-1][1] if buckets else 0:.0f}")
    return table


def percentile(buckets: list[tuple[float, float]], quantile: float) -> float | None:
    """Estimate a percentile as Prometheus' `histogram_quantile` does, from upper bounds and cumulative counts
    in order. None: nothing was observed.
    """
    wanted = quantile * buckets[-1][1] if buckets else 0.0
    low = below = 0.0
    for bound, count in buckets:
        if count >= wanted > 0:
            return low + (bound - low) * (wanted - below) / (count - below) if bound < float("inf") else low
        low, below = bound, count
    return None


def _workers(now: Scrape, role: str) -> Table:
    table = _table(role, "state", *_COLUMNS[role], "pages used")
    names = (*_COLUMNS[role].values(), "worker_draining", "kv_pages", "kv_pages_free")
    *columns, draining, pages, free = (now.by(name, "worker") for name in names)
    for worker, up in sorted(now.by("worker_up", "worker").items()):
        if worker[0].startswith(f"{role}:"):
            state = "[red]gone" if not up else "draining" if draining[worker] else "up"
            counts = (f"{column[worker]:.0f}" for column in columns)
            used = _share(pages[worker] - free[worker], pages[worker])
            table.add_row(escape(worker[0].removeprefix(f"{role}:")), state, *counts, used)
    return table


def _tiers(now: Scrape) -> Table:
    table = _table("decode", "tier", "pages used")
    pages = now.by("kv_tier_pages", "worker", "tier")
    for key, room in sorted(now.by("kv_tier_room_pages", "worker", "tier").items()):
        table.add_row(escape(key[0].removeprefix("decode:")), escape(key[1]), _share(pages[key], room))
    return table


def _share(used: float, room: float) -> str:
    return f"{used / room:.0%} of {room:.0f}" if room else "–"
