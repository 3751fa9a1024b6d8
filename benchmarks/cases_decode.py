"""Cases of decode with 4 requests: paged attention with page scores, page selection, attention over selected
pages.

Pages are shuffled over the pool. Every case is a CUDA graph, like a decode worker's step. `beside_flashinfer`
times FlashInfer. `kernels/paged_decode/pages.py` explains the suffixes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deltafront.benchmarks.harness import BenchConfig, Case, Timed
from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.layers.kv_int8 import Scales, quantise
from deltafront.kernels.paged_decode import cpu
from deltafront.kernels.paged_decode.dispatch import (
    paged_attention,
    paged_attention_scored,
    paged_attention_sparse,
)
from deltafront.kernels.paged_decode.page_selection import select_pages
from deltafront.kernels.paged_decode.pages import PagedInput, SelectedPages
from deltafront.tests.numerics import assert_rows_close

REQUESTS = 4
RECENCY = 8
BUDGETS = (64, 256)
PROFILED = 672
"""The page budget of the profile in deploy/models."""


def cases(config: BenchConfig) -> list[Case]:
    check = partial(_check, config)
    full, chosen = partial(_full, config), partial(_chosen, config)
    rows = [
        Case("paged_decode", config.tokens, partial(full, "plain"), check),
        Case("paged_decode_scores", config.tokens, partial(full, "scores"), check, over="paged_decode"),
        Case("page_selection", config.tokens, partial(_selection, config, BUDGETS[0]), check),
        Case(f"page_selection_{PROFILED}_pages", config.tokens, partial(_selection, config, PROFILED), check),
    ]
    for budget in BUDGETS:
        rows.append(Case(f"paged_decode_{budget}_pages", config.tokens, partial(chosen, budget), check))
    wide: dict[str, str | int] = {"": "plain", "_scores": "scores", f"_{BUDGETS[-1]}_pages": BUDGETS[-1]}
    for name, what in wide.items():
        run = partial(_in_8_bits, config, what)
        over = f"paged_decode{name}"
        check_8_bits = partial(_check_8_bits, config)
        rows.append(Case(f"paged_decode_int8{name}", config.tokens, run, check_8_bits, over=over))
    return rows


def _narrowed(x: PagedInput) -> PagedInput:
    """Return x with its pages quantised to int8."""
    (k_PSGD, k_PSG), (v_PSGD, v_PSG) = quantise(x.k_PSGD), quantise(x.v_PSGD)
    return replace(x, k_PSGD=k_PSGD, v_PSGD=v_PSGD, scales=Scales(k_PSG, v_PSG))


def paged_input(config: BenchConfig, lengths: list[int]) -> PagedInput:
    """Draw Gaussian queries, keys and values. Each request's pages lie anywhere in the pool."""
    generator = torch.Generator(config.device).manual_seed(config.seed)
    columns = -(-max(lengths) // PAGE_TOKENS)
    pool = len(lengths) * columns

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=config.device, dtype=config.dtype)

    order = torch.randperm(pool, generator=generator, device=config.device)
    return PagedInput(
        2 * draw(len(lengths), config.q_heads, config.head_dim),
        draw(pool, PAGE_TOKENS, config.kv_heads, config.head_dim),
        draw(pool, PAGE_TOKENS, config.kv_heads, config.head_dim),
        order.view(len(lengths), columns).int(),
        torch.tensor(lengths, dtype=torch.int32, device=config.device),
        config.head_dim**-0.5,
    )


def arguments(
    x: PagedInput,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.q_RHD, x.k_PSGD, x.v_PSGD, x.table_RP, x.lengths_R


def _captured(run: Callable[[], object], note: str, flops: float | None = None) -> Timed:
    """Capture `run` as one CUDA graph, after two runs that compile and allocate."""
    run()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> None:
        """Replay the graph. The reference to `run` keeps the graph's input tensors alive."""
        assert run is not None
        graph.replay()

    return Timed(replay, flops=flops, note=note)


def _attention(x: PagedInput, tokens: int, run: Callable[[], object]) -> Timed:
    """Time `run`. Count its bytes of K and V and the operations of q · k and p · v (`tokens` per request)."""
    requests, heads, dim = x.q_RHD.shape
    row = dim * x.k_PSGD.element_size() + (x.scales is not None)
    read = 2 * requests * tokens * x.k_PSGD.shape[2] * row
    note = f"{requests} requests, {tokens} tokens each read, {read / 1e9:.3f} GB of K and V"
    return _captured(run, note, 4.0 * requests * heads * tokens * dim)


def _full(config: BenchConfig, what: str) -> Timed:
    x = paged_input(config, [config.tokens] * REQUESTS)
    call = paged_attention if what == "plain" else paged_attention_scored
    return _attention(x, config.tokens, lambda: call(*arguments(x), scale=x.scale))


def _selection(config: BenchConfig, budget: int) -> Timed:
    x = paged_input(config, [config.tokens] * REQUESTS)
    _, _, score_RP = paged_attention_scored(*arguments(x), scale=x.scale)

    def run() -> object:
        return select_pages(score_RP, x.lengths_R, budget=budget, recency=RECENCY)

    note = f"{REQUESTS} requests, {score_RP.shape[1]} pages, budget {budget}, recency {RECENCY}"
    return _captured(run, note)


def _chosen(config: BenchConfig, budget: int) -> Timed:
    x = paged_input(config, [config.tokens] * REQUESTS)
    _, _, score_RP = paged_attention_scored(*arguments(x), scale=x.scale)
    selected_RK, counts_R = select_pages(score_RP, x.lengths_R, budget=budget, recency=RECENCY)

    def ours() -> object:
        return paged_attention_sparse(
            *arguments(x), selected_RK=selected_RK, counts_R=counts_R, scale=x.scale
        )

    return _attention(x, budget * PAGE_TOKENS, ours)


def _in_8_bits(config: BenchConfig, what: str | int) -> Timed:
    """Time decode over an int8 KV cache. what: `plain`, `scores`, or the number of selected pages."""
    x = _narrowed(paged_input(config, [config.tokens] * REQUESTS))
    how: dict[str, Any] = {"scale": x.scale, "scales": x.scales}
    if what == "plain":
        return _attention(x, config.tokens, lambda: paged_attention(*arguments(x), **how))
    if what == "scores":
        return _attention(x, config.tokens, lambda: paged_attention_scored(*arguments(x), **how))
    _, _, score_RP = paged_attention_scored(*arguments(x), **how)
    selected_RK, counts_R = select_pages(score_RP, x.lengths_R, budget=int(what), recency=RECENCY)
    how |= {"selected_RK": selected_RK, "counts_R": counts_R}
    run = partial(paged_attention_sparse, *arguments(x), **how)
    return _attention(x, int(what) * PAGE_TOKENS, run)


def _check_8_bits(config: BenchConfig) -> None:
    """Compare the kernels over an int8 KV cache with the CPU versions in fp32, row by row."""
    x = _narrowed(paged_input(config, [8192, 8191, 4097, 1]))
    exact = replace(x, q_RHD=x.q_RHD.float())
    how: dict[str, Any] = {"scale": x.scale, "scales": x.scales}
    out_RHD, _, score_RP = paged_attention_scored(*arguments(x), **how)
    expected_RHD, _, expected_RP = cpu.paged_attention_scored(exact)
    assert_rows_close(out_RHD, expected_RHD)
    assert_rows_close(paged_attention(*arguments(x), **how)[0], expected_RHD)
    assert_rows_close(score_RP, expected_RP, dtype=config.dtype)
    selected = select_pages(score_RP, x.lengths_R, budget=BUDGETS[-1], recency=RECENCY)
    how |= dict(zip(("selected_RK", "counts_R"), selected, strict=True))
    sparse_RHD, _ = paged_attention_sparse(*arguments(x), **how)
    assert_rows_close(sparse_RHD, cpu.paged_attention_sparse(SelectedPages(exact, *selected))[0])


def _check(config: BenchConfig) -> None:
    """Compare the kernels in `config.dtype` with the CPU versions in fp32, row by row, over different
    lengths. Page selection must be identical, also at full size."""
    x = paged_input(config, [8192, 8191, 4097, 1])
    out_RHD, _, score_RP = paged_attention_scored(*arguments(x), scale=x.scale)
    exact = replace(x, q_RHD=x.q_RHD.float(), k_PSGD=x.k_PSGD.float(), v_PSGD=x.v_PSGD.float())
    expected_RHD, _, expected_RP = cpu.paged_attention_scored(exact)
    assert_rows_close(out_RHD, expected_RHD)
    assert_rows_close(paged_attention(*arguments(x), scale=x.scale)[0], expected_RHD)
    assert_rows_close(score_RP, expected_RP, dtype=config.dtype)
    for budget in BUDGETS:
        chosen = select_pages(score_RP, x.lengths_R, budget=budget, recency=RECENCY)
        selected_RK, counts_R = chosen
        sparse_RHD, _ = paged_attention_sparse(
            *arguments(x), selected_RK=selected_RK, counts_R=counts_R, scale=x.scale
        )
        assert_rows_close(sparse_RHD, cpu.paged_attention_sparse(SelectedPages(exact, *chosen))[0])
    wide_RP = torch.rand(REQUESTS, config.tokens // PAGE_TOKENS, device=config.device)
    lengths_R = torch.full((REQUESTS,), config.tokens, dtype=torch.int32, device=config.device)
    for budget in (*BUDGETS, PROFILED):
        found = select_pages(wide_RP, lengths_R, budget=budget, recency=RECENCY)
        expected = cpu.select_pages(wide_RP, lengths_R, budget=budget, recency=RECENCY)
        if not (torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])):
            raise AssertionError(f"page selection with budget {budget} differs from the CPU form")
