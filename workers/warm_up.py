"""What a worker runs once before it takes requests, so that none of them waits for a compiler.

On a GPU each kernel is compiled at its first use, tens of seconds for a method in all. The made-up prompts
here go through the same code as real ones; their results are dropped. Nothing is announced and no request
exists meanwhile.
"""

from __future__ import annotations

from array import array

from .decode.runner import DecodeRunner, Row
from .kv.page_pool import pages_for
from .messages import Sampling

_RAGGED = 77
"""Tokens of a last chunk of one tile: no multiple of anything that a kernel might be specialised for."""


def warm_up_decode(runner: DecodeRunner, tokens: int, selects_pages: bool) -> None:
    """Append and decode at few and at `tokens` tokens, alone and in a batch, greedy and sampled.

    Every page table names the scratch page only, which is left with finite numbers. selects_pages: whether
    the worker has Δ-layers.
    """
    sampled = Sampling(temperature=1.0, top_p=0.9, top_k=50)
    batches = [(False,), (True,), (True, False)] if selects_pages else [(False,), (False, False)]
    key = 0
    longest = tokens - _RAGGED - 2  # two steps follow
    for length in sorted({min(100, longest), longest}):
        pages = (runner.scratch_page,) * pages_for(length + _RAGGED + 2)
        logits_V = runner.append(pages, length, array("I", [0] * _RAGGED), last=True)
        for batch in batches:
            rows = []
            for selects, sampling in zip(batch[: runner.max_batch], (Sampling(), sampled), strict=False):
                key -= 1  # requests count upwards
                rows.append(Row(key, pages, length + _RAGGED, 0, sampling, selects))
            runner.first_tokens([logits_V] * len(rows), rows)
            runner.decode(rows)
            runner.decode(rows)
