"""What a worker runs once before it takes requests, so that none of them waits for a compiler.

On a GPU each kernel is compiled at its first use, tens of seconds for a method in all. The made-up prompts
here go through the same code as real ones; their results are dropped. Nothing is announced and no request
exists meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from ..kernels.build import build
from ..kernels.interface import BLOCK, AttentionInput, StateSpec
from .decode.runner import DecodeRunner, Row
from .kv.page_pool import pages_for
from .messages import MethodSpec, Sampling
from .model.decoder import LayerStack

_RAGGED = 77
"""Tokens of a last chunk of one tile: no multiple of anything that a kernel might be specialised for."""


@torch.inference_mode()
def warm_up_prefill(stack: LayerStack, methods: Sequence[MethodSpec], chunk_tokens: int) -> None:
    """Read a few prompts with each method, in chunks as requests are. Only the first layer attends; all
    layers run the same kernels."""
    for spec in methods:
        for tokens in prompt_lengths(int(spec.values.get("min_tokens", 0)), chunk_tokens):
            whole, rest = divmod(tokens, chunk_tokens)
            _read(stack, spec, [chunk_tokens] * whole + [rest] * (rest > 0))
    if stack.device.type == "cuda":
        torch.cuda.synchronize(stack.device)
        torch.cuda.empty_cache()


def prompt_lengths(shortest: int, chunk_tokens: int) -> list[int]:
    """Prompts longer than `shortest` that meet every specialisation: Triton compiles a kernel anew for an
    integer that is 1 and for one that is no multiple of 16, whether it counts tokens or tiles.

    So: two whole chunks or more, then one tile, a few tiles, and nearly a chunk; and a single short chunk.
    """
    whole = max(2, shortest // chunk_tokens + 1) * chunk_tokens
    few, most = 2 * BLOCK + _RAGGED, chunk_tokens - BLOCK - _RAGGED
    lengths = [whole + rest for rest in (_RAGGED, few, most) if 0 < rest < chunk_tokens]
    return lengths + [n for n in (chunk_tokens - BLOCK, chunk_tokens - _RAGGED) if n > shortest]


def _read(stack: LayerStack, spec: MethodSpec, chunks: Sequence[int]) -> None:
    config, total = stack.config, sum(chunks)
    method = build(spec)
    state = method.new_state(
        StateSpec(1, config.q_heads, config.kv_heads, config.head_dim, total, stack.device, stack.dtype)
    )
    k_BGSD = torch.empty(1, config.kv_heads, 0, config.head_dim, dtype=stack.dtype, device=stack.device)
    v_BGSD = k_BGSD

    def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        nonlocal k_BGSD, v_BGSD
        if layer != stack.layers.start:
            return torch.zeros_like(q_THD)
        k_BGSD = torch.cat((k_BGSD, k_TGD.transpose(0, 1)[None]), dim=2)
        v_BGSD = torch.cat((v_BGSD, v_TGD.transpose(0, 1)[None]), dim=2)
        x = AttentionInput.of(q_THD.transpose(0, 1)[None], k_BGSD, v_BGSD, q_start=start, prompt_tokens=total)
        return method.attend(x, state)[0][0].transpose(0, 1)

    start = 0
    for tokens in chunks:
        hidden_TC = torch.randn(tokens, config.hidden, device=stack.device).to(stack.dtype)
        stack.forward(hidden_TC, torch.arange(start, start + tokens, device=stack.device), attend)
        start += tokens


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
