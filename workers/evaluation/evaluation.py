"""Asks a model each prompt with dense attention and with every setting, until time is up.

Imports no torch. The command line passes `answering.OneModel` as the model; tests pass others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Protocol

from deltafront.workers.evaluation.comparison import ComparedRow, MeasuredAnswer, compare
from deltafront.workers.evaluation.planner import Trial, affordable, another_fits, hopeless
from deltafront.workers.evaluation.prompts import Sample, TaskPrompt

Clock = Callable[[], float]


class Answers(Protocol):
    """A model under evaluation: tokenises prompts and answers them with a prefill method."""

    def sample(self, prompt: TaskPrompt, session: bool) -> Sample: ...

    def answers(
        self, sample: Sample, method: str, blocks: Sequence[int], told: Sequence[int] | None
    ) -> list[MeasuredAnswer]:
        """Answer the sample once for each number in `blocks` (blocks to recompute, ascending). `told`: token
        ids of dense attention's answer; None if `method` is dense."""
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
        The first prompt is always asked; dense attention's time for it decides which trials run
        (`affordable`).

        Args:
            tell: Called after each prompt.
        """
        for prompt in prompts:
            left_s = until - self._clock()
            if self.prompts and not (self.running and another_fits(self._took, self.running, left_s)):
                return
            self._ask(prompt, until)
            self.running = [trial for trial in self.running if not hopeless(self.rows()[trial])]
            tell(self)

    def rows(self) -> dict[Trial, ComparedRow]:
        """Compare each trial that has answers, dropped ones included, with dense attention on the same
        prompts."""
        return {
            trial: compare(str(trial), self.prompts, answers, self._dense)
            for trial, answers in self._answers.items()
        }

    def dense(self) -> ComparedRow:
        return compare("dense", self.prompts, self._dense, self._dense)

    def _ask(self, prompt: TaskPrompt, until: float) -> None:
        begun = self._clock()
        (dense,) = self._model.answers(self._model.sample(prompt, session=False), "dense", [0], None)
        self._took["dense"] = self._clock() - begun
        if not self.prompts:
            self.running = affordable(self.running, self._took["dense"], until - self._clock())
        self.prompts.append(prompt)
        self._dense.append(dense)
        ordered = sorted(self.running, key=lambda trial: (*_read(trial), trial.setting.blocks))
        for (method, session), some in groupby(ordered, _read):
            self._try(prompt, method, session, list(some), dense)

    def _try(
        self, prompt: TaskPrompt, method: str, session: bool, some: list[Trial], dense: MeasuredAnswer
    ) -> None:
        """Run the trials `some`, which differ only in the number of recomputed blocks, on one prefill of the
        prompt."""
        begun = self._clock()
        blocks = [trial.setting.blocks for trial in some]
        got = self._model.answers(self._model.sample(prompt, session), method, blocks, dense.ids)
        for trial, answer in zip(some, got, strict=True):
            self._answers.setdefault(trial, []).append(answer)
            self._took[str(trial)] = (self._clock() - begun) / len(some)


def _read(trial: Trial) -> tuple[str, bool]:
    return trial.setting.method, trial.session
