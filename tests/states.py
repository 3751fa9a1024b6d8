"""States and reports of workers, with defaults for values that a test does not set."""

from __future__ import annotations

from typing import Any

from deltafront.workers.messages.events import PrefillReport
from deltafront.workers.messages.states import DecodeStats, GroupStats

IDLE: dict[str, Any] = {"pages_total": 100, "pages_free": 100, "running": 0, "waiting": 0}


def group_stats(name: str = "g", **state: Any) -> GroupStats:
    """Make the state of an idle group without a measured rate."""
    return GroupStats(name=name, **IDLE | {"waiting_tokens": 0, "tokens_per_second": 0.0} | state)


def decode_stats(name: str = "d", **state: Any) -> DecodeStats:
    """Make the state of an idle decode worker without sessions."""
    return DecodeStats(name=name, **IDLE | {"sessions": 0} | state)


def prefill_report(**figures: Any) -> PrefillReport:
    """Make the report of a prompt that took 3.5 s with `dpxa`."""
    told: dict[str, Any] = {"queue": 0.0, "wall": 3.5, "critical": {}, "stages": (), "density": ()}
    return PrefillReport(**told | {"method": "dpxa", "sampled_share": 0.0, "handoff_bytes": 0} | figures)
