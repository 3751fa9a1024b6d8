"""Asks a model prompts, a few at once, with dense attention and with every setting, until time is up.

Imports no torch. The command line passes `answering.OneModel` as the model; tests pass others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, islice
from typing import Protocol

from deltafront.workers.evaluation.comparison import ComparedRow, MeasuredAnswer, compare
from deltafront.workers.evaluation.planner import Trial, affordable, fitting, hopeless
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt

Clock = Callable[[], float]


class Answers(Protocol):
    """A model under evaluation: tokenises prompts and answers them with a prefill method. It answers at most
    `places` samples at once."""

    places: int

    def sample(self, prompt: TaskPrompt, session: bool) -> Sample: ...

    def answers(
        self,
        samples: Sequence[Sample],
        method: str,
        blocks: Sequence[int],
        told: Sequence[Sequence[int]] | None,
    ) -> list[list[MeasuredAnswer]]:
        """Answer the samples once for each number in `blocks` (blocks to recompute, ascending). Returns a
        list of answers per number. `told`: token ids of dense attention's answers; None if `method` is
        dense."""
        ...


class Evaluation:
    """Runs an evaluation and holds all answers so far. A trial answers the prompts in order until it is
    dropped, so a trial's answers belong to the first prompts."""

    def __init__(self, model: Answers, trials: Sequence[Trial], clock: Clock = time.monotonic) -> None:
        self.prompts: list[TaskPrompt] = []
        self.running = list(trials)
        self._model, self._clock = model, clock
        self._dense: list[MeasuredAnswer] = []
        self._answers: dict[Trial, list[MeasuredAnswer]] = {}
        self._took: dict[str, float] = {}

    def run(self, prompts: Iterable[TaskPrompt], until: float, tell: Callable[[Evaluation], None]) -> None:
        """Ask prompts until all trials are dropped or another prompt would end after `until` on the clock.
        The first prompt is always asked, alone; dense attention's time for it decides which trials run
        (`affordable`).

        Args:
            tell: Called after each batch of prompts.
        """
        rest, count = iter(prompts), 1
        while batch := list(islice(rest, count)):
            self._ask(batch, until)
            self.running = [trial for trial in self.running if not hopeless(self.rows()[trial])]
            tell(self)
            left_s = until - self._clock()
            count = fitting(self._took, len(batch), self.running, left_s, self._model.places)

    def rows(self) -> dict[Trial, ComparedRow]:
        """Compare each trial that has answers, dropped ones included, with dense attention on the same
        prompts."""
        return {
            trial: compare(str(trial), self.prompts, answers, self._dense)
            for trial, answers in self._answers.items()
        }

    def dense(self) -> ComparedRow:
        return compare("dense", self.prompts, self._dense, self._dense)

    def _ask(self, prompts: Sequence[TaskPrompt], until: float) -> None:
        begun = self._clock()
        samples = [self._model.sample(prompt, session=False) for prompt in prompts]
        (dense,) = self._model.answers(samples, "dense", [0], None)
        self._took["dense"] = self._clock() - begun
        if not self.prompts:
            self.running = affordable(self.running, self._took["dense"], until - self._clock())
        self.prompts += prompts
        self._dense += dense
        ordered = sorted(self.running, key=lambda trial: (*_read(trial), trial.setting.blocks))
        for (method, session), some in groupby(ordered, _read):
            self._try(prompts, method, session, list(some), [answer.ids for answer in dense])

    def _try(
        self,
        prompts: Sequence[TaskPrompt],
        method: str,
        session: bool,
        some: list[Trial],
        told: Sequence[Sequence[int]],
    ) -> None:
        """Run the trials `some`, which differ only in the number of recomputed blocks, on one prefill of each
        prompt."""
        begun = self._clock()
        samples = [self._model.sample(prompt, session) for prompt in prompts]
        got = self._model.answers(samples, method, [trial.setting.blocks for trial in some], told)
        for trial, answers in zip(some, got, strict=True):
            self._answers.setdefault(trial, []).extend(answers)
            self._took[str(trial)] = (self._clock() - begun) / len(some)


def _read(trial: Trial) -> tuple[str, bool]:
    return trial.setting.method, trial.session
