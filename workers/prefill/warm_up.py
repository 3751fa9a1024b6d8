"""What a stage runs once before it takes requests, so that none of them waits for a compiler.

On a GPU each kernel is compiled at its first use, tens of seconds for a method in all. The made-up prompts
here go through the same code as real ones; their results are dropped.

Shape suffixes: as in `stage.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.build import build
from ...kernels.constants import BLOCK
from ...kernels.interface import Attention, AttentionInput, StateSpec
from ..messages.methods import MethodSpec
from ..model.decoder import LayerStack
from ..model.levels import amounts_for
from ..model.profile import Profile

_RAGGED = 77
"""Tokens of a last chunk of one tile: no multiple of anything that a kernel might be specialised for."""


@torch.inference_mode()
def warm_up(
    stack: LayerStack, methods: Sequence[MethodSpec], chunk_tokens: int, profile: Profile | None = None
) -> None:
    """Read a few prompts with each method, in chunks as requests are. Only the first layer attends; all
    layers run the same kernels. Raises MethodError for a density that the profile does not have."""
    for spec in methods:
        amounts = amounts_for(profile, spec)
        for tokens in prompt_lengths(int(spec.values.get("min_tokens", 0)), chunk_tokens):
            whole, rest = divmod(tokens, chunk_tokens)
            _read(stack, build(spec, amounts), [chunk_tokens] * whole + [rest] * (rest > 0))
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


def _read(stack: LayerStack, method: Attention, chunks: Sequence[int]) -> None:
    config, total, first = stack.config, sum(chunks), stack.layers.start
    heads = config.q_heads, config.kv_heads, config.head_dim
    state = method.new_state(StateSpec(1, *heads, total, stack.device, stack.dtype, layer=first))
    k_BGSD = torch.empty(1, config.kv_heads, 0, config.head_dim, dtype=stack.dtype, device=stack.device)
    v_BGSD = k_BGSD

    def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        nonlocal k_BGSD, v_BGSD
        if layer != first:
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
