"""The order, the time and the verdict of an evaluation, on a model that answers from a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deltafront.workers.evaluation.comparison import ComparedRow, MeasuredAnswer, compare
from deltafront.workers.evaluation.evaluation import Evaluation
from deltafront.workers.evaluation.planner import (
    GOAL,
    LEAST,
    SETTINGS,
    TASKS,
    Trial,
    endless_prompts,
    fitting,
    found,
    hopeless,
    nearest,
    trials,
)
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt
from deltafront.workers.evaluation.ruler import Haystack
from deltafront.workers.evaluation.setting import Setting
from deltafront.workers.model.calibrated.profile import Profile

from ..profiles import write_profile
from ..tiny_model import make_tiny_model

DENSE, GOOD, BAD = Setting("dense"), Setting("dpxa:share=0.2", 8), Setting("streaming")


class Table:
    """A model whose answers are a function of setting and prompt. It takes `seconds` for each prefill."""

    def __init__(self, right: Callable[[Setting, int], bool], seconds: float = 1.0, places: int = 1) -> None:
        self.right, self.seconds, self.now, self.places = right, seconds, 0.0, places
        self.asked: list[tuple[str, bool, tuple[int, ...]]] = []
        self.together: list[int] = []

    def clock(self) -> float:
        return self.now

    def sample(self, prompt: TaskPrompt, session: bool) -> Sample:
        return Sample(prompt, (1,), (2,) if session else ())

    def answers(
        self,
        samples: Sequence[Sample],
        method: str,
        blocks: Sequence[int],
        told: Sequence[Sequence[int]] | None,
    ) -> list[list[MeasuredAnswer]]:
        assert list(blocks) == sorted(blocks) and (told is None) == (method == "dense")
        assert told is None or told == [self.ids(sample) for sample in samples]
        self.now += self.seconds * len(samples)
        self.asked.append((method, bool(samples[0].question), tuple(blocks)))
        self.together.append(len(samples))
        return [[self.answer(Setting(method, count), sample) for sample in samples] for count in blocks]

    def answer(self, setting: Setting, sample: Sample) -> MeasuredAnswer:
        density = 1.0 if setting == DENSE else 0.2
        said = "yes" if self.right(setting, int(sample.prompt.source)) else "no"
        return MeasuredAnswer(self.ids(sample), said, density, 1.0, 0.0, 1.0)

    @staticmethod
    def ids(sample: Sample) -> tuple[int, ...]:
        return (7, int(sample.prompt.source))


def prompts(count: int) -> list[TaskPrompt]:
    return [TaskPrompt("task", str(number), "document", "?", ("yes",)) for number in range(count)]


def run(table: Table, given: Sequence[Trial], count: int, until: float = 1e9) -> Evaluation:
    evaluation = Evaluation(table, given, table.clock)
    evaluation.run(prompts(count), until, lambda _: None)
    return evaluation


def test_every_setting_answers_all_prompts_and_is_compared_with_dense() -> None:
    table = Table(lambda setting, number: setting != BAD or number != 3)
    rows = run(table, [Trial(GOOD), Trial(BAD)], 5).rows()
    assert [row.samples for row in rows.values()] == [5, 5]
    assert (rows[Trial(GOOD)].lost, rows[Trial(BAD)].lost) == (0, 1)


def test_a_prompt_is_prefilled_once_for_all_numbers_of_blocks() -> None:
    table = Table(lambda *_: True)
    run(table, [Trial(Setting("dpxa", 32)), Trial(Setting("dpxa", 8)), Trial(Setting("dpxa", 8), True)], 1)
    assert table.asked == [("dense", False, (0,)), ("dpxa", False, (8, 32)), ("dpxa", True, (8,))]


def test_prompts_after_the_first_are_answered_together() -> None:
    table, alone = (Table(lambda setting, n: setting != BAD or n % 3 == 0, places=p) for p in (4, 1))
    found, wanted = (run(each, [Trial(GOOD), Trial(BAD)], 10).rows() for each in (table, alone))
    assert table.together == [1] * 3 + [4] * 6 + [1] * 2, "BAD is dropped after nine prompts"
    assert found[Trial(GOOD)] == wanted[Trial(GOOD)] and found[Trial(BAD)].samples == 9


@pytest.mark.parametrize(
    ("batches", "prompts"), [(0.4, 0), (0.5, 0), (0.75, 8), (1.0, 16), (1.5, 24), (9.0, 32), (-1.0, 0)]
)
def test_a_shorter_batch_is_assumed_to_take_at_least_half_as_long(batches: float, prompts: int) -> None:
    took = {"dense": 2.0, str(Trial(GOOD)): 3.0, str(Trial(BAD)): 90.0}
    assert fitting(took, 16, [Trial(GOOD)], 5.0 * batches, 32) == prompts
    assert fitting(took, 16, [], 5.0 * batches, 32) == 0


@pytest.mark.parametrize("places", [1, 5])
@pytest.mark.parametrize("seconds", [0.7, 1.0, 13.0])
def test_evaluation_starts_no_prompt_that_exceeds_the_time_limit(seconds: float, places: int) -> None:
    table = Table(lambda *_: True, seconds, places)
    evaluation = run(table, [Trial(GOOD), Trial(Setting("xattention"))], 1000, until=100.0)
    if len(evaluation.prompts) > 1:
        assert table.now <= 100.0 < table.now + 3 * seconds * max(1, places / 2)
    assert evaluation.rows()


def test_evaluates_fewer_settings_if_time_is_short_but_at_least_one() -> None:
    """The list's first settings are tried, so that there is time for eight prompts of 1 s per setting."""
    given = [Trial(Setting(f"dpxa:share=0.{n}")) for n in range(1, 8)]
    for until, tried in ((0.0, 1), (17.0, 1), (33.0, 3), (1000.0, 7)):
        rows = run(Table(lambda *_: True), given, 9, until).rows()
        assert list(rows) == given[:tried]


def test_stops_evaluating_a_setting_that_cannot_reach_the_goal() -> None:
    table = Table(lambda setting, number: setting != BAD or number % 3 == 0)
    evaluation = run(table, [Trial(GOOD), Trial(BAD)], 40)
    rows = evaluation.rows()
    assert LEAST <= rows[Trial(BAD)].samples < 40 == rows[Trial(GOOD)].samples
    assert evaluation.running == [Trial(GOOD)] and hopeless(rows[Trial(BAD)])


def test_evaluation_ends_when_every_setting_is_dropped() -> None:
    evaluation = run(Table(lambda setting, number: setting == DENSE), [Trial(BAD)], 40)
    assert not evaluation.running and len(evaluation.prompts) == LEAST
    assert found(evaluation.rows()).setting is None


@pytest.mark.parametrize("calls", range(2, 9))
def test_interrupted_evaluation_compares_the_answers_so_far(calls: int) -> None:
    table = Table(lambda *_: True)
    evaluation, ask = Evaluation(table, [Trial(GOOD), Trial(BAD)], table.clock), table.answers

    def interrupted(*given: Any) -> list[list[MeasuredAnswer]]:
        if len(table.asked) == calls:
            raise KeyboardInterrupt
        return ask(*given)

    table.answers = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        evaluation.run(prompts(9), 1e9, lambda _: None)
    assert evaluation.dense().samples == -(-calls // 3)
    assert sum(one.samples for one in evaluation.rows().values()) == calls - evaluation.dense().samples


def row(lost: int, count: int, density: float) -> ComparedRow:
    dense = [MeasuredAnswer((7,), "yes", 1.0, 1.0, 0.0, 1.0)] * count
    said = ["no"] * lost + ["yes"] * (count - lost)
    some = [MeasuredAnswer((7,), each, density, 1.0, 0.0, 1.0) for each in said]
    return compare("x", prompts(count), some, dense)


def test_recommends_the_sparsest_setting_whose_interval_meets_goal() -> None:
    sparse, denser, best = Setting("streaming"), Setting("dpxa"), Setting("xattention")
    rows = {Trial(sparse): row(5, 200, 0.1), Trial(denser): row(0, 200, 0.4), Trial(best): row(1, 400, 0.2)}
    assert found(rows).setting == best
    low = (rows[Trial(best)].kept_95 or (0, 0))[0]
    assert low >= GOAL > (rows[Trial(sparse)].kept_95 or (0, 0))[0]
    assert found(rows).words.startswith("xattention at density 0.20 keeps 0.998 (0.993 to 1.0")
    del rows[Trial(best)]
    assert found(rows).setting == denser
    assert found({}).words == "dense: no setting is shown to keep 0.97 of dense attention's score"


def test_recommends_only_settings_that_meet_the_goal_in_sessions_too() -> None:
    rows = {Trial(GOOD): row(0, 200, 0.2), Trial(GOOD, session=True): row(20, 200, 0.2)}
    assert found(rows).setting is None
    rows[Trial(GOOD, session=True)] = row(0, 150, 0.2)
    assert found(rows).row == rows[Trial(GOOD, session=True)], "the worse of the two"


def test_recommends_no_setting_after_few_prompts() -> None:
    assert found({Trial(GOOD): row(0, 20, 0.2)}).setting is None


def test_evaluates_the_given_or_else_the_default_settings(tmp_path: Path) -> None:
    assert [str(trial) for trial in trials([], "prompt", None, 131_072)] == list(SETTINGS)
    given = trials(["dpxa@8", "dpxa@8", "streaming"], "both", None, 300)
    assert [str(trial) for trial in given] == ["dpxa@8", "dpxa@8, session", "streaming", "streaming, session"]
    profile = Profile.read(write_profile(make_tiny_model(tmp_path / "model"), tmp_path / "profile.json"))
    first = trials([], "session", profile, 31_000)[0]
    wanted = "xattention+delta:sink=1,window=1,stride=8,density=0.2,gamma=64,spread=0.25@32"
    assert first.session and str(first.setting) == wanted
    alone = trials([], "prompt", profile, 31_000, levels_alone=True)
    assert str(alone[0]) == wanted and not {*map(str, alone)} & {*SETTINGS}
    short = trials([], "prompt", profile, 6000)[0]
    assert str(short.setting) == wanted.replace("@32", "@11"), "a quarter of the prompt"
    with pytest.raises(ValueError, match="unknown attention method"):
        trials(["nope"], "prompt", None, 31_000)


def test_short_prompts_get_settings_with_few_blocks() -> None:
    assert {trial.setting.blocks for trial in trials([], "prompt", None, 6000)} == {8}
    without = trials([], "prompt", None, 31_000, recomputes=False)
    assert {trial.setting.blocks for trial in without} == {0} and len(without) == len(set(without)) > 3
    with pytest.raises(ValueError, match=r"dpxa@8.*recomputes no blocks"):
        trials(["dpxa@8"], "prompt", None, 31_000, recomputes=False)
    with pytest.raises(ValueError, match="every setting prefills 4096 tokens densely: give longer prompts"):
        trials([], "prompt", None, 4096)


def test_drops_a_setting_that_computes_as_much_as_dense() -> None:
    assert hopeless(row(0, 1, 1.2)) and not hopeless(row(0, 1, 0.9))
    assert found({Trial(GOOD): row(0, 200, 1.2)}).setting is None


def test_names_the_setting_with_the_highest_lower_confidence_limit() -> None:
    rows = {Trial(GOOD): row(0, 20, 0.2), Trial(BAD): row(9, 20, 0.1), Trial(DENSE): row(0, 99, 1.0)}
    assert nearest(rows) is rows[Trial(GOOD)]
    assert nearest({Trial(GOOD): row(0, 2, 0.2)}) is None


def test_prompts_cycle_through_tasks_and_texts() -> None:
    hay = [Haystack(name, f"{name} is a text. " * 99) for name in ("one", "two")]
    made = list(itertools.islice(endless_prompts(hay, TASKS, 1200, lambda text: len(text.split()), 1), 12))
    assert [one.task for one in made] == [*TASKS, *TASKS[:3]]
    assert [one.source.split()[0] for one in made[:4]] == ["one", "two", "one", "two"]
    assert len({one.source for one in made}) == 12
