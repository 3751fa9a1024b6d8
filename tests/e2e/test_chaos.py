"""The short form of the chaos suite on this service, which has nothing to spare but a door."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL

import pytest

from deltafront.service.client.server_process import LocalService
from deltafront.service.config import load

from ..chaos.play import NEXT, play
from ..chaos.references import key_of, references
from ..chaos.running import Service, whole_of
from ..chaos.schedule import Episode, Fault, Kind, episode
from .conftest import CONFIG


@pytest.fixture(scope="module")
def tried(service: LocalService) -> Service:
    config = load(CONFIG)
    whole = whole_of(
        config.prefill.groups, config.prefill.stages, config.decode.workers, config.door.replicas
    )
    return Service(service.pid, whole, service.address, model=config.door.model_name)


@pytest.mark.parametrize("kinds", [(Kind.STAGE,), (Kind.DECODE, Kind.DOOR)], ids=lambda kinds: kinds[-1].name)
def test_nothing_is_lost_when_processes_die(tried: Service, kinds: tuple[Kind, ...]) -> None:
    """Prompts are short here, and answers too: what takes the time is to load a model again."""
    asks = tuple(
        replace(ask, prompt=ask.prompt // 2 * 2, tokens=ask.tokens // 4 + 4, events=ask.events // 4)
        for ask in episode(len(kinds), 5).asks
    )
    faults = tuple(Fault(kind, 0, SIGKILL, 0.2 * number) for number, kind in enumerate(kinds, 1))
    known = references(tried, {key_of(ask) for ask in (*asks, NEXT)})
    outcome = play(tried, Episode(0, asks, faults), known)
    assert not outcome.problems and len(outcome.faults) == len(kinds)
    with tried.client() as client:
        tried.seconds_to_whole(client)
