"""Pairs of paged decode attention kernels: over all pages and over selected pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from deltafront.benchmarks.beside_flashinfer.pairs import CONFIG, Pair, Run, copies_of, draw
from deltafront.benchmarks.cases_decode import RECENCY, arguments, paged_input
from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.paged_decode.dispatch import (
    paged_attention,
    paged_attention_scored,
    paged_attention_sparse,
)
from deltafront.kernels.paged_decode.page_selection import select_pages
from deltafront.kernels.paged_decode.pages import PagedInput

_WORKSPACE_BYTES = 256 << 20


def decode(flashinfer: Any) -> Iterator[Pair]:
    for requests, tokens in ((1, 8192), (8, 8192), (32, 8192), (1, 131_072)):
        layers = _layers(requests, tokens)
        shape = f"{requests} requests, {tokens} tokens"
        for tensor_cores in (True, False):
            kind = "tensor" if tensor_cores else "CUDA"
            theirs = _their_decode(flashinfer, layers, layers[0], tensor_cores)
            yield Pair(f"paged decode ({kind} cores)", shape, _full(layers), theirs, len(layers))
    for requests, budget in ((1, 64), (1, 672), (4, 672)):
        layers = _layers(requests, 131_072)
        ours, short = _selected(layers, budget)
        theirs = _their_decode(flashinfer, layers, short, tensor_cores=True)
        shape = f"{requests} requests, {budget} of 8192 pages"
        yield Pair("paged decode, selected pages", shape, ours, theirs, len(layers))


def _layers(requests: int, tokens: int) -> list[PagedInput]:
    """Make the KV caches of several layers, with one page table."""
    x = paged_input(CONFIG, [tokens] * requests)
    count = copies_of(x.k_PSGD.nbytes + x.v_PSGD.nbytes)
    new = (replace(x, k_PSGD=draw(*x.k_PSGD.shape), v_PSGD=draw(*x.v_PSGD.shape)) for _ in range(count - 1))
    return [x, *new]


def _full(layers: Sequence[PagedInput]) -> Run:
    return lambda i: paged_attention(*arguments(layers[i]), scale=layers[i].scale)[0]


def _selected(layers: Sequence[PagedInput], budget: int) -> tuple[Run, PagedInput]:
    """Return our run over selected pages, and the first layer's input with a table of only these pages."""
    x = layers[0]
    _, _, score_RP = paged_attention_scored(*arguments(x), scale=x.scale)
    selected_RK, counts_R = select_pages(score_RP, x.lengths_R, budget=budget, recency=RECENCY)

    def run(i: int) -> torch.Tensor:
        given = arguments(layers[i])
        return paged_attention_sparse(*given, selected_RK=selected_RK, counts_R=counts_R, scale=x.scale)[0]

    table_RK = x.table_RP.gather(1, selected_RK.long())
    lengths_R = torch.full_like(x.lengths_R, budget * PAGE_TOKENS)
    return run, replace(x, table_RP=table_RK, lengths_R=lengths_R)


def _their_decode(flashinfer: Any, layers: Sequence[PagedInput], x: PagedInput, tensor_cores: bool) -> Run:
    """Return FlashInfer's run for x's table of full pages. Its plan on the host (0.2-0.5 ms) is not timed."""
    requests, columns = x.table_RP.shape

    def buffer(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=CONFIG.device)

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=CONFIG.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=buffer(requests + 1),
        paged_kv_indices_buffer=buffer(requests * columns),
        paged_kv_last_page_len_buffer=buffer(requests),
    )
    wrapper.plan(
        columns * torch.arange(requests + 1, dtype=torch.int32),
        x.table_RP.flatten(),
        torch.full((requests,), PAGE_TOKENS, dtype=torch.int32),
        CONFIG.q_heads,
        CONFIG.kv_heads,
        CONFIG.head_dim,
        PAGE_TOKENS,
        sm_scale=x.scale,
        q_data_type=CONFIG.dtype,
        kv_data_type=CONFIG.dtype,
    )
    return lambda i: wrapper.run(layers[i].q_RHD, (layers[i].k_PSGD, layers[i].v_PSGD))
