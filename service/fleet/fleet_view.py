"""The workers' last known states, corrected by the load sent to them since. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from deltafront.workers.messages.service_tiers import ServiceTier
from deltafront.workers.messages.states import DecodeStats, GroupStats

_S = TypeVar("_S", GroupStats, DecodeStats)
_H = TypeVar("_H")


@dataclass(frozen=True)
class Charge:
    """The load of an admitted request: tokens in a group's queue, and pages of a decode worker.

    `seconds` is the expected time of its prefill; None: not known. `tier` is its service tier.
    """

    group: str
    tokens: int
    worker: str
    pages: int
    seconds: float | None = None
    tier: ServiceTier = ServiceTier.DEFAULT


@dataclass(frozen=True)
class FleetView:
    """The last states of live workers, by name."""

    groups: Mapping[str, GroupStats] = field(default_factory=dict)
    workers: Mapping[str, DecodeStats] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Say whether each role has a worker that has started."""
        return bool(self.groups and self.workers)

    @property
    def last_resort(self) -> set[str]:
        """The draining workers that must keep serving, because all workers of their role drain."""
        roles: list[Mapping[str, GroupStats | DecodeStats]] = [self.groups, self.workers]
        return {name for role in roles if all(state.draining for state in role.values()) for name in role}

    def charged(self, charge: Charge) -> FleetView:
        groups, workers = dict(self.groups), dict(self.workers)
        if group := groups.get(charge.group):
            waiting = group.waiting_tokens + charge.tokens
            queue = group.queue
            if charge.seconds is not None and group.costs:
                queue = (*queue, (charge.tokens, charge.seconds, charge.tier))
            groups[group.name] = replace(
                group, waiting_tokens=waiting, waiting=group.waiting + 1, queue=queue
            )
        if worker := workers.get(charge.worker):
            workers[worker.name] = replace(worker, pages_free=max(worker.pages_free - charge.pages, 0))
        return FleetView(groups, workers)


def not_draining(states: Sequence[_S]) -> Sequence[_S]:
    """Return the states of workers that do not drain, or all if all drain."""
    return [state for state in states if not state.draining] or states


def latest_states(
    polled: Mapping[str, _H], answers: Mapping[str, _S], now: Mapping[str, _H], last: Mapping[str, _S]
) -> dict[str, _S]:
    """Return the polled answers of workers that are known `now`, and the last states of workers found since
    the poll."""
    sources = {name: answers if polled.get(name) is handle else last for name, handle in now.items()}
    return {name: states[name] for name, states in sources.items() if name in states}


def without(workers: Mapping[str, _H], name: str) -> dict[str, _H]:
    return {key: value for key, value in workers.items() if key != name}
