"""Deltafront's own fields, which every protocol over HTTP accepts."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from deltafront.service.door.json_body import STRICT, Whole
from deltafront.service.request.calls import AttentionMethod
from deltafront.workers.messages.requests import PageSelection
from deltafront.workers.messages.service_tiers import ServiceTier

AskedTier = Literal["auto", "default", "flex", "priority"]
TIERS: Mapping[AskedTier, ServiceTier | None] = {
    "auto": None,
    "default": ServiceTier.DEFAULT,
    "flex": ServiceTier.FLEX,
    "priority": ServiceTier.PRIORITY,
}
"""OpenAI's values of `service_tier`."""


def effort_variables(effort: str | None) -> Mapping[str, str]:
    """Return the chat template's variables for an amount of reasoning, as vLLM does."""
    return {} if effort is None else {"reasoning_effort": effort}


class OwnFields(BaseModel):
    """The fields, named as in gRPC."""

    model_config = STRICT

    method: str = ""
    options: dict[str, float] = Field(default_factory=dict)
    page_selection: Literal["", "full", "delta"] = ""
    recompute_blocks: Whole | None = None
    cache_salt: str = ""
    retain_s: float | None = None
    skip_cache: bool = False
    timeout_s: Annotated[float, Field(gt=0)] | None = None

    def request_fields(self) -> dict[str, Any]:
        """Return these fields as keyword arguments of `GenerateRequest`."""
        return {
            "attention": AttentionMethod(self.method, self.options),
            "page_selection": PageSelection(self.page_selection),
            "recompute_blocks": self.recompute_blocks,
            "deadline": None if self.timeout_s is None else time.time() + self.timeout_s,
            "cache_salt": self.cache_salt,
            "retain_s": self.retain_s,
            "skip_cache": self.skip_cache,
        }
