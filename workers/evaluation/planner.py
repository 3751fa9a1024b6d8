"""Decides what an evaluation does next, and which setting it found. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deltafront.kernels.constants import BLOCK
from deltafront.kernels.methods import is_exact
from deltafront.workers.evaluation.comparison import ComparedRow
from deltafront.workers.evaluation.prompts import TaskPrompt
from deltafront.workers.evaluation.ruler import Count, Haystack, make_prompt
from deltafront.workers.evaluation.setting import Setting, parse_method
from deltafront.workers.model.calibrated.profile import Profile

GOAL = 0.97
"""The share of dense attention's score that a setting must keep."""
LEAST = 8
"""A setting is dropped only after this many prompts, and time for them limits the settings to try."""
TASKS = (
    "multikey_1", "single_2", "multivalue", "multikey_2", "multiquery", "variables", "single_3", "multikey_3",
    "single_1",
)  # fmt: skip
"""RULER's tasks in the order in which prompts ask them."""
SETTINGS = (
    "dpxa+delta:share=0.2,gamma=32,spread=0@32",
    "dpxa:share=0.2@8",
    "dpxa+delta:share=0.4,gamma=16@8",
    "xattention:share=0.2@32",
    "dpxa@8",
    "streaming+delta@32",
    "dpxa:share=0.1@32",
)
"""Settings in the order of trial. The first came nearest to the goal in docs/experiments/0006."""


@dataclass(frozen=True)
class Trial:
    """A setting, with the question at the prompt's end or on a session."""

    setting: Setting
    session: bool = False

    def __str__(self) -> str:
        return f"{self.setting}{', session' if self.session else ''}"


def trials(settings: Sequence[str], asked: str, profile: Profile | None, tokens: int) -> list[Trial]:
    """List the trials in order.

    Args:
        settings: As on a command line; empty: the profile's levels, then `SETTINGS`, without those that would
            recompute more than a quarter of a prompt, or are dense at this length.
        asked: `prompt`, `session` or `both`.
        tokens: Length of the longest prompt.

    Raises:
        ValueError: A setting is wrong, or all of the list are dense at this length.
    """
    listed = [Setting.parse(each) for each in settings or [*_levels(profile), *SETTINGS]]
    chosen = listed if settings else [each for each in listed if _applies(each, tokens)]
    if not chosen:
        raise ValueError(f"every setting prefills {tokens} tokens densely: give longer prompts, or --setting")
    ways = {"prompt": [False], "session": [True], "both": [False, True]}[asked]
    return [Trial(setting, session) for setting in dict.fromkeys(chosen) for session in ways]


def _applies(setting: Setting, tokens: int) -> bool:
    return 4 * BLOCK * setting.blocks <= tokens and not is_exact(parse_method(setting.method), tokens)


def _levels(profile: Profile | None) -> Iterator[str]:
    for method in () if profile is None else profile.prefill:
        shaping = "".join(f"{key}={float(value):g}," for key, value in method.options.items())
        for density in sorted({level.density for level in method.levels}):
            yield f"{method.method}:{shaping}density={density:g}@8"


def endless_prompts(
    haystacks: Sequence[Haystack], tasks: Sequence[str], tokens: int, count: Count, seed: int
) -> Iterator[TaskPrompt]:
    """Yield prompts that cycle through tasks and texts, each with other facts."""
    number = 0
    while True:
        for task in tasks:
            hay = haystacks[number % len(haystacks)]
            yield make_prompt(task, f"{seed}-{number}", tokens, hay, count)
            number += 1


def affordable(given: Sequence[Trial], dense_s: float, left_s: float) -> list[Trial]:
    """Return the first trials that leave time for `LEAST` prompts together, but at least one trial.

    Args:
        dense_s: Time of dense attention's first prompt. A trial is assumed to take as long.
        left_s: Time that is left.
    """
    return list(given[: max(1, int(left_s / (LEAST * max(dense_s, 1e-9))) - 1)])


def hopeless(row: ComparedRow) -> bool:
    """True if a trial can be dropped, because it computes no less than dense attention or its interval ends
    below the goal."""
    if row.density >= 1:
        return True
    return row.samples >= LEAST and row.kept_95 is not None and row.kept_95[1] < GOAL


def another_fits(took: Mapping[str, float], running: Sequence[Trial], left_s: float) -> bool:
    """Return whether another prompt fits into the time that is left.

    Args:
        took: Seconds of the longest prompt so far, by trial and of `dense`.
        running: Trials that the next prompt is for.
    """
    return took["dense"] + sum(took[str(trial)] for trial in running) <= left_s


@dataclass(frozen=True)
class Found:
    """The setting of least density that keeps the goal, and its worst row. None: dense attention."""

    setting: Setting | None
    row: ComparedRow | None

    @property
    def words(self) -> str:
        if self.setting is None or self.row is None:
            return f"dense: no setting is shown to keep {GOAL:g} of dense attention's score"
        low, high = self.row.kept_95 or (math.nan, math.nan)
        return (
            f"{self.setting} at density {self.row.density:.2f} keeps {self.row.kept:.3f} ({low:.3f} to "
            f"{high:.3f}) of dense attention's score"
        )


def found(rows: Mapping[Trial, ComparedRow]) -> Found:
    """Find the setting of least density whose interval's lower end keeps the goal in every way that it was
    asked."""
    worst: dict[Setting, ComparedRow] = {}
    for trial, row in rows.items():
        before = worst.get(trial.setting)
        worst[trial.setting] = row if before is None or _low(row) < _low(before) else before
    good = [
        (row.density, str(setting), setting)
        for setting, row in worst.items()
        if _low(row) >= GOAL and row.density < 1
    ]
    if not good:
        return Found(None, None)
    setting = min(good)[2]
    return Found(setting, worst[setting])


def nearest(rows: Mapping[Trial, ComparedRow]) -> ComparedRow | None:
    """Return the row whose interval begins highest; None if no row has an interval and computes less than
    dense attention."""
    known = [row for row in rows.values() if row.kept_95 is not None and row.density < 1]
    return max(known, key=_low, default=None)


def _low(row: ComparedRow) -> float:
    return -math.inf if row.kept_95 is None else row.kept_95[0]
