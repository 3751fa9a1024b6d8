"""Random processes die or hang under mixed load."""

from __future__ import annotations

import time
from collections import Counter
from signal import SIGSTOP

import pytest

from .conftest import Amount, Record
from .load import references
from .play import Outcome, play
from .running import Service
from .schedule import Fault, episode

REQUESTS = 6


@pytest.mark.timeout(24 * 3600)
def test_random_kills(service: Service, amount: Amount, record: Record) -> None:
    """Whatever dies or hangs: no request is lost, no answer differs, no page stays, the metrics add up."""
    found = references(service)
    until = time.monotonic() + amount.budget_s
    outcomes: dict[int, Outcome] = {}
    seed = amount.seed
    with service.client() as client:
        while sum(len(one.faults) for one in outcomes.values()) < amount.kills and time.monotonic() < until:
            started = time.monotonic()
            service.seconds_to_usable(client)
            usable = time.monotonic()
            outcomes[seed] = one = play(service, episode(seed, REQUESTS), found)
            head = f"seed {seed}: waited {usable - started:.1f} s, took {time.monotonic() - usable:.1f} s"
            head += f", longest pause {one.pause_s:.1f} s; {', '.join(map(named, one.faults)) or 'nothing'}"
            print(head, *one.problems, sep="\n  ", flush=True)
            seed += 1
    write(record, outcomes)
    assert not any(one.problems for one in outcomes.values())


def write(record: Record, outcomes: dict[int, Outcome]) -> None:
    kills = sum(len(one.faults) for one in outcomes.values())
    kinds = Counter(named(fault) for one in outcomes.values() for fault in one.faults)
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    requests = sum(one.requests for one in outcomes.values())
    for case in ("lost", "differ", "held", "metrics"):
        bad = {seed: getattr(one, case) for seed, one in outcomes.items() if getattr(one, case)}
        note = f"{requests} requests: {what}" if case == "lost" else ""
        seeds = f"seeds {', '.join(map(str, bad))}" if bad else ""
        record(f"kills_{case}", kills, sum(map(len, bad.values())), "; ".join(filter(None, [note, seeds])))


def named(fault: Fault) -> str:
    verb = "stopped" if fault.signal == SIGSTOP else "killed"
    return f"{fault.kind.name.lower().replace('_', ' ')} {verb}"
