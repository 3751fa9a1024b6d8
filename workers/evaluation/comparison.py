"""Compares each setting with dense attention on the same samples. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median, stdev

from deltafront.workers.evaluation.prompts import TaskPrompt

TOLD = 24
"""Number of first tokens of dense attention's answer whose log-probability is measured."""


@dataclass(frozen=True)
class MeasuredAnswer:
    """A greedy answer, and the probability of dense attention's answer.

    Attributes:
        ids, said: Tokens and text of the greedy answer.
        density: Share of causal tiles that prefill computed, as in the service's reports: without tiles for
            recomputed blocks or for a question to a session.
        seconds: Wall-clock time to the first token.
        logp: Mean log-probability of the first `TOLD` tokens of dense attention's answer, teacher-forced.
        agreement: Share of these tokens that have the highest probability.
        runs: Mean number of runs of similar keys in a block, by layer; None where the method finds none.
    """

    ids: tuple[int, ...]
    said: str
    density: float
    seconds: float
    logp: float
    agreement: float
    runs: tuple[float | None, ...] = ()

    def score(self, prompt: TaskPrompt) -> float:
        """Return the share of right answers; without right answers, `agreement`."""
        return prompt.score(self.said) if prompt.answers else self.agreement


@dataclass(frozen=True)
class ComparedRow:
    """The results of a setting, compared with dense attention on the same samples.

    Attributes:
        setting: The setting as text; `dense` for dense attention.
        density: Mean density.
        dense, score: Mean scores of dense attention and of the setting.
        kept, kept_95: The setting's sum of scores divided by dense attention's, and its 95% interval (None:
            not known; see `kept_interval`).
        lost, won: Numbers of samples whose score is below and above dense attention's.
        same: Share of answers whose text equals dense attention's.
        agreement, logp: Mean agreement, and mean of logp minus dense attention's logp.
        seconds: Median time to the first token.
        by_task: Mean score of the setting for each task.
        runs: The first sample's runs of similar keys in a block, by layer (`MeasuredAnswer`).
        scores, logps: The score and the difference of logp of each sample.
    """

    setting: str
    samples: int
    density: float
    dense: float
    score: float
    kept: float
    kept_95: tuple[float, float] | None
    lost: int
    won: int
    same: float
    agreement: float
    logp: float
    seconds: float
    by_task: Mapping[str, float]
    runs: Sequence[float | None]
    scores: Sequence[float] = field(repr=False)
    logps: Sequence[float] = field(repr=False)


def compare(
    setting: str,
    prompts: Sequence[TaskPrompt],
    answers: Sequence[MeasuredAnswer],
    dense: Sequence[MeasuredAnswer],
) -> ComparedRow:
    """Compare a setting's answers with dense attention's to the same prompts: the first len(answers) ones."""
    prompts, dense = prompts[: len(answers)], dense[: len(answers)]
    pairs = list(zip(answers, dense, strict=True))
    scores, theirs = (
        [answer.score(prompt) for answer, prompt in zip(some, prompts, strict=True)]
        for some in (answers, dense)
    )
    logps = [own.logp - other.logp for own, other in pairs]
    whole = sum(theirs)
    return ComparedRow(
        setting=setting,
        samples=len(answers),
        density=fmean(one.density for one in answers),
        dense=fmean(theirs),
        score=fmean(scores),
        kept=sum(scores) / whole if whole else math.nan,
        kept_95=kept_interval(scores, theirs, [prompt.source for prompt in prompts]),
        lost=sum(mine < other for mine, other in zip(scores, theirs, strict=True)),
        won=sum(mine > other for mine, other in zip(scores, theirs, strict=True)),
        same=fmean(own.said == other.said for own, other in pairs),
        agreement=fmean(one.agreement for one in answers),
        logp=fmean(logps),
        seconds=median(one.seconds for one in answers),
        by_task={
            task: fmean(score for score, own in zip(scores, prompts, strict=True) if own.task == task)
            for task in dict.fromkeys(prompt.task for prompt in prompts)
        },
        runs=answers[0].runs,
        scores=scores,
        logps=logps,
    )


def kept_interval(
    scores: Sequence[float], dense: Sequence[float], sources: Sequence[str]
) -> tuple[float, float] | None:
    """Return the 95% t interval of sum(scores) / sum(dense), by the delta method with documents (`sources`)
    as clusters (Cochran 1977, section 6.3). If no score is below dense attention's, the lower end is at most
    that of the rule of three (Hanley and Lippman-Hand 1983). None for fewer than three documents, or if the
    sum of `dense` is 0.
    """
    documents = list(dict.fromkeys(sources))
    count, whole = len(documents), sum(dense)
    if count < 3 or not whole:
        return None
    kept = sum(scores) / whole
    errors = dict.fromkeys(documents, 0.0)
    for mine, theirs, source in zip(scores, dense, sources, strict=True):
        errors[source] += mine - kept * theirs
    half = t_quantile(0.975, count - 1) * stdev(errors.values()) * math.sqrt(count) / whole
    if any(mine < theirs for mine, theirs in zip(scores, dense, strict=True)):
        return kept - half, kept + half
    return min(kept - half, 1 - 3 / count), kept + half


def t_quantile(share: float, degrees: int) -> float:
    """Return a quantile of Student's t by the expansion of Cornish and Fisher (1938). From ten degrees of
    freedom on, the error is below 0.002."""
    z = NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


HEADER = (
    "setting", "density", "first token", "dense", "score", "÷ dense (95%)", "lost / won", "same answers",
    "same tokens", "logp",
)  # fmt: skip


def cells(row: ComparedRow) -> tuple[str, ...]:
    """Return a row's cells, in the order of `HEADER`."""
    interval = row.kept_95
    return (
        row.setting,
        f"{row.density:.3f}",
        f"{row.seconds:.2f} s",
        f"{row.dense:.3f}",
        f"{row.score:.3f}",
        f"{row.kept:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""),
        f"{row.lost} / {row.won} of {row.samples}",
        f"{row.same:.2f}",
        f"{row.agreement:.3f}",
        f"{row.logp:+.3f}",
    )


def markdown(rows: Iterable[ComparedRow]) -> str:
    """Return a Markdown table."""
    lines = [HEADER, ["---"] * len(HEADER), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
