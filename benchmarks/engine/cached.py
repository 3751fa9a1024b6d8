"""Time to first token of prompts with a prefix hit. Each row checks that there was one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deltafront.benchmarks.engine import measure
from deltafront.benchmarks.engine.rows import Row
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.request.answers import GenerateFinished

Ids = Sequence[int]
Made = Callable[[int, int], list[int]]
"""(tokens, seed) -> token ids."""
TURNS, GROWTH = 43, 444
"""Turns of the median agent in published traces, and the tokens that each adds."""


def question_again(
    client: DeltafrontClient, made: Made, tokens: int, repeats: int, options: Mapping[str, float], gpus: int
) -> Row:
    """`ttft_cached_gpu`: a cached prompt, followed by another question."""
    document = made(tokens, 1)
    measure.first_token(client, document, "dpxa", options)
    results = [
        measure.first_token(client, [*document, *made(measure.APPENDED, 100 + n)], "dpxa", options)
        for n in range(repeats)
    ]
    return cached_row("ttft_cached_gpu", results, tokens, gpus, least=tokens - measure.APPENDED)


def long_rest(
    client: DeltafrontClient, made: Made, tokens: int, repeats: int, options: Mapping[str, float], gpus: int
) -> Row:
    """`ttft_long_rest`: three quarters of a prompt are cached. The parts say which worker prefilled the
    rest."""
    results = []
    for n in range(repeats):
        prompt, known = made(tokens, 200 + n), tokens * 3 // 4
        measure.first_token(client, prompt[:known], "dpxa", options)
        results.append(measure.first_token(client, prompt, "dpxa", options))
    return cached_row("ttft_long_rest", results, tokens, gpus, least=tokens // 2)


def turns(client: DeltafrontClient, made: Made, tokens: int, options: Mapping[str, float], gpus: int) -> Row:
    """`ttft_turns`: a conversation grows to so many tokens; the median of all turns but the first."""
    everything = made(tokens, 300)
    ends = range(tokens - (TURNS - 1) * GROWTH, tokens + 1, GROWTH)
    results = [measure.first_token(client, everything[:end], "dpxa", options) for end in ends]
    return cached_row("ttft_turns", results[1:], tokens, gpus, least=1)


def cached_row(
    case: str,
    results: Sequence[GenerateFinished],
    tokens: int,
    gpus: int,
    least: int,
    where: str = "cached_tokens",
) -> Row:
    """Make a row of the median. where: the field of Usage that counts what was found.

    Raises RuntimeError where a prompt found fewer than `least` tokens.
    """
    found = [getattr(one.usage, where) for one in results]
    if min(found) < least:
        raise RuntimeError(f"{case}: only {found} tokens were not read again")
    one = {**measure.ttft_row(case, results, gpus), "tokens": tokens}
    return one if results[0].timings.stages else {**one, "density": None}
