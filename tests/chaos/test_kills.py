"""Random processes die or hang under mixed load."""

from __future__ import annotations

import time
from signal import SIGSTOP

import pytest

from .checks import from_below, overfull, parse
from .conftest import Amount, Record
from .play import Outcome, play
from .references import references
from .running import REPLAYS, Service
from .schedule import Fault, episode

REQUESTS = 6


@pytest.mark.timeout(24 * 3600)
def test_random_kills_lose_no_request_and_change_no_answer(
    service: Service, amount: Amount, record: Record
) -> None:
    """Also checks that no page stays in use and that the metrics add up."""
    found = references(service)
    until = time.monotonic() + amount.budget_s
    kills, seed, bad = 0, amount.seed, list[str]()
    with service.client() as client:
        while kills < amount.kills and time.monotonic() < until:
            started = time.monotonic()
            service.seconds_to_usable(client)
            usable = time.monotonic()
            one = play(service, episode(seed, REQUESTS, others=REPLAYS), found)
            head = f"seed {seed}: waited {usable - started:.1f} s, took {time.monotonic() - usable:.1f} s"
            head += f", longest pause {one.pause_s:.1f} s; {', '.join(map(named, one.faults)) or 'nothing'}"
            print(head, *one.problems, service.unexpected() if one.problems else "", sep="\n  ", flush=True)
            write(record, seed, one, add=amount.add or seed > amount.seed)
            kills, seed, bad = kills + len(one.faults), seed + 1, bad + one.problems
        scraped = parse(service.scrape())
    print(from_below(scraped))
    assert not bad and not overfull(scraped)


def write(record: Record, seed: int, one: Outcome, add: bool) -> None:
    """Write results at once, so that they remain if the run is interrupted."""
    for case in ("lost", "differ", "held", "metrics"):
        found = getattr(one, case)
        record(f"kills_{case}", len(one.faults), len(found), f"seed {seed}" if found else "", add)


def named(fault: Fault) -> str:
    verb = "stopped" if fault.signal == SIGSTOP else "killed"
    return f"{fault.kind.name.lower().replace('_', ' ')} {verb}"
