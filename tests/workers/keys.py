"""Makes prefix-cache keys as the API server does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.service.request.run.prefix import prompt_key
from deltafront.workers.messages.prompts import PromptKey

from .prompts import packed

DENSE = method_spec("dense")


def key_of(ids: Sequence[int], owner: str = "me", method: MethodSpec = DENSE, **more: Any) -> PromptKey:
    given = {"salt": "", "model": "m", "profile": None, "remembers": True, "retain_s": 0.0, **more}
    return prompt_key(packed(ids), owner=owner, method=method, **given)
