"""A client's part of one answer. It outlives attempts and workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ....workers.messages.events import (
    DecodeReport,
    FinishReason,
    PrefillReport,
    Progress,
    Session,
    Token,
    Usage,
)
from ..accepted import Accepted
from ..answers import GenerateFinished, PrefillFinished, density_of, timings_of
from ..calls import Call
from ..resources import Resources
from ..text.detokenize import AnswerText, Match
from ..timings import decode_parts


class Answer:
    """Emits events, and measures.

    Attributes:
        new_tokens: of the prompt and what is appended.
        session_tokens: of the session before them.
        cached_tokens: of both, whose K/V existed.
    """

    def __init__(self, resources: Resources, call: Call, accepted: Accepted) -> None:
        self._metrics = resources.metrics
        self._accepted = accepted
        eos_ids = () if call.sampling.ignore_eos else resources.eos_ids
        self._text = AnswerText(resources.tokenizer.decode, call.stop, eos_ids, call.answered)
        self._tokens_shown = 0
        self._gaps: list[float] = []
        self._last_token_at = time.monotonic()
        self._prefill: PrefillReport | None = None
        self._decoded: list[DecodeReport] = []
        self.new_tokens = self.session_tokens = self.cached_tokens = 0
        self.session: Session | None = None

    @property
    def ids(self) -> Sequence[int]:
        return self._text.ids

    @property
    def prompt_tokens(self) -> int:
        return self.session_tokens + self.new_tokens

    def streaming(self) -> bool:
        return bool(self.ids)

    def finish_reason(self, tokens_left: int) -> FinishReason | None:
        """None while the answer is not complete. `tokens_left` may still be generated."""
        if not self.ids:
            return None
        if self._text.stopped:
            return FinishReason.STOP_STRING
        if self._text.ended:
            return FinishReason.STOP
        return FinishReason.LENGTH if tokens_left <= 0 else None

    def progress(self, event: Progress) -> None:
        """Never go back when a replay reads again."""
        if event.tokens_done > self._tokens_shown and not self.streaming():
            self._tokens_shown = event.tokens_done
            self._accepted.emit(event)

    def prompt_read(self, report: PrefillReport) -> None:
        if not self.streaming():
            self._prefill = report

    def token(self, event: Token, report: DecodeReport) -> bool:
        """Return whether a stop string ended the answer."""
        now, index = time.monotonic(), len(self.ids)
        if not index:
            self._accepted.clock.span(decode_parts(report))
            parts = tuple(self._accepted.clock.parts().items())
            self._metrics.first_token(parts, self.prompt_tokens - self.cached_tokens)
            self._measure_prefill(report)
            self._accepted.emit(Usage(prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens))
        else:
            self._gaps.append(now - self._last_token_at)
            self._metrics.next_token(self._gaps[-1])
        self._last_token_at = now
        match = self._text.push(event.token_id)
        self._accepted.emit(replace(event, index=index, text=match.text))
        return match.stopped

    def _measure_prefill(self, report: DecodeReport) -> None:
        if self._prefill is not None:
            self._metrics.prefilled(self._prefill, self.prompt_tokens)
            self._metrics.pulled(report)

    def attempt_failed(self, report: DecodeReport) -> None:
        self._decoded.append(report)

    def finish(self, reason: FinishReason, report: DecodeReport) -> None:
        """The held-back text may complete a stop string."""
        rest = Match("") if reason is FinishReason.STOP_STRING else self._text.flush()
        reason = FinishReason.STOP_STRING if rest.stopped else reason
        self._decoded.append(report)
        held = sum(report.pages_held for report in self._decoded)
        metrics, gaps = self._metrics, self._gaps
        metrics.prompted(self.prompt_tokens, self.cached_tokens)
        metrics.answered(reason, len(self.ids), sum(gaps) / len(gaps) if gaps else None)
        metrics.decoded(self._decoded)
        finished = GenerateFinished(
            reason=reason,
            text=rest.text,
            usage=Usage(
                prompt_tokens=self.prompt_tokens,
                completion_tokens=len(self.ids),
                cached_tokens=self.cached_tokens,
            ),
            timings=timings_of(self._accepted.clock, self._prefill),
            density=density_of(self._prefill),
            session=self.session,
            page_share=sum(report.pages_attended for report in self._decoded) / held if held else 1.0,
            request_id=self._accepted.audit.request_id,
            recomputed_tokens=sum(report.recomputed_tokens for report in self._decoded),
        )
        self._accepted.emit(finished)

    def finish_prefill(self, session: Session, report: DecodeReport) -> None:
        clock = self._accepted.clock
        clock.span(decode_parts(report))
        self._measure_prefill(report)
        self._metrics.prompted(self.prompt_tokens, self.cached_tokens)
        finished = PrefillFinished(
            session=session,
            usage=Usage(prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens),
            timings=timings_of(clock, self._prefill),
            density=density_of(self._prefill),
            request_id=self._accepted.audit.request_id,
        )
        self._accepted.emit(finished)
