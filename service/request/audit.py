"""The audit log: one line per ended request, without any content."""

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

from deltafront.service.request.answers import ChoiceEvent, GenerateFinished, PrefillFinished, RequestEvent
from deltafront.workers.messages.events import Progress, Token, Usage

log = logging.getLogger("deltafront.audit")


@dataclass
class Audit:
    """The fields of a request's audit line. `token` is the caller's name."""

    rpc: str
    request_id: str = ""
    token: str = ""
    method: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    density: float | None = None
    seconds: float = 0.0
    trace_id: str = ""

    @property
    def tokens(self) -> dict[str, int]:
        """Return the request's tokens by kind, as metrics count them."""
        return {
            "prompt": self.prompt_tokens,
            "cached": self.cached_tokens,
            "completion": self.completion_tokens,
        }

    def note(self, event: RequestEvent) -> None:
        if isinstance(event, ChoiceEvent):
            self._note_choice(event)
        elif isinstance(event, Progress):
            self.prompt_tokens = event.tokens_total
        elif isinstance(event, Usage):
            self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
        elif isinstance(event, Token):
            self.completion_tokens = event.index + 1
        elif isinstance(event, PrefillFinished | GenerateFinished):
            self.prompt_tokens, self.cached_tokens = event.usage.prompt_tokens, event.usage.cached_tokens
            self.completion_tokens = event.usage.completion_tokens
            self.density = event.density.mean if event.density.method else None
            if isinstance(event, GenerateFinished):
                self.finish = event.reason.value

    def _note_choice(self, event: ChoiceEvent) -> None:
        """Add one choice's event to the request's token counts. A prompt's tokens count only with its first
        choice."""
        inner = event.event
        if isinstance(inner, Token):
            self.completion_tokens += 1
        elif isinstance(inner, GenerateFinished):
            self.finish = inner.reason.value
            if not event.choice:
                self.prompt_tokens += inner.usage.prompt_tokens
                self.cached_tokens += inner.usage.cached_tokens

    def write(self, outcome: str, seconds: float) -> dict[str, Any]:
        """Write the audit line. outcome: `finished` or an error's code."""
        self.seconds = round(seconds, 3)
        if outcome != "finished" or not self.finish:
            self.finish = outcome
        line = asdict(self)
        log.info("%s", json.dumps(line), extra=line)
        return line
