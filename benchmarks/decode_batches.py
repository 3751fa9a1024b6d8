"""Times paged decode attention of batches with equal and unequal lengths (8B shape: 32 query heads on 8).

    python -m deltafront.benchmarks.decode_batches

Pages are shuffled over the pool. A CUDA graph has ten launches, so it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.harness import median_ms
from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.paged_decode.launch import paged_attention, paged_attention_scored
from deltafront.kernels.paged_decode.pages import PagedInput

BATCHES = (
    [2112] * 64,
    [2112] * 40 + [1] * 24,  # 24 rows that pad a batch of 40
    [2112] * 32,
    [8300] * 16,
    [8300] * 9 + [1] * 7,
    [8300] * 32,
    [32_768] * 8,
    [131_072] * 4,
    [131_072],
    [60_000] * 4 + [500] * 12,
    [60_000] * 4 + [100] * 60,
    [8000] * 16 + [2000] * 16 + [900] * 16 + [300] * 16,
)
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAUNCHES = 10


def batch_of(lengths: Sequence[int]) -> PagedInput:
    pages = [-(-tokens // PAGE_TOKENS) for tokens in lengths]
    order, table_RP = torch.randperm(sum(pages)).int(), torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for own, ids in zip(table_RP, torch.split(order, pages), strict=True):
        own[: len(ids)] = ids
    pool = sum(pages), PAGE_TOKENS, KV_HEADS, HEAD_DIM
    q_RHD, k_PSGD, v_PSGD = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((len(pages), Q_HEADS, HEAD_DIM), pool, pool)
    )
    lengths_R = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return PagedInput(q_RHD, k_PSGD, v_PSGD, table_RP.cuda(), lengths_R, HEAD_DIM**-0.5, None)


def microseconds(work: Callable[[], object]) -> float:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    return 1e3 * median_ms(graph.replay) / LAUNCHES


def main(arguments: Sequence[str] | None = None) -> None:
    parser_of(__doc__).parse_args(arguments)
    print("| requests × tokens | µs | TB/s | with page scores, µs |\n|---|---|---|---|")
    for lengths in BATCHES:
        x = batch_of(lengths)
        plain, scored = (microseconds(partial(run, x)) for run in (paged_attention, paged_attention_scored))
        name = ", ".join(f"{len([*same])} × {tokens}" for tokens, same in groupby(lengths))
        speed = 2 * sum(lengths) * KV_HEADS * HEAD_DIM * x.k_PSGD.element_size() / plain / 1e6
        print(f"| {name} | {plain:.1f} | {speed:.2f} | {scored:.1f} |", flush=True)


if __name__ == "__main__":
    main()
