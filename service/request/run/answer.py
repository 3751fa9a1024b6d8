"""Sends one answer's events to the client, across attempts and workers."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deltafront.service.request.answers import (
    Density,
    Echo,
    GenerateFinished,
    PrefillFinished,
    Resumed,
    Timings,
)
from deltafront.service.request.calls import Call, tools_of
from deltafront.service.request.context import Accepted, Resources
from deltafront.service.request.text.detokenize import AnswerText, Match
from deltafront.service.request.ttft_clock import decode_parts
from deltafront.workers.messages import events, requests


class Answer:
    """Emits a request's events, and records its metrics.

    Attributes:
        new_tokens: Tokens of the prompt, or of the text appended to a session.
        session_tokens: Tokens of the session before them.
        cached_tokens: Tokens of session and prompt whose KV a session or the prefix cache had.
        host_tokens, disk_tokens: Cached tokens that were loaded from host memory and disk.
        decoded: Decode reports of all attempts.
        sampled: The answer's tokens, if `ShadowReads` is to compare them.
    """

    def __init__(self, resources: Resources, call: Call, accepted: Accepted) -> None:
        self._metrics = resources.metrics
        self._accepted = accepted
        last = call.append or call.prompt
        detokenizer = resources.tokenizer.detokenizer(
            tools=tools_of(call.prompt, call.append) is not None, split=last is not None and last.reasons
        )
        sampling = call.sampling
        end_ids = (*(() if sampling.ignore_eos else resources.eos_ids), *sampling.stop_token_ids)
        self._text = AnswerText(detokenizer, call.stop, end_ids, call.answered, sampling.min_tokens)
        self._resources = resources
        self._tokens_shown = self._echoed = 0
        self._gaps: list[float] = []
        self._last_token_at = time.monotonic()
        self._prefill: events.PrefillReport | None = None
        self._recomputes = 0
        self._prefilled_at = 0.0
        self.decoded: list[events.DecodeReport] = []
        self.new_tokens = self.session_tokens = self.cached_tokens = 0
        self.host_tokens = self.disk_tokens = 0
        self.session: events.Session | None = None
        self._spent = False
        self.sampled = resources.shadow.sample()

    def record_reserved(self, reserved: requests.Reserved) -> None:
        self.cached_tokens = reserved.held_tokens
        self.host_tokens, self.disk_tokens = reserved.host_tokens, reserved.disk_tokens
        if not self._spent:  # a prompt that is prefilled again after a failure counts once
            self._spent = True
            self._accepted.use.spend(max(0, self.prompt_tokens - self.cached_tokens))

    @property
    def ids(self) -> Sequence[int]:
        return self._text.ids

    @property
    def prompt_tokens(self) -> int:
        return self.session_tokens + self.new_tokens

    def finish_reason(self, tokens_left: int) -> events.FinishReason | None:
        """Return the finish reason; None while the answer is not complete. tokens_left: tokens that may still
        be generated."""
        if not self.ids:
            return None
        if self._text.stop:
            return events.FinishReason.STOP_STRING
        if self._text.ended:
            return events.FinishReason.STOP
        return events.FinishReason.LENGTH if tokens_left <= 0 else None

    def progress(self, event: events.Progress) -> None:
        """Emit the expected time to the first token before any progress, then prefill progress, unless a
        replay repeats tokens that were already reported."""
        first = event.expected_first_token_seconds > 0 and not self._tokens_shown
        if (first or event.tokens_done > self._tokens_shown) and not self.ids:
            self._tokens_shown = event.tokens_done
            self._accepted.events.put_nowait(event)

    def resume(self) -> None:
        """Emit the text of the tokens that the client already has."""
        self._accepted.events.put_nowait(Resumed(self._text.answered))

    def echo(self, ids: bytes) -> None:
        """Emit the prompt, once."""
        prompt = memoryview(ids).cast("I").tolist()
        first = events.Token(index=0, token_id=prompt[0], logprob=math.nan)
        self._accepted.events.put_nowait(Echo(self._resources.tokenizer.decode(prompt), (first,)))

    def prompt_logprobs(self, event: events.PromptLogprobs) -> None:
        """Emit tokens of the prompt, unless a replay repeats them."""
        fresh = tuple(token for token in event.tokens if token.index > self._echoed)
        if fresh:
            self._echoed = fresh[-1].index
            self._accepted.events.put_nowait(Echo(tokens=fresh))

    def record_prefill(self, report: events.PrefillReport, blocks: int) -> None:
        """Note that a group has prefilled the prompt. blocks: The number of blocks to recompute."""
        if not self.ids:
            self._prefill, self._recomputes, self._prefilled_at = report, blocks, time.monotonic()

    def token(self, event: events.Token, report: events.DecodeReport) -> bool:
        """Emit a token. Return whether a stop string ended the answer."""
        now, index = time.monotonic(), len(self.ids)
        if not index:
            clock = self._accepted.clock
            clock.span(decode_parts(report))
            clock.stop()
            self._metrics.observe_first_token(
                tuple(clock.parts().items()), self.prompt_tokens - self.cached_tokens
            )
            self._measure_prefill(report)
            if self._prefill is not None:
                self._resources.after_prefill.record(self._recomputes, now - self._prefilled_at)
            self._accepted.events.put_nowait(self._usage())
        else:
            self._gaps.append(now - self._last_token_at)
            self._metrics.observe_next_token(self._gaps[-1])
        self._last_token_at = now
        self._accepted.use.spend(1)
        if self.sampled is not None:
            self.sampled.append(event)
        match = self._text.push(event.token_id)
        self._accepted.events.put_nowait(replace(event, index=index, text=match.text))
        return bool(match.stop)

    def _measure_prefill(self, report: events.DecodeReport) -> None:
        if self._prefill is not None:
            self._metrics.observe_prefill(self._prefill, self.prompt_tokens - self.cached_tokens)
            self._metrics.observe_handoff(report)

    def finish(self, reason: events.FinishReason, report: events.DecodeReport) -> None:
        """Emit the last event. The held-back text may complete a stop string."""
        stopped = reason is events.FinishReason.STOP_STRING
        rest = Match("", self._text.stop) if stopped else self._text.flush()
        reason = events.FinishReason.STOP_STRING if rest.stop else reason
        self.decoded.append(report)
        held = sum(report.pages_held for report in self.decoded)
        metrics, gaps = self._metrics, self._gaps
        metrics.observe_answer(reason, len(self.ids), sum(gaps) / len(gaps) if gaps else None)
        metrics.observe_decode(self.decoded)
        finished = GenerateFinished(
            reason=reason,
            text=rest.text,
            session=self.session,
            page_share=sum(report.pages_attended for report in self.decoded) / held if held else 1.0,
            recomputed_tokens=sum(report.recomputed_tokens for report in self.decoded),
            stop_string=rest.stop,
            **self._report(),
        )
        self._accepted.events.put_nowait(finished)

    def finish_prefill(self, session: events.Session, report: events.DecodeReport) -> None:
        self._accepted.clock.span(decode_parts(report))
        self._measure_prefill(report)
        self._accepted.events.put_nowait(PrefillFinished(session=session, **self._report()))

    def _usage(self) -> events.Usage:
        return events.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.ids),
            cached_tokens=self.cached_tokens,
            host_tokens=self.host_tokens,
            disk_tokens=self.disk_tokens,
        )

    def _report(self) -> dict[str, Any]:
        accepted, prompt, parts = self._accepted, self._prefill, self._accepted.clock.parts()
        usage = self._usage()
        self._metrics.observe_usage(usage, in_session=bool(self.session_tokens))
        return {
            "usage": usage,
            "timings": Timings(
                sum(parts.values()), parts, [*prompt.stages] if prompt else [], accepted.clock.elapsed
            ),
            "density": _density(prompt) if prompt else Density(),
            "request_id": accepted.audit.request_id,
            "trace_id": accepted.trace.trace_id,
        }


def _density(report: events.PrefillReport) -> Density:
    layers = {layer.layer: layer.density for layer in report.density}
    return Density(report.method, report.mean_density, layers, report.scoring_overhead, report.sampled_share)
