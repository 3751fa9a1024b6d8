"""Measures prompts that are sent together and answered: total time, first tokens, gaps between tokens, and
the error of predicted first tokens."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from deltafront.benchmarks.engine.rows import Row, row
from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.service.client.client import DeltafrontClient
from deltafront.workers.messages.events import Progress, Token


@dataclass(frozen=True)
class Load:
    """`prompts` prompts of `tokens` tokens each, and answers of `answer` tokens."""

    prompts: int
    tokens: int
    answer: int

    @property
    def name(self) -> str:
        return f"crowd_{self.prompts}x{self.tokens}"

    @property
    def cache_tokens(self) -> int:
        return self.prompts * (-(-(self.tokens + self.answer) // PAGE_TOKENS) + 1) * PAGE_TOKENS


LOADS = (Load(10, 32_768, 128), Load(64, 2048, 128))


@dataclass
class Heard:
    """Times of one answer. expected_s: TTFT that the service predicted, in seconds; 0: no prediction.
    tokens_s: arrival of each token, in seconds since the request."""

    expected_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)


def settings(load: Load, gap_ms: float) -> dict[str, Any]:
    room = max(load.cache_tokens, 65_536)
    return {
        "prefill.cache_tokens": room,
        "prefill.max_waiting": load.prompts,
        "decode.cache_tokens": room,
        "decode.max_batch": 64,
        "decode.target_gap_ms": gap_ms,
    }


def answered(
    client: DeltafrontClient, prompts: Sequence[Sequence[int]], answer: int, options: Mapping[str, Any]
) -> tuple[float, list[Heard]]:
    """Send all prompts together. Return the seconds until the last answer is complete, and each answer's
    times."""

    def ask(ids: Sequence[int]) -> Heard:
        began, heard = time.perf_counter(), Heard()
        for event in client.generate(ids, max_tokens=answer, ignore_eos=True, **options):
            if isinstance(event, Progress):
                heard.expected_s = heard.expected_s or event.expected_first_token_seconds
            elif isinstance(event, Token):
                heard.tokens_s.append(time.perf_counter() - began)
        return heard

    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        heard = list(pool.map(ask, prompts))
    return time.perf_counter() - began, heard


def crowd_row(case: str, load: Load, seconds: float, heard: Sequence[Heard], gpus: int) -> Row:
    """Make a row of one run. `expected_off_p90` is the relative error of predicted first tokens, at p90."""
    firsts = sorted(one.tokens_s[0] for one in heard)
    gaps = sorted(1e3 * (after - before) for one in heard for before, after in pairwise(one.tokens_s))
    off = sorted(abs(one.expected_s / one.tokens_s[0] - 1) for one in heard if one.expected_s)
    made = row(case, round(seconds, 3), "s", tokens=load.tokens, gpus=gpus)
    return made | {
        "tokens_per_s": round(sum(len(one.tokens_s) for one in heard) / seconds, 1),
        "first_p50_s": round(statistics.median(firsts), 3),
        "first_max_s": round(firsts[-1], 3),
        "gap_mean_ms": round(statistics.fmean(gaps), 2),
        "gap_p95_ms": round(quantile(gaps, 0.95), 2),
        "gap_max_ms": round(gaps[-1], 2),
        "expected_off_p90": round(quantile(off, 0.9), 3) if off else None,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
