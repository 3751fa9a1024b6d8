"""Compares each case with dense attention on the same samples. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, median, stdev
from typing import Any

from deltafront.benchmarks.lab.reading import Answer, Case
from deltafront.benchmarks.lab.samples import Sample
from deltafront.benchmarks.markdown import markdown

Row = dict[str, Any]


class Compared:
    """Collects the row of each case on the same samples. The first case must be dense attention."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.dense: Sequence[Answer] = ()
        self.rows: list[Row] = []

    def add(self, case: Case, answers: Sequence[Answer]) -> None:
        self.dense = self.dense or answers
        made, dense = (
            [sample.score(answer.said) for sample, answer in zip(self.samples, some, strict=True)]
            for some in (answers, self.dense)
        )
        densities, seconds = [one.density for one in answers], [one.seconds for one in answers]
        found = row(str(case), [sample.task for sample in self.samples], made, dense, densities, seconds)
        lower = [own.logp - theirs.logp for own, theirs in zip(answers, self.dense, strict=True)]
        found |= {
            "prefill": fmean(one.prefill for one in answers),
            "agreement": fmean(one.agreement for one in answers),
            "logp": fmean(lower),
            "logps": lower,
        }
        self.rows.append(found)


def row(
    case: str,
    tasks: Sequence[str],
    scores: Sequence[float],
    dense: Sequence[float],
    densities: Sequence[float],
    seconds: Sequence[float],
) -> Row:
    """Make a case's row. All sequences have one entry per sample, in the same order.

    `lost` and `won` count samples with a lower and with a higher score than dense attention. `ratio` is the
    sum of scores divided by dense attention's, `ratio_95` its confidence interval over samples.
    """
    return {
        "case": case,
        "density": fmean(densities),
        "score": fmean(scores),
        "ratio": sum(scores) / sum(dense) if sum(dense) else math.nan,
        "ratio_95": ratio_interval(scores, dense),
        "lost": sum(mine < theirs for mine, theirs in zip(scores, dense, strict=True)),
        "won": sum(mine > theirs for mine, theirs in zip(scores, dense, strict=True)),
        "samples": len(scores),
        "seconds": median(seconds),
        "by_task": {
            task: fmean(score for score, own in zip(scores, tasks, strict=True) if own == task)
            for task in dict.fromkeys(tasks)
        },
        "scores": list(scores),
    }


def ratio_interval(scores: Sequence[float], dense: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% t interval of sum(scores) / sum(dense) by the delta method (Cochran 1977, section 6.3).
    None for fewer than three samples, or if sum(dense) is 0."""
    count, whole = len(scores), sum(dense)
    if count < 3 or not whole:
        return None
    ratio = sum(scores) / whole
    errors = [mine - ratio * theirs for mine, theirs in zip(scores, dense, strict=True)]
    half = t_quantile(0.975, count - 1) * stdev(errors) * math.sqrt(count) / whole
    return ratio - half, ratio + half


def t_quantile(share: float, degrees: int) -> float:
    """Return a quantile of Student's t by the expansion of Cornish and Fisher (1938). From ten degrees of
    freedom on, the error is below 0.002."""
    z = NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


def table(rows: Sequence[Row]) -> str:
    """Make a Markdown table with one line per case. It names the tasks that score below dense attention."""
    header = (
        "method@blocks", "density", "score", "÷ dense (95%)", "lost / won", "same tokens", "logp",
        "s a prompt", "tasks below dense",
    )  # fmt: skip
    return markdown(header, [_cells(one, rows[0]) for one in rows])


def _cells(one: Row, dense: Mapping[str, Any]) -> Sequence[object]:
    interval = one["ratio_95"]
    below = [
        f"{task} {dense['by_task'][task]:.2f} → {score:.2f}"
        for task, score in one["by_task"].items()
        if score < dense["by_task"][task]
    ]
    return (
        f"`{one['case']}`",
        f"{one['density']:.3f}",
        f"{one['score']:.3f}",
        f"{one['ratio']:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""),
        f"{one['lost']} / {one['won']} of {one['samples']}",
        f"{one['agreement']:.3f}" if "agreement" in one else "",
        f"{one['logp']:+.3f}" if "logp" in one else "",
        f"{one['seconds']:.3f}",
        ", ".join(below),
    )
