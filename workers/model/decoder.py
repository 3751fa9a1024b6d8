"""One thin decoder for the Llama family, for any contiguous range of its layers.

Shape suffixes: T tokens, C hidden size, H query heads, G key/value heads, J = H + G, X = H + 2 G, O = X × D
(H × D where attention comes out),
D head dimension, I intermediate size, V vocabulary.

Attention is not in here: `attend(layer, q, k, v)` is given by the caller, who knows where K/V live and
which tokens belong to which prompt. So the same stack runs prefill chunks and batched decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ..settings import ModelSpec
from .config import ModelConfig, ModelError, read_config
from .rope import Rope, rotate
from .store import adapter_directory, model_directory
from .weights import LayerWeights, StackWeights, read_stack

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(absolute layer, q_THD, k_TGD, v_TGD) -> out_THD. q and k are rotated (and normalised where the
model does so); the caller stores k and v before or while it attends."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, as `rope.py` lays them out."""


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
        return self._weights.head is not None

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
        layers: range | None = None,
    ) -> torch.Tensor:
        """hidden_TC after this stack's layers, or some of them. positions_T: absolute position of each row,
        in any order.

        A prefill stage takes the same steps one by one, since it does more between them.
        """
        angles = self.angles(positions_T)
        for layer in self.layers if layers is None else layers:
            qk_TJD, v_TGD = self.project(layer, hidden_TC)
            q_THD, k_TGD = self.rotate(qk_TJD, angles)
            hidden_TC = self.add_attention(layer, hidden_TC, attend(layer, q_THD, k_TGD, v_TGD))
            hidden_TC = self.feed_forward(layer, hidden_TC)
        return hidden_TC

    def angles(self, positions_T: torch.Tensor) -> Angles:
        """What `rotate` needs, for all layers alike."""
        return self._rope.angles(positions_T.to(self.device))

    def project(self, layer: int, hidden_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """qk_TJD (query heads, then key heads, not rotated yet) and v_TGD."""
        weights = self._layer(layer)
        qkv_TO = weights.qkv(self._norm(hidden_TC, weights.input_norm_C))
        heads, kv_heads, dim = self.config.q_heads, self.config.kv_heads, self.config.head_dim
        qkv_TXD = qkv_TO.view(-1, heads + 2 * kv_heads, dim)
        qk_TJD, v_TGD = qkv_TXD[:, : heads + kv_heads], qkv_TXD[:, heads + kv_heads :]
        if weights.qk_norm_JD is not None:
            qk_TJD = F.rms_norm(qk_TJD, (dim,), None, self.config.rms_eps) * weights.qk_norm_JD
        return qk_TJD, v_TGD

    def rotate(self, qk_TJD: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """q_THD and k_TGD at their positions."""
        qk_TJD = rotate(qk_TJD, *angles)
        return qk_TJD[:, : self.config.q_heads], qk_TJD[:, self.config.q_heads :]

    def add_attention(self, layer: int, hidden_TC: torch.Tensor, out_THD: torch.Tensor) -> torch.Tensor:
        """hidden_TC plus what attention found."""
        return hidden_TC + self._layer(layer).output(out_THD.flatten(1))

    def output_weight(self, layer: int) -> torch.Tensor:
        """weight_CO of the projection of what attention found, heads side by side."""
        return self._layer(layer).output.weight_OI

    def feed_forward(self, layer: int, hidden_TC: torch.Tensor) -> torch.Tensor:
        """hidden_TC plus the layer's feed-forward network of it."""
        weights = self._layer(layer)
        gate_TI, up_TI = weights.gate_up(self._norm(hidden_TC, weights.post_norm_C)).chunk(2, dim=-1)
        return hidden_TC + weights.down(F.silu(gate_TI) * up_TI)

    def logits(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        """Next-token logits_TV, float32: pass only the rows that are sampled from."""
        if self._weights.head is None or self._weights.final_norm_C is None:
            raise ModelError("this stack has no LM head: only the last stage gives logits")
        return self._weights.head(self._norm(hidden_TC, self._weights.final_norm_C)).float()

    def _layer(self, layer: int) -> LayerWeights:
        return self._weights.layers[layer - self.layers.start]

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


def load_model(model: ModelSpec, device: torch.device | str, stage: int = 0, stages: int = 1) -> LayerStack:
    """The share of one of `stages` stages of a model: all of it, unless told otherwise.

    Raises ModelError for a model that cannot be loaded or split so, ValueError for an unknown dtype.
    """
    directory = model_directory(model.path)
    config = read_config(directory, model.overrides)
    return load_stack(
        directory,
        config,
        config.split(stages)[stage],
        embedding=stage == 0,
        head=stage == stages - 1,
        dtype=torch_dtype(model),
        device=device,
        adapter=None if model.adapter is None else adapter_directory(model.adapter),
    )


def torch_dtype(model: ModelSpec) -> torch.dtype:
    """Raises ValueError for a name that is none of the dtypes we compute in."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if model.dtype not in known:
        raise ValueError(f"model dtype {model.dtype!r} is unknown; known: {', '.join(known)}")
    return known[model.dtype]
