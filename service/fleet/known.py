"""The workers as last seen, and what was sent to them since. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ...workers.messages.states import DecodeStats, GroupStats

_S = TypeVar("_S", GroupStats, DecodeStats)
_L = TypeVar("_L")


@dataclass(frozen=True)
class Charge:
    """What an admitted request takes: tokens to read for a group, pages of a decode worker."""

    group: str
    tokens: int
    worker: str
    pages: int


@dataclass(frozen=True)
class View:
    """Last known state of every live worker, by name."""

    groups: Mapping[str, GroupStats] = field(default_factory=dict)
    workers: Mapping[str, DecodeStats] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether every configured role has a started member: a prefill group, and a decode worker. One that
        is still starting fails when it is asked for its state, so it is not here."""
        return bool(self.groups and self.workers)

    @property
    def last_resort(self) -> set[str]:
        """Who is asked although it drains, because all of its role do."""
        roles: list[Mapping[str, GroupStats | DecodeStats]] = [self.groups, self.workers]
        return {name for role in roles if all(one.draining for one in role.values()) for name in role}

    def charged(self, charge: Charge) -> View:
        groups, workers = dict(self.groups), dict(self.workers)
        if group := groups.get(charge.group):
            waiting = group.waiting_tokens + charge.tokens
            groups[group.name] = replace(group, waiting_tokens=waiting, waiting=group.waiting + 1)
        if worker := workers.get(charge.worker):
            workers[worker.name] = replace(worker, pages_free=max(worker.pages_free - charge.pages, 0))
        return View(groups, workers)


def staying(ones: Sequence[_S]) -> Sequence[_S]:
    """Those of a role that new prompts go to: who drains gets none, unless all do."""
    return [one for one in ones if not one.draining] or ones


def newest(
    asked: Mapping[str, _L], answers: Mapping[str, _S], now: Mapping[str, _L], last: Mapping[str, _S]
) -> dict[str, _S]:
    """Of the workers that are known `now`: the answer of who was asked, the last state of who was found
    since."""
    of = {name: answers if asked.get(name) is link else last for name, link in now.items()}
    return {name: states[name] for name, states in of.items() if name in states}


def without(links: Mapping[str, _L], name: str) -> dict[str, _L]:
    return {key: value for key, value in links.items() if key != name}
