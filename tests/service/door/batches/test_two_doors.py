"""Two doors with one storage do a batch once: one works on it, and the other takes over."""

from __future__ import annotations

import time
from collections.abc import Callable

import openai
import pytest

from deltafront.service.door.batches.runner import BatchRunner

from ...inprocess import House, wait_until
from ...test_metrics import value
from ..openai_calls import Open
from .calls import BODIES, CHAT, ENDED, answers, begin, lines_of, until

pytestmark = pytest.mark.usefixtures("impatient")


def later() -> float:
    return time.monotonic() + 60.0


def expire_the_lease(runner: BatchRunner) -> None:
    """Let a minute pass on the clock of a door that has seen the other's last lease."""

    def seen() -> bool:
        return runner._storage.read("lease").decode() == runner._lease._seen

    wait_until(seen, "the door does not read the lease")
    runner._lease._clock = later


def kill(runner: BatchRunner, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a door's work as a kill does: nothing of it reaches the storage any more."""

    async def gone(*_: object) -> None:
        raise OSError("this door is dead")

    async def end() -> None:
        for task in (runner._running, *runner._works.values()):
            assert task is not None
            task.cancel()

    monkeypatch.setattr(runner._storage, "run", gone)
    house.loop.run(end())


def test_next_door_asks_only_the_lines_without_an_answer(
    api: openai.OpenAI, house: House, open_door: Callable[..., str], runners: list[BatchRunner], connect: Open
) -> None:
    house.decode.pause_at = 3
    bodies = [{**BODIES[CHAT], "max_tokens": 1 if number < 3 else 9} for number in range(6)]
    batch = begin(api, lines_of(*bodies))
    wait_until(
        lambda: api.batches.retrieve(batch.id).request_counts.completed == 3, "the first lines are not stored"
    )
    house.loop.run(runners[0].stop())
    asked = len(house.group.jobs)
    house.decode.pause_at = -1
    other = connect(open_door("two"))
    done = until(other, batch, *ENDED)
    assert (done.status, done.request_counts.completed) == ("completed", 6)
    assert answers(other, done.output_file_id).keys() == {f"line-{number}" for number in range(6)}
    assert len(house.group.jobs) == asked + 3


def test_line_of_two_doors_is_in_the_output_once(
    api: openai.OpenAI, house: House, open_door: Callable[..., str], runners: list[BatchRunner], connect: Open
) -> None:
    house.decode.pause_at = 1
    batch = begin(api, lines_of(*[BODIES[CHAT]] * 2))
    until(api, batch, "in_progress")
    (first,) = runners
    assert first._running is not None
    house.loop.loop.call_soon_threadsafe(first._running.cancel)  # it renews no more, but its work goes on
    other = connect(open_door("two"))
    second = runners[1]
    assert not house.loop.run(second._storage.run(second._lease.hold)), "the first door has the lease"
    assert not second._works
    expire_the_lease(second)
    wait_until(lambda: second._works, "the second door does not take over")
    first._lease._clock = later
    house.decode.pause_at = -1
    done = until(other, batch, *ENDED)
    assert (done.status, len(answers(other, done.output_file_id))) == ("completed", 2)


def test_killed_doors_batch_is_completed_by_the_other_door(
    api: openai.OpenAI, house: House, open_door: Callable[..., str], runners: list[BatchRunner],
    connect: Open, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing is lost, and nothing is asked again but what the dead door had in flight."""
    until(api, begin(api, lines_of(BODIES[CHAT])), *ENDED)  # the first door has the lease
    other = connect(open_door("two"))
    house.decode.pause_at = 3
    bodies = [{**BODIES[CHAT], "max_tokens": 1 if number < 5 else 9} for number in range(12)]
    batch = begin(other, lines_of(*bodies))
    wait_until(lambda: len(house.group.jobs) == 1 + 5 + 4, "four lines are not in flight")
    wait_until(
        lambda: other.batches.retrieve(batch.id).request_counts.completed == 5,
        "the first lines are not stored",
    )
    assert not runners[1]._works
    kill(runners[0], house, monkeypatch)
    expire_the_lease(runners[1])
    house.decode.pause_at = -1
    done = until(other, batch, *ENDED)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 12, 0)
    assert answers(other, done.output_file_id).keys() == {f"line-{number}" for number in range(12)}
    assert len(house.group.jobs) == 1 + 12 + 4
    assert value(house, "batch_lines_total", outcome="completed") == 1 + 12
