"""Mixed load for as long as one likes: no process grows."""

from __future__ import annotations

import time

import psutil
import pytest

from .checks import from_below, lost, overfull, parse
from .conftest import Amount, Record
from .growth import Sample, grown
from .load import Clients
from .running import Service
from .schedule import Form, episode

_REQUESTS = 6
_EVERY_S = 5.0


def sampled(service: Service, at: float) -> list[Sample]:
    every = [process for those in service.processes().values() for process in those]
    every += [psutil.Process(service.pid)]
    return [
        Sample(one.pid, " ".join(one.cmdline())[:60], at, one.memory_info().rss, one.num_fds())
        for one in every
    ]


@pytest.mark.timeout(48 * 3600)
def test_nothing_grows(service: Service, amount: Amount, record: Record) -> None:
    """The first third warms up. Nothing dies here, so every process is there all the time."""
    started, samples, problems, requests = time.monotonic(), list[Sample](), list[str](), 0
    seed = amount.seed
    while (now := time.monotonic()) < started + 60 * amount.minutes:
        if not samples or now > samples[-1].at + _EVERY_S:
            samples += sampled(service, now)
        asks = episode(seed, _REQUESTS).asks
        clients = Clients(service, [ask for ask in asks if service.http or ask.form is not Form.HTTP])
        clients.join()
        problems += filter(None, map(lost, clients.logs))
        requests, seed = requests + len(clients.logs), seed + 1
    with service.client() as client:
        service.seconds_to_no_page(client)
    scraped = parse(service.scrape())
    problems += overfull(scraped)
    found = grown(samples, started + 20 * amount.minutes)
    print(*problems, *found, sep="\n")
    processes = len({sample.pid for sample in samples})
    note = (
        f"tries are processes; {amount.minutes:g} minutes, {requests} requests, {len(problems)} of them lost"
        f"; {from_below(scraped)}"
    )
    record("soak", processes, len(found) + len(problems), "; ".join([note, *found]))
    assert not found and not problems
