"""Measures TTFT of prompts with a prefix cache hit, and checks that each prompt has a hit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deltafront.benchmarks.engine import measure
from deltafront.benchmarks.engine.rows import Row
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.request.answers import GenerateFinished

Ids = Sequence[int]
Made = Callable[[int, int], list[int]]
"""(tokens, seed) -> token ids of a prompt."""
TURNS, GROWTH = 43, 444
"""Turns of the median agent in published traces, and the tokens that each turn adds."""


def question_again(
    client: DeltafrontClient, made: Made, tokens: int, repeats: int, options: Mapping[str, float], gpus: int
) -> Row:
    """Measure `ttft_cached_gpu`: TTFT of a cached prompt with another question at its end."""
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
    """Measure `ttft_long_rest`: TTFT of a prompt of which three quarters are cached. The row's parts show
    which worker prefilled the rest."""
    results = []
    for n in range(repeats):
        prompt, known = made(tokens, 200 + n), tokens * 3 // 4
        measure.first_token(client, prompt[:known], "dpxa", options)
        results.append(measure.first_token(client, prompt, "dpxa", options))
    return cached_row("ttft_long_rest", results, tokens, gpus, least=tokens // 2)


def turns(client: DeltafrontClient, made: Made, tokens: int, options: Mapping[str, float], gpus: int) -> Row:
    """Measure `ttft_turns`: median TTFT of later turns of a conversation that grows to `tokens` tokens."""
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
    """Make a row of the median TTFT. Raises RuntimeError if a prompt had a hit of fewer than `least` tokens.

    where: The field of `Usage` that counts the tokens of the hit.
    """
    found = [getattr(one.usage, where) for one in results]
    if min(found) < least:
        raise RuntimeError(f"{case}: only {found} tokens were not read again")
    one = {**measure.ttft_row(case, results, gpus), "tokens": tokens}
    return one if results[0].timings.stages else {**one, "density": None}
