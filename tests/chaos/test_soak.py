"""Mixed load for a chosen time, during which no process may grow."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import psutil
import pytest

from deltafront.kernels.constants import PAGE_TOKENS

from .checks import from_below, lost, overfull, parse, total, unfilled
from .conftest import Amount, Record
from .growth import Sample, grown
from .load import Clients
from .running import Service
from .schedule import PROMPTS, Ask, Form, episode, prompt

_REQUESTS = 6
_EVERY_S = 5.0
_FILLS = 2
"""Before the first sample, documents with this multiple of all tiers' size are prefilled."""
_BACK = 32
"""A repeated document is among this number of recent ones, so it is on the GPU, in a tier or evicted."""


def sampled(service: Service, at: float) -> list[Sample]:
    every = [process for those in service.processes().values() for process in those]
    every += [psutil.Process(service.pid)]
    return [
        Sample(one.pid, " ".join(one.cmdline())[:60], at, one.memory_info().rss, one.num_fds())
        for one in every
    ]


def read(number: int) -> Ask:
    """Prefill a document that no other request uses: odd numbers from PROMPTS on."""
    return Ask(Form.GREEDY, number, 8, 0)


def fill(service: Service, numbers: Iterator[int]) -> int:
    """Fill the tiers, because their memory becomes resident only at first use. A tier is full once it has
    evicted something. Returns the number of prefilled tokens."""
    room = PAGE_TOKENS * total(parse(service.scrape()), "deltafront_kv_tier_room_pages")
    tokens = 0
    while tokens < _FILLS * room:
        asks = [read(next(numbers)) for _ in range(_REQUESTS)]
        clients = Clients(service, asks)
        clients.join()
        assert not any(map(lost, clients.logs)), clients.logs
        tokens += sum(len(prompt(ask.prompt)) for ask in asks)
    assert not unfilled(parse(service.scrape())), f"after {tokens} tokens, {room:g} have room"
    return tokens


@pytest.mark.timeout(48 * 3600)
def test_memory_and_file_descriptors_do_not_grow(service: Service, amount: Amount, record: Record) -> None:
    """The tiers are filled first, and the first third of the samples is the warm-up. Each episode sends a new
    document and repeats an earlier one. No process is killed."""
    numbers = itertools.count(PROMPTS + 1, 2)
    tokens = fill(service, numbers)
    started, samples, problems, requests = time.monotonic(), list[Sample](), list[str](), 0
    seed = amount.seed
    while (now := time.monotonic()) < started + 60 * amount.minutes:
        if not samples or now > samples[-1].at + _EVERY_S:
            samples += sampled(service, now)
        new = next(numbers)
        again = max(PROMPTS + 1, new - 2 * random.Random(seed).randint(1, _BACK))
        asks = (*episode(seed, _REQUESTS).asks, read(new), read(again))
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
        f"; after {tokens:,} tokens that filled the tiers"
        f"; {from_below(scraped)}"
    )
    record("soak", processes, len(found) + len(problems), "; ".join([note, *found]))
    assert not found and not problems
