"""Tests the engine benchmark's rows of prefix cache hits on the GPU, in host memory and on disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafront.benchmarks.engine import cached, measure, tiers
from deltafront.benchmarks.engine.__main__ import Run, parsed
from deltafront.service.request.answers import Density, GenerateFinished, Timings
from deltafront.workers.messages.events import FinishReason, Usage


class Remembering:
    """A client of a service with an unlimited prefix cache. forgets: The service has no prefix cache."""

    def __init__(self, forgets: bool = False) -> None:
        self.read: list[list[int]] = []
        self.forgets = forgets

    def generate(self, ids: list[int], **_options: object) -> Iterator[GenerateFinished]:
        known = max((common(ids, other) for other in self.read), default=0)
        self.read.append(ids)
        cached = 0 if self.forgets else min(known, len(ids) - 1) // 16 * 16
        seconds = (len(ids) - cached) / 1000
        yield GenerateFinished(
            reason=FinishReason.LENGTH,
            text="",
            session=None,
            page_share=1.0,
            usage=Usage(prompt_tokens=len(ids), completion_tokens=1, cached_tokens=cached),
            timings=Timings(seconds, {"prefill": seconds}, [], seconds),
            density=Density(),
            request_id="r",
        )


def common(ids: list[int], other: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, other, strict=False)))


def made(tokens: int, seed: int) -> list[int]:
    return measure.random_ids(tokens, 199, seed)


def test_prefix_cache_rows_measure_prompts_with_a_hit() -> None:
    client: Any = Remembering()
    one = cached.question_again(client, made, 1024, 3, {}, 1)
    assert (one["case"], one["tokens"], one["value"]) == ("ttft_cached_gpu", 1024, 0.016)
    one = cached.long_rest(client, made, 1024, 3, {}, 1)
    assert (one["case"], one["tokens"], one["value"]) == ("ttft_long_rest", 1024, 0.256)
    one = cached.turns(client, made, 20_000, {}, 1)
    assert (one["case"], one["tokens"]) == ("ttft_turns", 20_000) and one["value"] < 0.46
    assert len(client.read) == 4 + 6 + cached.TURNS


def test_refuses_a_cached_row_without_a_prefix_cache_hit() -> None:
    client: Any = Remembering(forgets=True)
    with pytest.raises(RuntimeError, match="ttft_cached_gpu: only"):
        cached.question_again(client, made, 1024, 3, {}, 1)


def test_refuses_host_memory_times_without_hits_in_host_memory() -> None:
    client: Any = Remembering()
    results = [measure.first_token(client, made(1024, 1), "dpxa", {}) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"ttft_cached_host: only \[0, 0\] tokens"):
        cached.cached_row("ttft_cached_host", results, 1024, 1, 512, "host_tokens")


def test_reads_the_pages_of_each_tier_from_metrics() -> None:
    text = """# TYPE deltafront_kv_tier_pages gauge
deltafront_kv_tier_pages{model_name="m",tier="host",worker="decode:a"} 12.0
deltafront_kv_tier_pages{model_name="m",tier="disk",worker="decode:a"} 7.0
deltafront_kv_tier_pages{model_name="m",tier="host",worker="decode:b"} 3.0
"""
    assert (tiers.tier_pages(text, "host"), tiers.tier_pages(text, "disk")) == (15.0, 7.0)


def test_plain_disk_read_reads_all_files_and_refuses_missing_ones(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for path in files:
        path.write_bytes(bytes(100_000))
    tiers.forget_pages(tmp_path)
    assert tiers.plain_read(files) > 0
    with pytest.raises(FileNotFoundError):
        tiers.plain_read([*files, tmp_path / "none"])


def test_only_the_cached_case_enables_the_prefix_cache(tmp_path: Path) -> None:
    run = Run(parsed(["--cases", "cached", "--shape", "tiny", "--tokens", "4096", "--turn-tokens", "20000"]))
    doors = [run.setup(1, None, remembers=remembers).content()["door"] for remembers in (False, True)]
    assert [door["prefix_reuse"] for door in doors] == [False, True]
    assert run.setup(1, None).tokens == 20_000
