"""Which thresholds of a model's profile a request's method gets. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....kernels.interface import Thresholds
from ....kernels.methods import MethodError, MethodSpec, registered
from ....kernels.options import ScoredOptions
from .profile import Level, Profile, shaping_options


def thresholds_for(profile: Profile | None, spec: MethodSpec) -> Thresholds | None:
    """What `kernels.build` takes for a method's `density`; None for a method that asks for none.

    Of the levels of a density, a prompt gets the one whose length is nearest to its own, by ratio. Between
    two densities that the profile has, thresholds are interpolated. Raises MethodError, naming the option,
    for a density outside of them.
    """
    asked = spec.values.get("density", 0.0)
    if not asked or not issubclass(registered(spec).form, ScoredOptions):
        return None
    where = f"method_options.density = {asked}"
    if profile is None:
        raise MethodError("method_options.density", f"{where}: the model has no profile (model.profile)")
    levels = levels_of(profile, spec)
    below = [one for one in levels if one.density <= asked]
    above = [one for one in levels if one.density >= asked]
    if not below or not above:
        raise MethodError(
            "method_options.density", f"{where}: the model's profile has {_offer(profile)}; 0 goes by tau"
        )
    low, high = max(one.density for one in below), min(one.density for one in above)
    sparser = [one for one in below if one.density == low]
    denser = [one for one in above if one.density == high]
    share = 0.0 if high == low else (asked - low) / (high - low)

    def thresholds(layer: int, tokens: int) -> Sequence[float]:
        few, many = (nearest(of, tokens).thresholds[layer] for of in (sparser, denser))
        return [one + share * (other - one) for one, other in zip(few, many, strict=True)]

    return thresholds


def nearest(levels: Sequence[Level], tokens: int) -> Level:
    """Of two that are as near as each other, the shorter."""
    return min(levels, key=lambda one: (abs(math.log(one.tokens / tokens)), one.tokens))


def levels_of(profile: Profile, spec: MethodSpec) -> list[Level]:
    """Of the spec's method with its options; none where the profile has none."""
    wanted = spec.name.partition("+")[0], shaping_options(spec)
    same = (one for one in profile.prefill if (one.method, one.options) == wanted)
    return [level for one in same for level in one.levels]


def _offer(profile: Profile) -> str:
    offers = []
    for one in profile.prefill:
        options = ", ".join(f"{key}={value}" for key, value in one.options.items())
        bounds = sorted({f(level.density for level in one.levels) for f in (min, max)})
        densities = " to ".join(f"{density:g}" for density in bounds)
        offers.append(f"{densities} for {one.method} with {options}")
    return "; ".join(offers) or "no levels"
