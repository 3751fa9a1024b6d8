"""Prefills a text densely, in one chunk, and calls a hook with each layer's attention inputs."""

from collections.abc import Callable, Sequence

import torch

from deltafront.kernels.build import build
from deltafront.kernels.interface import Attention, AttentionInput, StateSpec
from deltafront.kernels.methods import method_spec
from deltafront.workers.model.decoder.stack import LayerStack

AttentionHook = Callable[[int, AttentionInput], torch.Tensor | None]
"""hook(layer, x) returns out_BHTD to replace the output of dense attention, or None."""


def embedded(stack: LayerStack, ids: Sequence[int]) -> torch.Tensor:
    return stack.embed(torch.tensor(ids, dtype=torch.int64, device=stack.device))


@torch.inference_mode()
def read_densely(
    stack: LayerStack, hidden_TC: torch.Tensor, hook: AttentionHook, layers: range | None = None
) -> torch.Tensor:
    """Run `layers` (None: all) on hidden_TC with dense attention, and return their output. Sliding windows
    apply."""
    dense = build(method_spec("dense"), windows=stack.config.windows)

    def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        qkv = (rows.transpose(0, 1)[None].contiguous() for rows in (q_THD, k_TGD, v_TGD))
        x = AttentionInput.of(*qkv, sink_H=stack.sinks(layer))
        replaced_BHTD = hook(layer, x)
        out_BHTD = attended(dense, x, layer) if replaced_BHTD is None else replaced_BHTD
        return out_BHTD[0].transpose(0, 1)

    return stack.forward(hidden_TC, torch.arange(len(hidden_TC), device=stack.device), attend, layers)


def attended(method: Attention, x: AttentionInput, layer: int) -> torch.Tensor:
    """Return the method's attention output, out_BHTD, for a prompt in one chunk."""
    out_BHTD, _coverage = method.attend(x, method.new_state(state_spec(x, layer)))
    return out_BHTD


def state_spec(x: AttentionInput, layer: int) -> StateSpec:
    batch, groups, tokens, dim = x.k_BGSD.shape
    heads, device, dtype = x.q_BHTD.shape[1], x.q_BHTD.device, x.q_BHTD.dtype
    return StateSpec(batch, heads, groups, dim, tokens, device=device, dtype=dtype, layer=layer)
