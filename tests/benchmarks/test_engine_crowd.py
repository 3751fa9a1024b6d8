"""Tests the crowd case of the engine benchmark without a service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deltafront.benchmarks.engine import crowd
from deltafront.benchmarks.engine.__main__ import Run, parsed
from deltafront.service.config import parse
from deltafront.workers.messages.events import Progress, Token


class Client:
    """A client whose answers come at once. It predicts two seconds for prompts of an even first token."""

    def generate(self, ids: Sequence[int], *, max_tokens: int, **_options: Any) -> Iterator[Progress | Token]:
        expected = 2.0 if ids[0] % 2 == 0 else 0.0
        yield Progress(tokens_done=0, tokens_total=len(ids), expected_first_token_seconds=expected)
        for index in range(max_tokens):
            yield Token(index=index, token_id=1, logprob=0.0)


def test_records_token_times_and_predicted_ttft_of_every_answer() -> None:
    prompts = [[n, 1, 1] for n in range(4)]
    seconds, heard = crowd.answered(Client(), prompts, 3, {"method": "dense"})  # type: ignore[arg-type]
    assert seconds > 0 and [one.expected_s for one in heard] == [2.0, 0.0, 2.0, 0.0]
    assert all(len(one.tokens_s) == 3 and one.tokens_s == sorted(one.tokens_s) for one in heard)


def test_row_has_quantiles_of_ttft_token_gaps_and_predicted_ttft() -> None:
    load = crowd.Load(3, 100, 3)
    heard = [
        crowd.Heard(1.0, [1.0, 1.01, 1.03]),
        crowd.Heard(1.5, [2.0, 2.01, 2.11]),
        crowd.Heard(0.0, [4.0, 4.01, 4.02]),
    ]
    row = crowd.crowd_row("crowd", load, 4.5, heard, 1)
    assert (row["value"], row["tokens_per_s"], row["first_p50_s"], row["first_max_s"]) == (4.5, 2.0, 2.0, 4.0)
    assert (row["gap_p95_ms"], row["gap_max_ms"]) == (pytest.approx(100.0), pytest.approx(100.0))
    assert row["gap_mean_ms"] == pytest.approx(160 / 6, abs=0.01) and row["expected_off_p90"] == 0.25
    assert crowd.crowd_row("crowd", load, 4.5, heard[2:], 1)["expected_off_p90"] is None


def test_benchmark_service_has_pages_for_all_concurrent_requests(tmp_path: Path) -> None:
    run = Run(parsed(["--cases", "crowd", "--model", str(tmp_path), "--target-gap-ms", "0", "30"]))
    assert run.given.target_gap_ms == [0.0, 30.0]
    for load in crowd.LOADS:
        setup = run.setup(1, None, more=crowd.settings(load, 30.0))
        settings = parse(setup.content())
        assert settings.decode.cache_tokens >= load.prompts * (load.tokens + load.answer)
        assert (settings.decode.target_gap_ms, settings.decode.max_batch) == (30.0, 64)
