"""Sends requests to the service by gRPC and makes rows of their timings."""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from deltafront.benchmarks.engine.rows import BATCH, Row, row
from deltafront.benchmarks.streams import ending
from deltafront.kernels.constants import BLOCK
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.errors import Overloaded
from deltafront.service.request.answers import GenerateFinished, PrefillFinished
from deltafront.workers.messages.events import Token

T = TypeVar("T")
_TRIES = 30
_TTL_S = 1800.0
_TOLD_S = 4.0
APPENDED = 16
"""Tokens of a question that extends a session."""
STRETCH = 8
_COMPILATIONS = re.compile(r'^deltafront_kernel_compilations\{.*phase="serving".*\} (\S+)$', re.MULTILINE)


def random_ids(tokens: int, vocabulary: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocabulary, tokens).tolist()
    return ids


def patiently(call: Callable[[], T]) -> T:
    """Retry `call` a limited number of times while the service rejects it as overloaded and says when to
    retry."""
    for _ in range(_TRIES):
        try:
            return call()
        except Overloaded as error:
            if error.retry_after_s is None:
                raise
            time.sleep(min(max(error.retry_after_s, 0.5), 10.0))
    return call()


def first_token(
    client: DeltafrontClient,
    ids: Sequence[int],
    method: str,
    options: Mapping[str, float],
    blocks: int | None = None,
) -> GenerateFinished:
    """Generate one token after a prompt. The answer's timings are TTFT and its parts.

    Args:
        blocks: Append a question and recompute this number of blocks for it. None: no question.

    Raises:
        RuntimeError: The service recomputed a different number of blocks.
    """
    asked: dict[str, Any] = {}
    if blocks is not None:
        asked = {"append": [1] * APPENDED, "recompute_blocks": blocks}

    def once() -> GenerateFinished:
        events = client.generate(ids, method=method, options=options, max_tokens=1, ignore_eos=True, **asked)
        return _checked(ending(events, GenerateFinished), blocks or 0)

    return patiently(once)


def _checked(one: GenerateFinished, blocks: int) -> GenerateFinished:
    if one.recomputed_tokens != blocks * BLOCK:
        raise RuntimeError(f"{one.recomputed_tokens} tokens were recomputed, not {blocks} blocks")
    return one


def ttft_row(case: str, results: Sequence[GenerateFinished], gpus: int) -> Row:
    """Make a row of the median run (the longer of two), with the parts of its TTFT and its density."""
    middle = sorted(results, key=lambda one: one.timings.ttft_seconds)[len(results) // 2]
    made = row(
        case,
        round(middle.timings.ttft_seconds, 4),
        "s",
        tokens=middle.usage.prompt_tokens,
        gpus=gpus,
        density=middle.density.mean,
    )
    return {**made, "parts": {name: round(value, 4) for name, value in middle.timings.parts.items()}}


def at_once(
    client: DeltafrontClient, prompts: Sequence[Sequence[int]], method: str, options: Mapping[str, float]
) -> list[GenerateFinished]:
    """Time prompts that are sent together, one for each prefill group."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(first_token, client, ids, method, options) for ids in prompts]
        return [job.result() for job in jobs]


def prompts_per_s(
    client: DeltafrontClient, prompts: Sequence[Sequence[int]], method: str, options: Mapping[str, float]
) -> float:
    """Send all prompts together and return prompts per second until the last first token."""
    began = time.perf_counter()
    at_once(client, prompts, method, options)
    return len(prompts) / (time.perf_counter() - began)


@contextmanager
def sessions(client: DeltafrontClient, prompts: Sequence[Sequence[int]], method: str) -> Iterator[list[str]]:
    """Prefill each prompt into a separate session, so that no two share pages."""

    def read(ids: Sequence[int]) -> str:
        events = client.prefill(ids, method=method, session_ttl_s=_TTL_S)
        return ending(events, PrefillFinished).session.session_id

    made: list[str] = []
    try:
        for ids in prompts:
            made.append(patiently(lambda ids=ids: read(ids)))  # type: ignore[misc]
        yield made
    finally:
        for session in made:
            client.release(session)


def token_ms(client: DeltafrontClient, asked: Sequence[str], selection: str, tokens: int) -> float:
    """Return milliseconds per token while all sessions decode together. If their answers do not overlap, try
    twice more with longer answers."""
    for longer in (1, 2, 4):
        arrivals = answers(client, asked, selection, longer * tokens)
        if spans := spans_together(arrivals):
            return 1e3 * statistics.median(spans) / STRETCH
    raise RuntimeError(f"answers of {longer * tokens} tokens never ran all at once: raise --answer")


def answers(client: DeltafrontClient, asked: Sequence[str], selection: str, tokens: int) -> list[list[float]]:
    """Decode from all sessions together. Return the arrival time of each token, by session."""
    begin = threading.Barrier(len(asked))

    def answer(session: str) -> list[float]:
        begin.wait()
        events = client.generate(
            session_id=session,
            append=[1] * APPENDED,
            max_tokens=tokens,
            ignore_eos=True,
            page_selection=selection,
        )
        return [time.perf_counter() for event in events if isinstance(event, Token)]

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(answer, asked))


def spans_together(arrivals: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds between every STRETCH tokens of a stream while all streams run. Times between single
    tokens would mislead, because some tokens arrive together."""
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    return [
        later - earlier
        for times in arrivals
        for earlier, later in zip(times, times[STRETCH:], strict=False)
        if begin <= earlier and later <= end
    ]


def token_rows(
    client: DeltafrontClient, asked: Sequence[str], answer: int, tokens: int, gpus: int
) -> Iterator[Row]:
    """Measure decode with full attention and with DELTA: of one session, and of all sessions together."""
    for batch in sorted({1, len(asked)}):
        for selection in ("full", "delta"):
            name = f"token_{selection}" if batch == 1 else f"batch{BATCH}_token_{selection}"
            value = token_ms(client, asked[:batch], selection, answer)
            yield row(name, round(value, 3), "ms", tokens=tokens, gpus=gpus)


def question_row(
    client: DeltafrontClient, session: str, blocks: int, repeats: int, tokens: int, gpus: int
) -> Row:
    """Measure TTFT of a question to a session, with `blocks` of its blocks recomputed first."""

    def once() -> GenerateFinished:
        events = client.generate(
            session_id=session,
            append=[1] * APPENDED,
            max_tokens=1,
            ignore_eos=True,
            recompute_blocks=blocks,
        )
        return _checked(ending(events, GenerateFinished), blocks)

    results = [patiently(once) for _ in range(repeats)]
    name = f"ttft_question_recompute_{blocks}" if blocks else "ttft_question"
    return {**ttft_row(name, results, gpus), "tokens": tokens, "density": None}


def compilations(address: str) -> float | None:
    """Return the number of kernels compiled since the service was ready, from its metrics; None if it has no
    such metric. Wait first, because workers report once a second."""
    time.sleep(_TOLD_S)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return counted(answer.read().decode())


def counted(metrics: str) -> float | None:
    found = _COMPILATIONS.findall(metrics)
    return sum(map(float, found)) if found else None


def gpu_memory_gib() -> list[float]:
    """Return the used memory of every GPU in GiB. Empty without GPUs."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [float(line) / 1024 for line in text.split()]
