"""All metrics. Only doors observe them.

prometheus_client in multiprocess mode keeps exact sums in files that outlive a process. The doors of a node
share a directory. The door that holds the scrape port reports the values of all doors, including dead doors.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest, multiprocess, values
from prometheus_client.registry import Collector

from deltafront.service.errors import Code
from deltafront.service.fleet.worker_gauges import WorkerGauges
from deltafront.workers.messages.events import DecodeReport, FinishReason, PrefillReport, Usage

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
FINISHED = "finished"
"""The outcome of a successful request. Other outcomes are error codes."""
RPCS = (
    "Prefill",
    "Generate",
    "CancelRequest",
    "ReleaseSession",
    "GetServerInfo",
    "Tokenize",
    "StoredResponse",
    "Files",
    "Batches",
)
_SECONDS = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5,
    10, 15, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10,
)  # fmt: skip
_PROMPT_TOKENS = tuple(1 << power for power in range(4, 21))
_ANSWER_TOKENS = tuple(1 << power for power in range(18))
_SHARES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_AGREEMENTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 1.0)
_RATIOS = (*_SHARES, 1.5, 2, 3, 5, 10)
_LENGTHS = ((1 << 10, "1K"), (1 << 12, "4K"), (1 << 14, "16K"), (1 << 16, "64K"), (1 << 18, "256K"))
"""The values of the label `prompt`, by their upper bounds in tokens."""


class CachedIn(StrEnum):
    """A source of a prompt's cached tokens: a session, or a tier of the prefix cache."""

    SESSION = "session"
    ENTRIES = "entries"
    HOST = "host"
    DISK = "disk"


class ShadowOutcome(StrEnum):
    """Outcomes of the comparison of a sampled answer with dense attention."""

    COMPARED = "compared"
    ENDED = "ended"
    """A caller's request came first."""
    EXPIRED = "expired"
    """Workers were not idle for long enough."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """Another answer of this door was being compared."""


class Metrics:
    """A door's metrics. A process has one instance.

    Args:
        directory: The doors of a node share it.
        model_name: A label of all series, unless empty.
    """

    def __init__(self, directory: Path, model_name: str = "") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        os.environ[DIRECTORY_VARIABLE] = str(directory)
        # At import prometheus_client found no variable, so it kept values in this process's memory only.
        values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
        self._directory = directory
        self._model_name = model_name
        self._declare_latencies()
        self._declare_tokens()
        self._declare_attention()
        self._declare_shadow()
        self._declare_prefill()
        self._declare_outcomes()
        self.workers = WorkerGauges(self._gauge)
        self._score = self._gauge(
            "profile_score_ratio",
            "Score over dense attention's that `deltafront evaluate` found for the default setting",
            "setting",
        )
        self._certificates = self._gauge(
            "certificate_expiry_timestamp_seconds",
            "When a certificate ends: the door's, or Ray's",
            "certificate",
        )

    def measured(self, setting: str, kept: float) -> None:
        self._score.labels(setting).set(kept)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: str = "") -> Any:
        return prometheus_client.Histogram(
            f"deltafront_{name}", text, labels.split(), buckets=buckets, registry=None
        )

    def _counter(self, name: str, text: str, labels: str = "") -> Any:
        return prometheus_client.Counter(f"deltafront_{name}", text, labels.split(), registry=None)

    def _gauge(self, name: str, text: str, labels: str = "") -> Any:
        return prometheus_client.Gauge(
            f"deltafront_{name}", text, labels.split(), registry=None, multiprocess_mode="livemostrecent"
        )

    def _declare_latencies(self) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "From the request's arrival to its first token; prompt: at most so many tokens were read",
            _SECONDS,
            "prompt",
        )
        self._parts = self._counter(
            "ttft_part_seconds_total",
            "Parts of the time to first token; they add up to its sum",
            "part prompt",
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last event", _SECONDS, "method_rpc"
        )
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a prefill group", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Prefill of the prompt", _SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN_SECONDS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Between two tokens, mean of an answer", _TOKEN_SECONDS
        )

    def _declare_tokens(self) -> None:
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _PROMPT_TOKENS)
        self._answer = self._histogram("request_generation_tokens", "Tokens of an answer", _ANSWER_TOKENS)
        self._cached = self._counter("cached_tokens_total", "Prompt tokens whose KV was cached", "source")
        self._generated = self._counter("generation_tokens_total", "Tokens generated")
        self._steps = self._counter("decode_steps_total", "Decode steps of finished answers")
        self._rows = self._counter("decode_rows_total", "Sum of batch sizes over these steps")
        self._attended = self._counter("pages_attended_total", "Pages read by sparse decode layers")
        self._held = self._counter("pages_held_total", "Pages that full attention would have read there")
        self._recomputed = self._counter("recomputed_tokens_total", "Prompt tokens in recomputed blocks")

    def _declare_attention(self) -> None:
        self._density = self._histogram(
            "attention_density_ratio", "Causal tiles computed, by prompt", _SHARES, "method"
        )
        self._tiles = self._counter(
            "attention_tiles_computed_total", "128 x 128 tiles of attention computed", "method layer"
        )
        self._causal = self._counter(
            "attention_tiles_causal_total", "Tiles that dense attention would compute", "method layer"
        )
        self._layer_seconds = self._counter(
            "attention_layer_seconds_total",
            "Time of attention by layer; phase: attention, or choosing its tiles",
            "method layer phase",
        )
        self._overhead = self._histogram(
            "scoring_overhead_ratio", "Time of scoring over time of attention", _RATIOS, "method"
        )

    def _declare_shadow(self) -> None:
        self._shadows = self._counter(
            "shadow_reads_total",
            "Sampled answers to compare with dense attention, by what became of them",
            "outcome",
        )
        self._shadow_tokens = self._counter("shadow_tokens_total", "Tokens of compared answers", "method")
        self._shadow_nats = self._counter(
            "shadow_nats_total",
            "Negative log-probabilities of these tokens, added up; reading: given, or dense attention's",
            "method reading",
        )
        self._agreement = self._histogram(
            "shadow_agreement_ratio",
            "Positions of a compared answer where dense attention has the same likeliest token",
            _AGREEMENTS,
            "method",
        )
        for outcome in ShadowOutcome:
            self._shadows.labels(outcome)

    def _declare_prefill(self) -> None:
        self._prompts = self._counter(
            "prefill_prompts_total", "Prompts prefilled by prefill groups", "method"
        )
        self._read = self._counter(
            "prefill_tokens_total", "Prompt tokens prefilled by prefill groups", "method"
        )
        self._phases = self._counter(
            "stage_seconds_total", "Time of the stages by phase", "stage phase method"
        )
        self._launch_bound = self._counter(
            "stage_launch_bound_seconds_total",
            "Time of the stages with chunks in which GPUs waited for their hosts' launches",
            "stage method",
        )
        self._handoff_bytes = self._counter("handoff_bytes_total", "Bytes of KV sent to decode workers")
        self._handoff_seconds = self._histogram(
            "handoff_seconds", "Transfer of one prompt's KV cache", _SECONDS
        )
        self._handoff_failures = self._counter(
            "handoff_failures_total", "Attempts that ended because KV did not arrive"
        )

    def _declare_outcomes(self) -> None:
        self._requests = self._counter("requests_total", "Requests by how they ended", "outcome method_rpc")
        self._of_callers = self._counter(
            "caller_requests_total",
            "Requests of a caller by how they ended; caller: its name in the token file, or others",
            "caller outcome",
        )
        self._tokens_of_callers = self._counter(
            "caller_tokens_total",
            "Tokens of a caller; kind: prompt (cached ones included), cached, completion",
            "caller kind",
        )
        self._reasons = self._counter("finish_reasons_total", "Answers by why they ended", "reason")
        self._replays = self._counter("replays_total", "Attempts repeated after a worker failed")
        self._again = self._counter(
            "tokens_read_again_total", "Prompt tokens prefilled again because a worker died"
        )
        self._batch_lines = self._counter(
            "batch_lines_total", "Lines of batches by how they ended: completed, failed", "outcome"
        )
        # Series begin at 0, so that a rate sees the first event.
        for good in (True, False):
            self.count_batch_lines(good, 0)
        for rpc in RPCS:
            for outcome in (FINISHED, *Code):
                self._requests.labels(outcome, rpc)
        for source in CachedIn:
            self._cached.labels(source)
        for reason in (FinishReason.STOP, FinishReason.STOP_STRING, FinishReason.LENGTH):
            self._reasons.labels(reason)

    def ended(self, method_rpc: str, outcome: str, seconds: float) -> None:
        self._requests.labels(outcome, method_rpc).inc()
        self._e2e.labels(method_rpc).observe(seconds)

    def used(self, caller: str, outcome: str, tokens: Mapping[str, int]) -> None:
        """Count a caller's request, and its tokens by kind. caller: a name of bounded number."""
        self._of_callers.labels(caller, outcome).inc()
        for kind, count in tokens.items():
            self._tokens_of_callers.labels(caller, kind).inc(count)

    def certificate(self, name: str, ends: float) -> None:
        """Set a certificate's expiry, in seconds since the epoch."""
        self._certificates.labels(name).set(ends)

    def count_batch_lines(self, completed: bool, lines: int) -> None:
        self._batch_lines.labels("completed" if completed else "failed").inc(lines)

    def count_replay(self) -> None:
        self._replays.inc()

    def count_handoff_failure(self) -> None:
        self._handoff_failures.inc()

    def count_prefilled_again(self, tokens: int) -> None:
        self._again.inc(tokens)

    def observe_first_token(self, parts: Sequence[tuple[str, float]], prefill_tokens: int) -> None:
        """Observe the time to first token and its `parts`. prefill_tokens: prompt tokens that were not
        cached.
        """
        prompt = next((name for bound, name in _LENGTHS if prefill_tokens <= bound), "more")
        self._ttft.labels(prompt).observe(sum(seconds for _part, seconds in parts))
        for part, seconds in parts:
            self._parts.labels(part, prompt).inc(seconds)

    def observe_next_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def observe_usage(self, usage: Usage, *, in_session: bool = False) -> None:
        """Count prompt tokens. in_session: true if a session held the cached tokens."""
        self._prompt.observe(usage.prompt_tokens)
        below = usage.host_tokens + usage.disk_tokens
        self._cached.labels(CachedIn.SESSION if in_session else CachedIn.ENTRIES).inc(
            usage.cached_tokens - below
        )
        self._cached.labels(CachedIn.HOST).inc(usage.host_tokens)
        self._cached.labels(CachedIn.DISK).inc(usage.disk_tokens)

    def observe_answer(self, reason: FinishReason, tokens: int, per_token: float | None) -> None:
        """Count an answer. per_token: mean seconds between tokens."""
        self._reasons.labels(reason).inc()
        self._answer.observe(tokens)
        self._generated.inc(tokens)
        if per_token is not None:
            self._per_token.observe(per_token)

    def observe_prefill(self, report: PrefillReport, tokens: int) -> None:
        self._queue.observe(report.queue)
        self._prefill.observe(report.wall)
        self._prompts.labels(report.method).inc()
        self._read.labels(report.method).inc(tokens)
        self._handoff_bytes.inc(report.handoff_bytes)
        if report.mean_density:
            self._density.labels(report.method).observe(report.mean_density)
        for layer in report.density:
            self._tiles.labels(report.method, layer.layer).inc(layer.computed)
            self._causal.labels(report.method, layer.layer).inc(layer.causal)
            self._layer_seconds.labels(report.method, layer.layer, "attention").inc(layer.attention)
            self._layer_seconds.labels(report.method, layer.layer, "choosing").inc(layer.choosing)
        self._overhead.labels(report.method).observe(report.scoring_overhead)
        for stage, phases in enumerate(report.stages):
            for phase, seconds in phases.items():
                self._phases.labels(stage, phase, report.method).inc(seconds)
        for stage, seconds in enumerate(report.launch_bound):
            self._launch_bound.labels(stage, report.method).inc(seconds)

    def count_shadow(self, outcome: ShadowOutcome) -> None:
        self._shadows.labels(outcome).inc()

    def observe_shadow(
        self, method: str, tokens: int, given_nats: float, dense_nats: float, agreement: float | None
    ) -> None:
        """Record a comparison with dense attention (`Comparison` in service/request/shadow.py)."""
        self._shadow_tokens.labels(method).inc(tokens)
        self._shadow_nats.labels(method, "given").inc(max(0.0, given_nats))
        self._shadow_nats.labels(method, "dense").inc(max(0.0, dense_nats))
        if agreement is not None:
            self._agreement.labels(method).observe(agreement)

    def observe_handoff(self, report: DecodeReport) -> None:
        self._handoff_seconds.observe(report.handoff_seconds)

    def observe_decode(self, reports: Sequence[DecodeReport]) -> None:
        """Count the decode steps and pages of all attempts at an answer."""
        for report in reports:
            self._attended.inc(report.pages_attended)
            self._held.inc(report.pages_held)
            self._steps.inc(report.own_steps)
            self._rows.inc(report.steps)
            self._recomputed.inc(report.recomputed_tokens)

    def registry(self) -> CollectorRegistry:
        collectors = CollectorRegistry()
        collectors.register(_NodeCollector(self._directory, self._model_name))
        return collectors

    def expose(self) -> bytes:
        return generate_latest(self.registry())


class _NodeCollector(Collector):
    """Collects what all doors of a node have observed."""

    def __init__(self, directory: Path, model_name: str) -> None:
        self._directory = directory
        self._label = {"model_name": model_name} if model_name else {}
        self._all = multiprocess.MultiProcessCollector(None, str(directory))  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Any]:
        gauges = (re.search(r"_(\d+)\.db", file.name) for file in self._directory.glob("gauge_live*.db"))
        for pid in {int(match[1]) for match in gauges if match}:
            if not Path(f"/proc/{pid}").exists():
                multiprocess.mark_process_dead(pid, str(self._directory))  # type: ignore[no-untyped-call]
        for metric in self._all.collect():  # type: ignore[no-untyped-call]
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._label}) for sample in metric.samples
            ]
            yield metric
