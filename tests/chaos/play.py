"""Plays one episode: clients send requests, processes die, and then all checks must hold."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from . import checks
from .checks import Log, Reference
from .load import Clients
from .references import Key, key_of
from .running import Service
from .schedule import ENTRIES, Ask, Episode, Fault, Form

NEXT = Ask(Form.GREEDY, 0, 8, 0)
"""The request after an episode."""
_LEASE_S = 5.5
"""Seconds after which requests and sessions of a dead door have ended: `stream_lease_s` and a tenth."""
_SLACK_S = 4.5
_GAUGES_S = 10.0

References = Mapping[Key, Reference]


@dataclass
class Outcome:
    """The results of an episode. Each list is empty if all is well. faults: faults that hit a process."""

    faults: list[Fault] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    requests: int = 0
    pause_s: float = 0.0

    @property
    def problems(self) -> list[str]:
        return [*self.lost, *self.differ, *self.held, *self.metrics]


def play(service: Service, episode: Episode, references: References) -> Outcome:
    """Play an episode. Raises AssertionError or TimeoutError if something never ends."""
    outcome = Outcome(requests=len(episode.asks))
    before = checks.parse(service.scrape())
    clients = Clients(service, episode.asks)
    for fault in episode.faults:
        while clients.seen() < fault.progress * clients.expected and not clients.done():
            time.sleep(0.01)
        if service.strike(fault):
            outcome.faults.append(fault)
    clients.join()
    outcome.held += _held(service)
    after = Clients(service, (NEXT,))
    after.join()
    logs = [*clients.logs, *after.logs]
    for log in logs:
        outcome.lost += filter(None, [checks.lost(log)])
        outcome.differ += filter(None, [checks.differs(log, references[key_of(log.ask)])])
        outcome.pause_s = max(outcome.pause_s, log.longest_pause_s)
    entries = sum(fault.kind in ENTRIES for fault in outcome.faults)
    outcome.metrics += _metrics(service, before, logs, entries)
    return outcome


def _held(service: Service) -> list[str]:
    with service.client() as client:
        service.seconds_to_an_answer(client)
        try:
            service.seconds_to_no_page(client, _LEASE_S + _SLACK_S)
        except AssertionError as error:
            return [f"pages are held {error}"]
    return []


def _metrics(service: Service, before: checks.Samples, logs: Sequence[Log], entries: int) -> list[str]:
    """Read /metrics, and wait for gauges, because doors poll once a second."""
    until = time.monotonic() + _GAUGES_S
    while (busy := checks.busy(after := checks.parse(service.scrape()))) and time.monotonic() < until:
        time.sleep(0.2)
    return checks.inconsistent(before, after, logs, entries) + [
        f"not back at zero: {series}" for series in busy
    ]
