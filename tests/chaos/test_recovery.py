"""How long a client waits when a process that works for it dies."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltafront.service.client import DeltafrontError, Token

from .conftest import Amount, Record
from .running import Service
from .schedule import Kind, prompt

WITH_SPARE_S, WITHOUT_S = 3.0, 12.0
_KINDS = (Kind.STAGE, Kind.DECODE, Kind.CONTROLLER)


def pause(service: Service, kind: Kind, draw: random.Random) -> float:
    """Longest pause of four clients, of which some read and some answer, when one process of a kind dies."""
    begun = [threading.Event() for _ in range(4)]

    def ask(number: int) -> float:
        longest, at = 0.0, time.monotonic()
        with service.client() as client:
            for event in client.generate(
                prompt(2 * number + 1), max_tokens=60, ignore_eos=True, method="dense"
            ):
                now = time.monotonic()
                longest, at = max(longest, now - at), now
                if kind is not Kind.DECODE or isinstance(event, Token):
                    begun[number].set()
        return longest

    with ThreadPoolExecutor(len(begun)) as pool:
        asked = [pool.submit(ask, number) for number in range(len(begun))]
        begun[0].wait(60)
        os.kill(draw.choice(service.processes()[kind]).pid, signal.SIGKILL)
        return max(one.result(180) for one in asked)


def measure(service: Service, amount: Amount, record: Record, case: str, bound_s: float) -> None:
    tries, pauses, late = amount.tries or 12, list[tuple[float, str]](), 0
    draw = random.Random(amount.seed)
    until = time.monotonic() + amount.budget_s
    with service.client() as client:
        for number in range(tries):
            if time.monotonic() > until:
                break
            service.seconds_to_whole(client)
            kind = _KINDS[number % len(_KINDS)]
            try:
                pauses.append((pause(service, kind, draw), kind.name.lower()))
            except DeltafrontError as error:
                print(error)
                pauses.append((float("inf"), kind.name.lower()))
            late += pauses[-1][0] > bound_s
    print(pauses)
    seconds = [one for one, _ in pauses]
    most, kind_of = max(pauses)
    note = (
        f"bad: over {bound_s:g} s; median {statistics.median(seconds):.1f} s, most {most:.1f} s ({kind_of})"
    )
    record(case, len(pauses), late, note)
    assert not late


@pytest.mark.timeout(24 * 3600)
def test_with_a_spare(service: Service, amount: Amount, record: Record) -> None:
    measure(service, amount, record, "recovery_spare", WITH_SPARE_S)


@pytest.mark.timeout(24 * 3600)
def test_without_a_spare(alone: Service, amount: Amount, record: Record) -> None:
    measure(alone, amount, record, "recovery_no_spare", WITHOUT_S)
