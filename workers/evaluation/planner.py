"""Decides which settings and prompts an evaluation tries next, and which setting is best. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
"""Minimum number of prompts before a setting is dropped for its score. Only as many settings are tried as
can answer this many prompts in time."""
TASKS = (
    "multikey_1", "single_2", "multivalue", "multikey_2", "multiquery", "variables", "single_3", "multikey_3",
    "single_1",
)  # fmt: skip
"""RULER's tasks of an evaluation, in the order in which prompts cycle through them."""
SETTINGS = (
    "dpxa+delta:share=0.1,gamma=64,spread=0.25@32",
    "dpxa+delta:share=0.2,gamma=32,spread=0.25@32",
    "dpxa+delta:share=0.1,gamma=64,spread=0.25@64",
    "xattention+delta:share=0.2,gamma=32,spread=0.25@32",
    "dpxa:share=0.2@32",
    "dpxa@8",
    "streaming+delta@32",
)
"""Settings that are tried by default, in this order."""


@dataclass(frozen=True)
class Trial:
    """A setting to evaluate. The question ends the prompt, or is appended to a session if `session`."""

    setting: Setting
    session: bool = False

    def __str__(self) -> str:
        return f"{self.setting}{', session' if self.session else ''}"


def trials(
    settings: Sequence[str],
    asked: str,
    profile: Profile | None,
    tokens: int,
    recomputes: bool = True,
    levels_alone: bool = False,
) -> list[Trial]:
    """List the trials of an evaluation, in the order in which they are tried.

    Args:
        settings: As on a command line; empty: the profile's levels and then `SETTINGS`, except settings that
            recompute more than a quarter of a prompt or are dense at this length.
        asked: Where the question is: `prompt` (at its end), `session` (appended to one) or `both`.
        tokens: Length of the longest prompt.
        recomputes: False for a model with linear attention, which recomputes no blocks: the default settings
            are tried without.
        levels_alone: Try no other settings by default than the profile's levels.

    Raises:
        ValueError: A setting is wrong, or `settings` is empty and no default setting is left.
    """
    defaults = [*_levels(profile, tokens), *(() if levels_alone else SETTINGS)]
    listed = [Setting.parse(each) for each in settings or defaults]
    for each in listed:
        if each.delta:
            raise ValueError(
                f"setting {str(each)!r}: `evaluate` decodes over all pages; `lab` takes /delta_layers=…"
            )
    if not recomputes:
        if given := next((each for each in listed if settings and each.blocks), None):
            raise ValueError(f"setting {str(given)!r}: a model with linear attention recomputes no blocks")
        listed = [replace(each, blocks=0) for each in listed]
    chosen = listed if settings else [each for each in listed if _applies(each, tokens)]
    if not chosen:
        raise ValueError(f"every setting prefills {tokens} tokens densely: give longer prompts, or --setting")
    ways = {"prompt": [False], "session": [True], "both": [False, True]}[asked]
    return [Trial(setting, session) for setting in dict.fromkeys(chosen) for session in ways]


def _applies(setting: Setting, tokens: int) -> bool:
    return 4 * BLOCK * setting.blocks <= tokens and not is_exact(parse_method(setting.method), tokens)


def _levels(profile: Profile | None, tokens: int) -> Iterator[str]:
    """Yield each level of the profile with the correction and blocks that are best on real models
    (docs/experiments/0012): 32, or a quarter of a short prompt."""
    blocks = min(32, tokens // (4 * BLOCK))
    for method in () if profile is None else profile.prefill:
        shaping = "".join(f"{key}={float(value):g}," for key, value in method.options.items())
        for density in sorted({level.density for level in method.levels}):
            yield f"{method.method}+delta:{shaping}density={density:g},gamma=64,spread=0.25@{blocks}"


def endless_prompts(
    haystacks: Sequence[Haystack], tasks: Sequence[str], tokens: int, count: Count, seed: int
) -> Iterator[TaskPrompt]:
    """Yield prompts endlessly, cycling through `tasks` and `haystacks`. Each prompt hides different facts."""
    number = 0
    while True:
        for task in tasks:
            hay = haystacks[number % len(haystacks)]
            yield make_prompt(task, f"{seed}-{number}", tokens, hay, count)
            number += 1


def affordable(given: Sequence[Trial], dense_s: float, left_s: float) -> list[Trial]:
    """Return the first trials, at least one, that together with dense attention can answer `LEAST` further
    prompts in the time that is left.

    Args:
        dense_s: Seconds that dense attention took for the first prompt. A trial is assumed to take as long.
        left_s: Seconds that are left for the evaluation.
    """
    return list(given[: max(1, int(left_s / (LEAST * max(dense_s, 1e-9))) - 1)])


def hopeless(row: ComparedRow) -> bool:
    """True if a trial can be dropped: it computes no less than dense attention, or after `LEAST` prompts the
    interval of its kept score (`kept_95`) ends below `GOAL`."""
    if row.density >= 1:
        return True
    return row.samples >= LEAST and row.kept_95 is not None and row.kept_95[1] < GOAL


def fitting(
    took: Mapping[str, float], prompts: int, running: Sequence[Trial], left_s: float, most: int
) -> int:
    """Return how many further prompts, at most `most`, fit into the time that is left; 0 without trials.

    A longer batch is assumed to take longer in proportion, a shorter one at least half as long: decode steps
    take as long for few prompts as for many.

    Args:
        took: Seconds that the latest batch took, by trial; key `dense` for dense attention.
        prompts: The number of its prompts.
        running: The trials that will answer the next prompts.
    """
    batches = left_s / max(took["dense"] + sum(took[str(trial)] for trial in running), 1e-9)
    count = math.floor(prompts * (batches if batches >= 1 else 2 * batches - 1))
    return max(0, min(most, count)) if running else 0


@dataclass(frozen=True)
class Found:
    """The setting of least density that keeps `GOAL` of dense attention's score. `row`: the worse of its
    results with the question in the prompt and on a session. Both are None if no setting keeps it."""

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
    """Find the setting of least density, below 1, whose `kept_95` begins at `GOAL` or above in all of its
    trials (question in the prompt, on a session)."""
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
    """Return the row whose `kept_95` begins highest, among rows that compute less than dense attention; None
    if none of these has an interval."""
    known = [row for row in rows.values() if row.kept_95 is not None and row.density < 1]
    return max(known, key=_low, default=None)


def _low(row: ComparedRow) -> float:
    return -math.inf if row.kept_95 is None else row.kept_95[0]
