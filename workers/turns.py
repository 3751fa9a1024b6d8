"""Shares something (chunks, pages, places in a batch) among service tiers by weight: stride scheduling. Pure.

A tier's pass is what it was given, divided by its weight. The tier with the smallest pass has its turn, so
tiers that always wait get shares in proportion to their weights, and none waits for ever. A tier that did not
wait for a while gets nothing for that time: its pass is raised to the smallest pass of the tiers that waited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from deltafront.workers.messages.service_tiers import ServiceTier


class Turns:
    def __init__(self) -> None:
        self._passes = dict.fromkeys(ServiceTier, 0.0)
        self._floor = 0.0
        """The smallest pass of the tiers that waited at the last `give`."""

    def order(self, waiting: Iterable[ServiceTier]) -> list[ServiceTier]:
        """Return the waiting tiers, the one that has its turn first. Of equal passes the better tier's."""
        return sorted(set(waiting), key=lambda tier: (self._pass(tier), tier.rank))

    def give(self, tier: ServiceTier, units: float, waiting: Collection[ServiceTier] = ()) -> None:
        """Count what a tier was given. waiting: the tiers that waited for it."""
        own = self._pass(tier)
        self._floor = min([own, *map(self._pass, waiting)])
        self._passes[tier] = own + units / tier.weight

    def _pass(self, tier: ServiceTier) -> float:
        return max(self._passes[tier], self._floor)
