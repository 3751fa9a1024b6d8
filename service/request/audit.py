"""One log line for each request that ended, without any content."""

from __future__ import annotations

import json
import logging
from typing import Any

from ...workers.messages.events import Progress, Token
from .answers import GenerateFinished, PrefillFinished, RequestEvent

log = logging.getLogger("deltafront.audit")


class Audit:
    """Collects a request's line from its events."""

    def __init__(self, rpc: str) -> None:
        self._rpc = rpc
        self.caller = ""
        self.request_id = ""
        self.method = ""
        self.trace_id = ""
        self._density: float | None = None
        self._prompt = self._cached = self._completion = 0
        self._finish = ""

    def note(self, event: RequestEvent) -> None:
        if isinstance(event, Progress):
            self._prompt = event.tokens_total
        elif isinstance(event, Token):
            self._completion = event.index + 1
        elif isinstance(event, PrefillFinished | GenerateFinished):
            self._prompt, self._cached = event.usage.prompt_tokens, event.usage.cached_tokens
            self._completion = event.usage.completion_tokens
            self._density = event.density.mean if event.density.method else None
            if isinstance(event, GenerateFinished):
                self._finish = event.reason.value

    def write(self, outcome: str, seconds: float) -> dict[str, Any]:
        """`outcome` is `finished` or an error's code."""
        line = {
            "request_id": self.request_id,
            "token": self.caller,
            "rpc": self._rpc,
            "method": self.method,
            "prompt_tokens": self._prompt,
            "cached_tokens": self._cached,
            "completion_tokens": self._completion,
            "finish": self._finish if outcome == "finished" and self._finish else outcome,
            "density": self._density,
            "seconds": round(seconds, 3),
            "trace_id": self.trace_id,
        }
        log.info("%s", json.dumps(line))
        return line
