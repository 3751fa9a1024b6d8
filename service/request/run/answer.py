"""What of one request has gone out to its client. It outlives attempts and workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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


class AnsweredTokens:
    """The tokens of one answer that its client has, and their text. decode: ids to text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], call: Call, eos_ids: Sequence[int]) -> None:
        self.ids: list[int] = []
        self._text = AnswerText(decode, call.stop)
        self._eos_ids = () if call.sampling.ignore_eos else tuple(eos_ids)
        self._stopped = False
        for token in call.answered:
            self.push(token)

    def push(self, token: int) -> Match:
        """The token's part of the text: one that ends the answer has none."""
        self.ids.append(token)
        match = Match("") if token in self._eos_ids else self._text.push(token)
        self._stopped = match.stopped
        return match

    def flush(self) -> Match:
        """Text that was held back."""
        return self._text.flush()

    def finish_reason(self, tokens_left: int) -> FinishReason | None:
        """Why nothing can follow; None where something can. tokens_left: how many may still be generated."""
        if not self.ids:
            return None
        if self._stopped:
            return FinishReason.STOP_STRING
        if self.ids[-1] in self._eos_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if tokens_left <= 0 else None


class Answer:
    """Events to the client, and the measurements that go with them.

    own_tokens: of the prompt and what is appended to it. session_tokens: of the session before them.
    cached_tokens: of both, those whose K/V was there. session: the one that is kept for the client.
    """

    def __init__(self, resources: Resources, call: Call, accepted: Accepted) -> None:
        self._metrics = resources.metrics
        self._accepted = accepted
        self._answered = AnsweredTokens(resources.tokenizer.decode, call, resources.eos_ids)
        self._furthest = 0
        self._gaps: list[float] = []
        self._last_token_at = time.monotonic()
        self._prefill: PrefillReport | None = None
        self._decoded: list[DecodeReport] = []
        self.own_tokens = self.session_tokens = self.cached_tokens = 0
        self.session: Session | None = None

    @property
    def ids(self) -> Sequence[int]:
        return self._answered.ids

    @property
    def prompt_tokens(self) -> int:
        """Everything before the answer."""
        return self.session_tokens + self.own_tokens

    def streaming(self) -> bool:
        """Whether the first token is out."""
        return bool(self._answered.ids)

    def finish_reason(self, tokens_left: int) -> FinishReason | None:
        """As of `AnsweredTokens`."""
        return self._answered.finish_reason(tokens_left)

    def progress(self, event: Progress) -> None:
        """A replay reads again, but that is not the client's concern: progress only goes forward."""
        if event.tokens_done > self._furthest and not self.streaming():
            self._furthest = event.tokens_done
            self._accepted.emit(event)

    def prompt_read(self, report: PrefillReport) -> None:
        """A prompt is measured once, before its first token."""
        if not self.streaming():
            self._prefill = report

    def token(self, event: Token, report: DecodeReport) -> bool:
        """Stream one token; True if a stop string ended the answer. report: of what preceded the first."""
        now, index = time.monotonic(), len(self.ids)
        if not index:
            self._first_token(report)
            self._accepted.emit(Usage(prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens))
        else:
            self._gaps.append(now - self._last_token_at)
            self._metrics.next_token(self._gaps[-1])
        self._last_token_at = now
        match = self._answered.push(event.token_id)
        self._accepted.emit(replace(event, index=index, text=match.text))
        return match.stopped

    def _first_token(self, report: DecodeReport) -> None:
        """A request is measured once, by the attempt that got this far."""
        clock = self._accepted.clock
        clock.span(decode_parts(report))
        self._metrics.first_token(clock.read().parts, self.prompt_tokens - self.cached_tokens)
        self._measure_prefill(report)

    def _measure_prefill(self, report: DecodeReport) -> None:
        if self._prefill is not None:
            self._metrics.prefilled(self._prefill, self.prompt_tokens)
            self._metrics.pulled(report)

    def failed(self, report: DecodeReport) -> None:
        """A worker gave up part of the way: what it attended to counts."""
        self._decoded.append(report)

    def finish(self, reason: FinishReason, report: DecodeReport) -> None:
        """End a Generate. Text that was held back comes with it, up to a stop string that it may complete."""
        rest = Match("") if reason is FinishReason.STOP_STRING else self._answered.flush()
        reason = FinishReason.STOP_STRING if rest.stopped else reason
        self._decoded.append(report)
        held = sum(one.pages_held for one in self._decoded)
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
            page_share=sum(one.pages_attended for one in self._decoded) / held if held else 1.0,
            request_id=self._accepted.request_id,
            recomputed_tokens=sum(one.recomputed_tokens for one in self._decoded),
        )
        self._accepted.emit(finished)

    def keep(self, session: Session, report: DecodeReport) -> None:
        """End a Prefill: the prompt is a session now."""
        clock = self._accepted.clock
        clock.span(decode_parts(report))
        self._measure_prefill(report)
        self._metrics.prompted(self.prompt_tokens, self.cached_tokens)
        finished = PrefillFinished(
            session=session,
            usage=Usage(prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens),
            timings=timings_of(clock, self._prefill),
            density=density_of(self._prefill),
            request_id=self._accepted.request_id,
        )
        self._accepted.emit(finished)
