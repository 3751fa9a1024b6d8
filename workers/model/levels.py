"""Which amounts of a model's profile a request's method gets. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...kernels.interface import Amounts
from ...kernels.methods import MethodError, MethodSpec, registered
from ...kernels.selectors.scored import ScoredOptions
from .profile import Level, Profile, shaping_options


def amounts_for(profile: Profile | None, spec: MethodSpec) -> Amounts | None:
    """What `kernels.build` takes for a method's `density`; None for a method that asks for none.

    Of the levels of this density, a prompt gets the one whose length is nearest to its own, by ratio. Raises
    MethodError, naming the option, if the profile has no such level.
    """
    asked = spec.values.get("density", 0.0)
    if not asked or not issubclass(registered(spec).form, ScoredOptions):
        return None
    where = f"method_options.density = {asked}"
    if profile is None:
        raise MethodError("method_options.density", f"{where}: the model has no profile (model.profile)")
    levels = _levels(profile, spec)
    if not levels:
        raise MethodError(
            "method_options.density", f"{where}: the model's profile has {_offer(profile)}; 0 goes by tau"
        )

    def amounts(layer: int, tokens: int) -> Sequence[float]:
        return nearest(levels, tokens).amounts[layer]

    return amounts


def nearest(levels: Sequence[Level], tokens: int) -> Level:
    """Of two that are as near as each other, the shorter."""
    return min(levels, key=lambda one: (abs(math.log(one.tokens / tokens)), one.tokens))


def _levels(profile: Profile, spec: MethodSpec) -> list[Level]:
    """Of the spec's density, if the profile has its method with its options."""
    wanted = spec.name.partition("+")[0], shaping_options(spec)
    same = (one for one in profile.prefill if (one.method, one.options) == wanted)
    return [level for one in same for level in one.levels if level.density == spec.values["density"]]


def _offer(profile: Profile) -> str:
    offers = []
    for one in profile.prefill:
        options = ", ".join(f"{key}={value}" for key, value in one.options.items())
        densities = ", ".join(f"{density:g}" for density in sorted({level.density for level in one.levels}))
        offers.append(f"{densities} for {one.method} with {options}")
    return "; ".join(offers) or "no levels"
