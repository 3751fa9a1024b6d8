"""Chooses a request's thresholds from a model's profile."""

import math
from collections.abc import Sequence

from deltafront.kernels.interface import Thresholds
from deltafront.kernels.methods import MethodError, MethodSpec, registered
from deltafront.kernels.options import ScoredOptions
from deltafront.workers.model.calibrated.profile import Level, Profile, shaping_options


def thresholds_for(profile: Profile | None, spec: MethodSpec) -> Thresholds | None:
    """Return the thresholds that `kernels.build` takes for a method's `density`; None if it asks for none.

    They come from the levels of the nearest prompt length, interpolated between densities.

    Raises:
        MethodError: The density is outside the profile.
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
    """Return the lengths of the levels that determine the thresholds of a prompt of `tokens` tokens. Prompts
    with equal results get equal thresholds.

    Empty if the method has no `density`. Raises MethodError as `thresholds_for` does.
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
    """Return the level whose length is nearest by ratio; on a tie, the shorter."""
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
