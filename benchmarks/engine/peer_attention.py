"""torch's attention over a chunk: SDPA's FlashAttention-2 and cuDNN. Shape suffixes: `kernels.interface`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deltafront.kernels.attention.dense import cpu_attend
from deltafront.kernels.attention.inputs import causal_tiles
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileMask
from deltafront.tests.numerics import assert_rows_close

Part = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, ...]]
"""(q, k, v, causal, scale) -> (out_BHTD, natural logsumexp of rows, …). causal: q and k start together."""


class Peer:
    """An attention backend that computes exact attention over every key by `attend_all`."""

    def __init__(self, attend_all: Callable[[AttentionInput], torch.Tensor]) -> None:
        self._attend_all = attend_all

    def new_state(self, spec: StateSpec) -> None:
        del spec

    def attend(self, x: AttentionInput, mask: TileMask | None, state: None, phase: Phase) -> torch.Tensor:
        del mask, state
        with phase("attention"):
            return self._attend_all(x)

    def computed_tiles(self, x: AttentionInput, mask: TileMask | None, state: None) -> torch.Tensor:
        del mask, state
        return torch.full((), causal_tiles(x), dtype=torch.float64, device=x.q_BHTD.device)


def fa2(x: AttentionInput) -> torch.Tensor:
    """Compute a chunk with FlashAttention-2, whose causal mask is aligned at the lower right, as a chunk
    needs (the mask `torch.nn.attention.bias.causal_lower_right`)."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = attend(x.q_BHTD, x.k_BGSD, x.v_BGSD, 0.0, True, False, scale=x.scale)[0]
    return out


def cudnn(x: AttentionInput) -> torch.Tensor:
    """Compute a chunk with cuDNN, whose causal mask is aligned at the upper left. So attend to the keys
    before the chunk without a mask, and to the chunk's own keys with it."""

    def part(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, ...]:
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        return tuple(attend(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2])

    return in_two_parts(x, part)


def in_two_parts(x: AttentionInput, part: Part) -> torch.Tensor:
    """Compute softmax(q kᵀ · scale) v by `part` over the keys before the chunk and over the chunk's keys, and
    combine both by their logsumexps."""
    q, start = x.q_BHTD, x.q_start
    own, own_lse = part(q, x.k_BGSD[:, :, start:], x.v_BGSD[:, :, start:], True, x.scale)[:2]
    if start == 0:
        return own
    before, before_lse = part(q, x.k_BGSD[:, :, :start], x.v_BGSD[:, :, :start], False, x.scale)[:2]
    share_BHT1 = torch.sigmoid(own_lse.float() - before_lse.float()).reshape(*q.shape[:3], 1)
    return torch.lerp(before, own, share_BHT1.to(own.dtype))


def check(device: torch.device) -> None:
    """Compare torch's kernels with our dense attention on a chunk from token 640. Raises AssertionError."""

    def draw(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(1, heads, rows, 128, device=device, dtype=torch.bfloat16)

    x = AttentionInput.of(draw(8, 384), draw(2, 1024), draw(2, 1024), q_start=640)
    expected_BHTD = cpu_attend(x)
    for attend in (fa2, cudnn):
        assert_rows_close(attend(x), expected_BHTD)


def fa2_backend(options: object) -> Peer:
    del options
    return Peer(fa2)


def cudnn_backend(options: object) -> Peer:
    del options
    return Peer(cudnn)
