"""The service tiers of requests, OpenAI's `service_tier`."""

from enum import StrEnum


class ServiceTier(StrEnum):
    """A class of requests, the best first. Tiers that wait for the same thing share it by their weights."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"

    @property
    def weight(self) -> int:
        return {"priority": 16, "default": 4, "flex": 1}[self.value]

    @property
    def rank(self) -> int:
        """Return 0 for the best tier."""
        return list(ServiceTier).index(self)


LOWEST = ServiceTier.FLEX
"""The service tier of batches."""
