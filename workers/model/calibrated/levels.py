"""Chooses a request's attention thresholds from a model's profile."""

import math
from collections.abc import Sequence

from deltafront.kernels.interface import Thresholds
from deltafront.kernels.methods import MethodError, MethodSpec, registered
from deltafront.kernels.options import ScoredOptions
from deltafront.workers.model.calibrated.profile import Level, Profile, shaping_options


def thresholds_for(profile: Profile | None, spec: MethodSpec) -> Thresholds | None:
    """Return the thresholds for the `density` in a method's options; None if the options have no density.

    They come from the levels with the nearest prompt length, interpolated between two densities.

    Raises:
        MethodError: The profile has no levels for this density.
    """
    asked = spec.values.get("density", 0.0)
    if not asked or not issubclass(registered(spec).form, ScoredOptions):
        return None
    sparser, denser = _around(profile, spec, asked)
    low, high = sparser[0].density, denser[0].density
    weight = 0.0 if high == low else (asked - low) / (high - low)

    def thresholds(layer: int, tokens: int) -> Sequence[float]:
        lower, upper = (nearest(family, tokens).thresholds[layer] for family in (sparser, denser))
        return [low_ + weight * (high_ - low_) for low_, high_ in zip(lower, upper, strict=True)]

    return thresholds


def lengths_of_thresholds(profile: Profile | None, spec: MethodSpec, tokens: int) -> tuple[int, ...]:
    """Return the lengths of the levels from which a prompt of `tokens` tokens gets its thresholds; empty if
    the method has no `density`.

    Prompts with equal results get equal thresholds. Raises MethodError as `thresholds_for` does.
    """
    if thresholds_for(profile, spec) is None or profile is None:
        return ()
    families = _around(profile, spec, spec.values["density"])
    return tuple(nearest(family, tokens).tokens for family in families)


def _around(profile: Profile | None, spec: MethodSpec, asked: float) -> tuple[list[Level], list[Level]]:
    where = f"method_options.density = {asked}"
    if profile is None:
        raise MethodError("method_options.density", f"{where}: the model has no profile (model.profile)")
    levels = levels_of(profile, spec)
    below = [level for level in levels if level.density <= asked]
    above = [level for level in levels if level.density >= asked]
    if not below or not above:
        raise MethodError(
            "method_options.density", f"{where}: the model's profile has {_offer(profile)}; 0 goes by tau"
        )
    low, high = max(level.density for level in below), min(level.density for level in above)
    sparser = [level for level in below if level.density == low]
    denser = [level for level in above if level.density == high]
    return sparser, denser


def nearest(levels: Sequence[Level], tokens: int) -> Level:
    """Return the level whose length is nearest to `tokens` by ratio; on a tie, the shorter one."""
    return min(levels, key=lambda level: (abs(math.log(level.tokens / tokens)), level.tokens))


def levels_of(profile: Profile, spec: MethodSpec) -> list[Level]:
    wanted = spec.name.partition("+")[0], shaping_options(spec)
    same = (method for method in profile.prefill if (method.method, method.options) == wanted)
    return [level for method in same for level in method.levels]


def _offer(profile: Profile) -> str:
    offers = []
    for method in profile.prefill:
        options = ", ".join(f"{key}={value}" for key, value in method.options.items())
        bounds = sorted({f(level.density for level in method.levels) for f in (min, max)})
        densities = " to ".join(f"{density:g}" for density in bounds)
        offers.append(f"{densities} for {method.method} with {options}")
    return "; ".join(offers) or "no levels"
