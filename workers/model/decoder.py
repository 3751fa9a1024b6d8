"""One thin decoder for the Llama family, for any contiguous range of its layers.

Shape suffixes: T tokens, C hidden size, H query heads, G key/value heads, J = H + G, D head dimension,
A = H × D, V vocabulary.

Attention is not in here: `attend(layer, q, k, v)` is given by the caller, who knows where K/V live and
which tokens belong to which prompt. So the same stack runs prefill chunks and batched decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ...kernels.interface import Phase, no_phase
from ..settings import ModelSpec
from .config import ModelConfig, ModelError, read_config
from .rope import Rope, rotate
from .store import resolve, resolve_adapter
from .weights import LayerWeights, StackWeights, read_stack

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(absolute layer, q_THD, k_TGD, v_TGD) -> out_THD. q and k are rotated (and normalised where the
model does so); the caller stores k and v before or while it attends."""


class LayerStack:
    """Layers `layers` of a model; `has_embedding` and `has_head` say which ends it also has."""

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        weights: StackWeights,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if layers.step != 1 or not layers or layers.start < 0 or layers.stop > config.layers:
            raise ModelError(f"layers {layers} are not a contiguous part of the model's {config.layers}")
        self.config = config
        self.layers = layers
        self.dtype = dtype
        self.device = torch.device(device)
        self._weights = weights
        self._rope = Rope(config.rope, config.head_dim, self.device)

    @property
    def has_embedding(self) -> bool:
        return self._weights.embedding_VC is not None

    @property
    def has_head(self) -> bool:
        return self._weights.head_VC is not None

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """hidden_TC of token ids (any integer dtype). Ids must be in range: CUDA cannot report it here."""
        if self._weights.embedding_VC is None:
            raise ModelError("this stack has no embedding: only the first stage embeds tokens")
        return F.embedding(ids_T.to(self.device, torch.int64), self._weights.embedding_VC)

    def forward(
        self,
        hidden_TC: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        phase: Phase = no_phase,
    ) -> torch.Tensor:
        """hidden_TC after this stack's layers. positions_T: absolute position of each row, any order.

        Everything but `attend` is marked phase("projection").
        """
        with phase("projection"):
            cos_T1F, sin_T1F = self._rope.angles(positions_T.to(self.device))
        for layer, weights in zip(self.layers, self._weights.layers, strict=True):
            with phase("projection"):
                qk_TJD, v_TGD = self._project(hidden_TC, weights)
                qk_TJD = rotate(qk_TJD, cos_T1F, sin_T1F)
            heads = self.config.q_heads
            out_THD = attend(layer, qk_TJD[:, :heads], qk_TJD[:, heads:], v_TGD)
            with phase("projection"):
                hidden_TC = hidden_TC + F.linear(out_THD.flatten(1), weights.output_CA)
                hidden_TC = hidden_TC + self._feed_forward(hidden_TC, weights)
        return hidden_TC

    def logits(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        """Next-token logits_TV, float32: pass only the rows that are sampled from."""
        if self._weights.head_VC is None or self._weights.final_norm_C is None:
            raise ModelError("this stack has no LM head: only the last stage gives logits")
        normed_TC = self._norm(hidden_TC, self._weights.final_norm_C)
        return F.linear(normed_TC, self._weights.head_VC).float()

    def _project(self, hidden_TC: torch.Tensor, weights: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """qk_TJD (query heads, then key heads, not rotated yet) and v_TGD."""
        normed_TC = self._norm(hidden_TC, weights.input_norm_C)
        qkv_TO = F.linear(normed_TC, weights.qkv_OC, weights.qkv_bias_O)
        heads, kv_heads, dim = self.config.q_heads, self.config.kv_heads, self.config.head_dim
        qkv_TXD = qkv_TO.view(-1, heads + 2 * kv_heads, dim)
        qk_TJD, v_TGD = qkv_TXD[:, : heads + kv_heads], qkv_TXD[:, heads + kv_heads :]
        if weights.qk_norm_JD is not None:
            qk_TJD = F.rms_norm(qk_TJD, (dim,), None, self.config.rms_eps) * weights.qk_norm_JD
        return qk_TJD, v_TGD

    def _feed_forward(self, hidden_TC: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        normed_TC = self._norm(hidden_TC, weights.post_norm_C)
        gate_TI, up_TI = F.linear(normed_TC, weights.gate_up_2IC).chunk(2, dim=-1)
        return F.linear(F.silu(gate_TI) * up_TI, weights.down_CI)

    def _norm(self, hidden_TC: torch.Tensor, weight_C: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_TC, (self.config.hidden,), weight_C, self.config.rms_eps)


def load_stack(
    directory: str | Path,
    config: ModelConfig,
    layers: range,
    *,
    embedding: bool,
    head: bool,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: str | Path | None = None,
) -> LayerStack:
    """Load a layer range of a model directory; see `read_stack` for what is read and what is refused."""
    target = torch.device(device)
    weights = read_stack(
        directory,
        config,
        layers,
        embedding=embedding,
        head=head,
        dtype=dtype,
        device=target,
        adapter=adapter,
    )
    return LayerStack(config, layers, weights, dtype, target)


def load_model(spec: ModelSpec, device: torch.device | str) -> LayerStack:
    """Every layer of a model, with embedding and head. Raises ModelError."""
    directory = resolve(spec.path)
    config = read_config(directory, spec.overrides)
    return load_stack(
        directory,
        config,
        range(config.layers),
        embedding=True,
        head=True,
        dtype=torch_dtype(spec),
        device=device,
        adapter=None if spec.adapter is None else resolve_adapter(spec.adapter),
    )


def torch_dtype(spec: ModelSpec) -> torch.dtype:
    """Raises ValueError for a name that is none of the dtypes we compute in."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if spec.dtype not in known:
        raise ValueError(f"model dtype {spec.dtype!r} is unknown; known: {', '.join(known)}")
    return known[spec.dtype]
