"""Measures TTFT of prompts loaded from host memory and disk, and how loading slows other requests.

The decode worker has room for one document and a short session. Two documents evict each other, so each
question finds its document only in host memory. A restarted service finds them on disk.
"""

from __future__ import annotations

import itertools
import operator
import os
import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from deltafront.benchmarks.engine import measure
from deltafront.benchmarks.engine.cached import Made, cached_row
from deltafront.benchmarks.engine.measure import APPENDED
from deltafront.benchmarks.engine.rows import Row, row
from deltafront.benchmarks.engine.setup import ANSWER_ROOM
from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.request.answers import GenerateFinished
from deltafront.workers.kv.pages.store_tier import GROUP_PAGES

GROUP_TOKENS = GROUP_PAGES * PAGE_TOKENS
_PATIENCE_S = 120.0
_ROUNDS, _ANSWER = 5, 640
_QUESTIONS, _FIRST_S, _EVERY_S = 6, 0.25, 0.75
"""Questions asked while another session answers, seconds to the first, and seconds between questions."""
_READERS = 4
_CHUNK = 8 << 20


def _session(tokens: int) -> int:
    """Return the tokens of the session that decodes while documents of `tokens` tokens are loaded."""
    return tokens // 8


def settings(tokens: int, host_gib: float, store: Path, *, mapped: bool) -> dict[str, Any]:
    """Return the configuration keys that give the decode worker room for one document and a session, and the
    KV cache a host and a disk tier. mapped: Prefill stages use the decode worker's pages."""
    room = (tokens + _session(tokens) + 4 * ANSWER_ROOM) // PAGE_TOKENS * PAGE_TOKENS
    return {
        **({"prefill.cache_tokens": room} if mapped else {}),
        "decode.cache_tokens": room,
        "decode.host_cache_gib": host_gib,
        "decode.store": str(store),
    }


def measured(
    started: Callable[[], AbstractContextManager[DeltafrontClient]],
    made: Made,
    tokens: int,
    repeats: int,
    options: Mapping[str, float],
    gpus: int,
    store: Path,
) -> Iterator[Row]:
    """Yield rows `ttft_cached_host` and `token_while_moving`. Then restart services and yield
    `ttft_cached_disk`, `disk_read` (the time to read the same files and discard them) and their ratio.

    `token_while_moving` is the ratio of two times of a session's answer, the median of several pairs. The
    same number of questions is asked during both answers. During the first answer, each question's document
    is loaded from host memory; during the second, all questions are about one document that stays on the GPU.
    So the ratio is the cost of loading, without the cost of the questions.
    """
    documents = [made(tokens - APPENDED, 400 + n) for n in range(2)]
    pages, least = tokens // PAGE_TOKENS, tokens - 5 * ANSWER_ROOM

    def ask(client: DeltafrontClient, n: int, seed: int) -> GenerateFinished:
        question = made(APPENDED, 500 + seed)
        return measure.first_token(client, [*documents[n % 2], *question], "dpxa", options)

    with started() as client, measure.sessions(client, [made(_session(tokens), 600)], "dpxa") as asked:
        for n in range(2):
            ask(client, n, n)
            _wait_for_pages(client, "host", pages * (n + 1) * 0.99)
        results = [ask(client, n, 10 + n) for n in range(2 * repeats)]
        yield cached_row("ttft_cached_host", results, tokens, gpus, least, "host_tokens")
        seeds = itertools.count(100)
        stay, move = list[float](), list[float]()
        for _ in range(_ROUNDS):
            ask(client, 0, next(seeds))
            stay.append(_answer_s(client, asked, lambda _n: ask(client, 0, next(seeds)), (0, ANSWER_ROOM)))
            move.append(_answer_s(client, asked, lambda n: ask(client, n + 1, next(seeds)), (least, tokens)))
        ratio = round(statistics.median(map(operator.truediv, move, stay)), 3)
        yield row("token_while_moving", ratio, "ratio", tokens=tokens, gpus=gpus)
        _wait_for_pages(client, "disk", pages * 2 * 0.98)
    results, reads = [], list[float]()
    for n in range(2):
        forget_pages(store)
        with started() as client:
            results.append(ask(client, n, 200 + n))
        forget_pages(store)  # a plain read follows each question, since the disk's speed varies over time
        reads.append(plain_read(_files(store)[: tokens // GROUP_TOKENS]))
    yield cached_row("ttft_cached_disk", results, tokens, gpus, tokens - 2 * GROUP_TOKENS, "disk_tokens")
    yield row("disk_read", round(statistics.median(reads), 4), "s", tokens=tokens, gpus=gpus)
    over = [one.timings.ttft_seconds / read for one, read in zip(results, reads, strict=True)]
    ratio = round(statistics.median(over), 3)
    yield row("ttft_cached_disk_over_read", ratio, "ratio", tokens=tokens, gpus=gpus)


def _answer_s(
    client: DeltafrontClient,
    asked: Sequence[str],
    ask: Callable[[int], GenerateFinished],
    from_host: tuple[int, int],
) -> float:
    """Return the seconds of a session's answer while questions about documents are asked.

    Args:
        ask: Asks question number n.
        from_host: Minimum and maximum of the tokens that a question may load from host memory.

    Raises:
        RuntimeError: A question loaded more or fewer tokens, or was not asked during the answer.
    """
    began = time.perf_counter()

    def question(number: int) -> GenerateFinished:
        time.sleep(max(0.0, began + _FIRST_S + _EVERY_S * number - time.perf_counter()))
        return ask(number)

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(lambda: [question(number) for number in range(_QUESTIONS)])
        (times,) = measure.answers(client, asked, "full", _ANSWER)
        questions = asking.result() if asking.done() else []
    if not questions or times[0] - began > _FIRST_S:
        raise RuntimeError(
            "the answer ended before the last question: it must last from before the first to after the last"
        )
    found, (fewest, most) = [one.usage.host_tokens for one in questions], from_host
    if not all(fewest <= count <= most for count in found):
        raise RuntimeError(f"{found} tokens came from host memory for questions, not {fewest} to {most}")
    return times[-1] - times[0]


def tier_pages(metrics: str, tier: str) -> float:
    found = re.findall(rf'^deltafront_kv_tier_pages\{{.*tier="{tier}".*\}} (\S+)$', metrics, re.MULTILINE)
    return sum(map(float, found))


def _wait_for_pages(client: DeltafrontClient, tier: str, least: float) -> None:
    address, until = client.info().metrics_address, time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            if tier_pages(answer.read().decode(), tier) >= least:
                return
        time.sleep(0.5)
    raise RuntimeError(f"after {_PATIENCE_S:g} s fewer than {least:.0f} pages are in the tier `{tier}`")


def _files(folder: Path) -> Sequence[Path]:
    return sorted(folder.rglob("*.safetensors"))


def forget_pages(folder: Path) -> None:
    """Drop a folder's files from the operating system's page cache, so that they are read from disk."""
    for path in _files(folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def plain_read(files: Sequence[Path]) -> float:
    """Read files with several threads, discard the bytes, and return the seconds."""

    def read(path: Path) -> None:
        room = bytearray(_CHUNK)
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass

    began = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(read, files))
    return time.perf_counter() - began
