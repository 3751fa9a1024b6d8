"""Tests decode steps that are launched before the previous step's tokens have arrived."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deltafront.workers.decode.step_rows import LaunchedStep, Row, SampledToken
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import GenerateJob, Sampling


def ids_of(length: int) -> list[int]:
    return [(5 * i + length) % 198 for i in range(length)]


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


class Watch:
    """Records a runner's launches and the arrivals of their tokens in order: (event, step, rows of the
    step)."""

    def __init__(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int, int]] = []
        self.lengths: list[list[int]] = []
        self._made: list[LaunchedStep] = []
        self.before_landing: Callable[[int], None] = lambda step: None
        launch, chosen, steps = run.engine._runner.launch, LaunchedStep.chosen, dict[int, tuple[int, int]]()

        def launched(rows: list[Row], masks: Any = ()) -> LaunchedStep:
            made: LaunchedStep = launch(rows, masks)
            self._made.append(made)  # so that no other step gets its id
            steps[id(made)] = len(self.lengths), len(rows)
            self.log.append(("launch", *steps[id(made)]))
            self.lengths.append([row.length for row in rows])
            return made

        def landed(step: LaunchedStep) -> list[SampledToken]:
            if id(step) in steps:
                self.before_landing(steps[id(step)][0])
                self.log.append(("land", *steps.pop(id(step))))
            return chosen(step)

        run.engine._runner.launch = launched
        monkeypatch.setattr(LaunchedStep, "chosen", landed)


async def test_launches_a_step_before_the_last_steps_tokens_arrive(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = await bench(looks_ahead=True), await bench()
    watch = Watch(run, monkeypatch)
    answer = await run.ask("a", ids_of(40), greedy(4))
    order = [(what, step) for what, step, _ in watch.log]
    assert order == [("launch", 0), ("launch", 1), ("land", 0), ("launch", 2), ("land", 1), ("land", 2)]
    assert watch.lengths == [[40], [41], [42]], "each after the token before, and none after the last"
    assert answer.ids == (await plain.ask("a", ids_of(40), greedy(4))).ids


async def test_without_look_ahead_steps_run_one_at_a_time(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench()
    watch = Watch(run, monkeypatch)
    await run.ask("a", ids_of(40), greedy(4))
    assert [what for what, _, _ in watch.log] == ["launch", "land"] * 3


async def test_launches_ahead_while_requests_join_and_end(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = await bench(looks_ahead=True), await bench()
    watch, asked = Watch(run, monkeypatch), dict[str, asyncio.Task[Any]]()
    lengths, tokens = {"a": 40, "b": 21, "c": 9}, {"a": 6, "b": 9, "c": 30}
    loop, begun = asyncio.get_running_loop(), threading.Event()

    async def ask(name: str) -> None:
        asked[name] = asyncio.create_task(run.ask(name, ids_of(lengths[name]), greedy(tokens[name])))
        while not run.engine._scheduler.submitted >= len(asked):
            await asyncio.sleep(0.001)
        begun.set()

    def join(step: int) -> None:
        if step in (0, 2):  # the next step is already launched, the one after it has the new request
            begun.clear()
            asyncio.run_coroutine_threadsafe(ask("b" if step == 0 else "c"), loop)
            assert begun.wait(30)

    watch.before_landing = join
    await ask("a")
    await asked["a"]  # by then both others have been asked
    answers = {name: await asked[name] for name in lengths}
    rows = {step: count for what, step, count in watch.log if what == "launch"}
    assert sorted(set(rows.values())) == [1, 2, 3]
    place = {entry[:2]: at for at, entry in enumerate(watch.log)}
    late = [step for step in list(rows)[1:] if place["launch", step] > place["land", step - 1]]
    assert all(rows[step] > rows[step - 1] for step in late), "only after a first token was sampled"
    for name, answer in answers.items():
        assert answer.ids == (await plain.ask(name, ids_of(lengths[name]), greedy(tokens[name]))).ids


SAMPLINGS = (
    {},
    {"temperature": 0.8, "seed": 5, "top_k": 20},
    {"temperature": 1.2, "seed": 6, "top_p": 0.9},
    {"repetition_penalty": 1.6, "frequency_penalty": 0.5},
)


@pytest.mark.parametrize("samplings", [SAMPLINGS[:3], SAMPLINGS], ids=["sampled", "with penalties"])
async def test_look_ahead_changes_no_answer_as_requests_come_and_go(
    bench: Any, monkeypatch: pytest.MonkeyPatch, samplings: tuple[dict[str, Any], ...]
) -> None:
    """Some answers end by an end token, which is known only when the next step runs."""
    ahead, plain = await bench(looks_ahead=True, max_batch=3), await bench(max_batch=3)
    lengths = [5, 16, 33, 90, 48, 7, 64]
    (probe,) = [await plain.ask("probe", ids_of(33), greedy(20))]
    for run in (ahead, plain):
        run.engine._scheduler._eos_ids = frozenset(probe.ids[6:12])
    watch = Watch(ahead, monkeypatch)
    answers = [
        await asyncio.gather(
            *(
                run.ask(f"r{n}", ids_of(n), Sampling(max_tokens=3 * i + 8, **samplings[i % len(samplings)]))
                for i, n in enumerate(lengths)
            )
        )
        for run in (ahead, plain)
    ]
    found, wanted = ([(a.ids, a.finish.reason) for a in part] for part in answers)
    assert found == wanted
    assert {reason for _, reason in found} == {FinishReason.STOP, FinishReason.LENGTH}
    rows = {rows for _, _, rows in watch.log}
    assert len(rows) > 1 and sorted(step for what, step, _ in watch.log if what == "land") == list(
        range(len(watch.lengths))
    ), "every step that was launched has landed"


async def test_pages_are_freed_after_the_requests_last_step(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench(looks_ahead=True)
    watch, reached, go_on = Watch(run, monkeypatch), threading.Event(), threading.Event()

    def stop_at_two(step: int) -> None:
        if step == 2:  # step 3 is already launched
            reached.set()
            go_on.wait(30)

    watch.before_landing = stop_at_two
    await run.reserve("a", 40, 50)
    await run.deliver("a", ids_of(40))
    reading = asyncio.create_task(run.collect(GenerateJob(request_id="a", sampling=greedy(50))))
    assert await asyncio.to_thread(reached.wait, 30)
    cancelling = asyncio.create_task(run.engine.cancel("a"))
    await asyncio.sleep(0.05)
    assert run.used > 0 and not cancelling.done()
    go_on.set()
    await cancelling
    assert run.used == 0
    assert watch.log[-1] == ("land", 3, 1), "not before the step after it"
    assert (await reading).finish.reason is FinishReason.CANCELLED


async def test_failed_step_releases_the_step_launched_after_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await bench(looks_ahead=True)
    watch = Watch(run, monkeypatch)

    def fail_once(step: int) -> None:
        if step == 1:
            raise RuntimeError("lost the device")

    watch.before_landing = fail_once
    answer = await run.ask("a", ids_of(40), greedy(20))
    assert answer.finish.reason is FinishReason.FAILED and "lost the device" in answer.finish.message
    assert run.used == 0
    assert len((await run.ask("b", ids_of(40), greedy(6))).ids) == 6


async def test_closing_waits_for_steps_in_flight(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await bench(looks_ahead=True)
    watch = Watch(run, monkeypatch)
    await run.reserve("a", 40, 400)
    await run.deliver("a", ids_of(40))
    stream = run.engine.generate(GenerateJob(request_id="a", sampling=greedy(400)))
    for _ in range(4):
        await anext(stream)
    await run.engine.close()
    run.may_fault = True  # closed already
    assert run.used == 0
    assert [watch.log.count(("land", step, 1)) for step in range(len(watch.lengths))] == [1] * len(
        watch.lengths
    )
    await stream.aclose()
