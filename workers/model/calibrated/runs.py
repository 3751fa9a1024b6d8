"""Some methods score or merge one key per run of similar keys, so a block needs several runs. With key biases
(Qwen2) it may have a single one, whose first key then stands for all."""

from collections.abc import Sequence
from statistics import fmean

from deltafront.workers.model.calibrated.profile import Profile

FEW_RUNS = 4.0
"""Fewer runs in a block than this are reported at the start of a service."""
Runs = Sequence[float | None]
"""Mean number of runs in a block, by layer; None: a layer with a window, or a method without runs."""


def describe_runs(method: str, runs: Runs) -> str:
    """Describe a method's runs by layer, in one line. Empty if it has none."""
    known = [count for count in runs if count is not None]
    if not known:
        return ""
    counts = " ".join("-" if count is None else f"{count:.1f}" for count in runs)
    few = f"; {found}" if (found := _few(runs)) else ""
    return f"{method}: {fmean(known):.1f} runs of similar keys a block, by layer {counts}{few}"


def few_runs_note(profile: Profile | None, method: str) -> str:
    """Return a warning if the profile says that a method finds few runs in this model; empty if not."""
    few = "" if profile is None else _few(profile.runs.get(base_method(method), ()))
    return (
        few and f"{method}: {few} (model.profile), so it chooses keys poorly: deltafront evaluate measures it"
    )


def base_method(method: str) -> str:
    """Return a method's name without options and correction, neither of which is part of `Profile.runs`."""
    return method.partition(":")[0].partition("+")[0]


def _few(runs: Runs) -> str:
    layers = [layer for layer, count in enumerate(runs) if count is not None and count < FEW_RUNS]
    return (
        f"fewer than {FEW_RUNS:g} runs of similar keys a block in layers {', '.join(map(str, layers))}"
        if layers
        else ""
    )
