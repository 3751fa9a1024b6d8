"""One thin decoder for the Llama family, for any contiguous part of its layers. A part may begin and end
between a layer's attention and its MLP.

Shape suffixes: T tokens, C hidden size, H query heads, G key/value heads, X = H + 2 G, D head dimension,
V vocabulary.

The caller attends (`LayerAttention`): it knows where K/V live and which tokens belong to which prompt. So the
same loop (`LayerStack.run`) computes prefill chunks and batched decode steps. Everything between the matrix
products is one kernel each (`kernels/layers`), and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ....kernels.interface import Phase, no_phase
from ....kernels.layers.norm import LinearInput, add_norm
from ....kernels.layers.rope import HeadNorm, KVRows, rotate_and_store
from ..directory.json_files import ModelError
from ..directory.model_config import ModelConfig
from ..weights.projections import Fp8Linear, Linear
from ..weights.stack_weights import AttentionWeights, FeedForwardWeights, StackWeights
from .rope_angles import Rope

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q_THD, k_TGD, v_TGD) -> out_THD, for a text whose K and V nobody keeps. q and k are rotated,
and normalised where the model does so."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, as `rope_angles.py` lays them out."""


class LayerAttention(Protocol):
    """The caller's part of every layer: where K and V live, and how the queries attend to them. Layers go by
    their number in the model."""

    def kv_rows(self, layer: int) -> KVRows:
        """Where the rows' K and V are written to. Called before anything of the layer is launched."""

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor | None:
        """out_THD of the rotated queries, whose K and V are in `kv_rows` by now. Fewer rows than q_THD has
        mean: nothing after this layer needs the rows before them. None: nothing needs any row."""


@dataclass(frozen=True)
class AttentionCalls:
    """A `LayerAttention` of two functions."""

    kv_rows: Callable[[int], KVRows]
    attend: Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass
class Residual:
    """The residual stream between two products: hidden_TC, and what is still to be added to it. The next
    norm does that on its way."""

    hidden_TC: torch.Tensor
    update_TC: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """hidden_TC with everything added."""
        return self.hidden_TC if self.update_TC is None else self.hidden_TC + self.update_TC

    def keep_last(self, rows: int) -> None:
        """Drop all but the last `rows` rows."""
        first = len(self.hidden_TC) - rows
        if first:
            self.hidden_TC = self.hidden_TC[first:]
            self.update_TC = None if self.update_TC is None else self.update_TC[first:]


@dataclass(frozen=True)
class DecoderLayer:
    """One layer, or the half of it that this stack computes. attention, mlp_weights: None for a half that
    another stack computes."""

    number: int
    config: ModelConfig
    attention: AttentionWeights | None
    mlp_weights: FeedForwardWeights | None

    def qkv(self, residual: Residual, angles: Angles, kv: KVRows) -> torch.Tensor:
        """q_THD at its positions, normed where the model does so. K and V are written to `kv`."""
        weights, config = self._attention, self.config
        qkv_TO = weights.qkv(self._norm(residual, weights.input_norm_C, weights.qkv))
        qkv_TXD = qkv_TO.view(-1, config.q_heads + 2 * config.kv_heads, config.head_dim)
        norm = None if weights.qk_norm_JD is None else HeadNorm(weights.qk_norm_JD, config.rms_eps)
        return rotate_and_store(qkv_TXD, *angles, norm, kv)

    def attend_out(self, residual: Residual, out_THD: torch.Tensor) -> None:
        """Add the output projection of what attention found."""
        residual.hidden_TC = residual.total()
        residual.update_TC = self._attention.output(out_THD.flatten(1))

    def mlp(self, residual: Residual) -> None:
        """Add the MLP of the residual stream to it; nothing where another stack does that."""
        weights = self.mlp_weights
        if weights is not None:
            normed = self._norm(residual, weights.post_norm_C, weights.gate_up)
            residual.update_TC = weights.down(weights.gate_up.gated(normed))

    @property
    def output_weight_CO(self) -> torch.Tensor:
        """The output projection, heads side by side."""
        return self._attention.output.weight_OI

    @property
    def _attention(self) -> AttentionWeights:
        if self.attention is None:
            raise ModelError(f"this stack does not have the attention of layer {self.number}")
        return self.attention

    def _norm(self, residual: Residual, weight_C: torch.Tensor, taker: Linear | Fp8Linear) -> LinearInput:
        return norm_of(residual, weight_C, self.config.rms_eps, taker)


def norm_of(residual: Residual, weight_C: torch.Tensor, eps: float, taker: Linear | Fp8Linear) -> LinearInput:
    """The norm of the whole residual stream, in the form that `taker` takes. The stream has nothing left to
    be added then."""
    sum_TC, normed = add_norm(residual.hidden_TC, residual.update_TC, weight_C, eps, taker.quantised)
    residual.hidden_TC, residual.update_TC = sum_TC, None
    return normed


class LayerStack:
    """The attention of layers `layers` of a model, the feed-forward networks of layers `feeds`, and the
    embedding or the head where it has those ends.

    feeds: the same layers, unless told otherwise. It may begin with the layer before the first, whose
    attention another stack computes, and may leave out the last one.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        weights: StackWeights,
        dtype: torch.dtype,
        device: torch.device | str,
        feeds: range | None = None,
    ) -> None:
        feeds = layers if feeds is None else feeds
        if layers.step != 1 or not layers or layers.start < 0 or layers.stop > config.layers:
            raise ModelError(f"layers {layers} are not a contiguous part of the model's {config.layers}")
        before, after = layers.start - feeds.start, layers.stop - feeds.stop
        if feeds.step != 1 or feeds.start < 0 or before not in (0, 1) or after not in (0, 1):
            raise ModelError(f"feed-forward networks {feeds} do not go with the attention of layers {layers}")
        self.config = config
        self.layers = layers
        self.feeds = feeds
        self.dtype = dtype
        self.device = torch.device(device)
        self._weights = weights
        self._layers = [
            DecoderLayer(
                number,
                config,
                weights.attentions[number - layers.start] if number in layers else None,
                weights.feeds[number - feeds.start] if number in feeds else None,
            )
            for number in range(feeds.start if feeds else layers.start, layers.stop)
        ]
        self._rope = Rope(config.rope, config.head_dim, self.device)

    def layer(self, number: int) -> DecoderLayer:
        return self._layers[number - self._layers[0].number]

    @property
    def has_head(self) -> bool:
        return self._weights.head is not None

    @property
    def quantised(self) -> bool:
        """Whether its layers multiply in 8 bits."""
        return self._weights.attentions[0].qkv.quantised

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
        """`run` with K and V of each layer in fresh memory, which `attend` is given."""
        return self.run(hidden_TC, positions_T, _FreshKV(self, len(hidden_TC), attend), layers=layers)

    def run(
        self,
        hidden_TC: torch.Tensor,
        positions_T: torch.Tensor,
        attention: LayerAttention,
        *,
        layers: range | None = None,
        phase: Phase = no_phase,
    ) -> torch.Tensor:
        """The one loop over layers, of prefill stages, decode steps, recomputed blocks and calibration.

        Args:
            positions_T: absolute position of each row, in any order.
            attention: the caller's part of every layer.
            layers: some of the stack's layers; by default all.
            phase: times everything here as "projection". `attention` times itself.
        Returns: hidden_TC after the layers, of the rows that are still needed.
        """
        layers = self.layers if layers is None else layers
        with phase("projection"):
            angles, residual = self.angles(positions_T), Residual(hidden_TC)
            if layers.start == self.layers.start and self._layers[0].attention is None:
                self._layers[0].mlp(residual)  # its attention was computed by the stack before
        for layer in map(self.layer, layers):
            kv = attention.kv_rows(layer.number)
            with phase("projection"):
                q_THD = layer.qkv(residual, angles, kv)
            out_THD = attention.attend(layer.number, q_THD)
            if out_THD is None:
                break
            residual.keep_last(len(out_THD))
            with phase("projection"):
                layer.attend_out(residual, out_THD)
                layer.mlp(residual)
        with phase("projection"):
            return residual.total()

    def angles(self, positions_T: torch.Tensor) -> Angles:
        """The rotations of these positions, the same in all layers."""
        return self._rope.angles(positions_T.to(self.device))

    def compile_products(self) -> None:
        """Compile what products of many rows take, whichever numbers of rows it is that take it."""
        attention = self._weights.attentions[0]
        products = [attention.qkv, attention.output]
        if self._weights.feeds:
            products += [self._weights.feeds[0].gate_up, self._weights.feeds[0].down]
        for product in products:
            product.meet()

    def logits(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        """Next-token logits_TV, float32: pass only the rows that are sampled from."""
        if self._weights.head is None or self._weights.final_norm_C is None:
            raise ModelError("this stack has no LM head: only the last stage gives logits")
        head = self._weights.head
        normed = norm_of(Residual(hidden_TC), self._weights.final_norm_C, self.config.rms_eps, head)
        return head(normed).float()


class _FreshKV:
    """A `LayerAttention` whose K and V are in fresh memory for each layer."""

    def __init__(self, stack: LayerStack, rows: int, attend: Attend) -> None:
        self._stack, self._attend = stack, attend
        self._rows_T = torch.arange(rows, device=stack.device)
        self._shape = rows, stack.config.kv_heads, stack.config.head_dim
        self._kv: KVRows | None = None

    def kv_rows(self, layer: int) -> KVRows:
        stack = self._stack
        k_TGD, v_TGD = (torch.empty(self._shape, dtype=stack.dtype, device=stack.device) for _ in "kv")
        self._kv = KVRows(k_TGD, v_TGD, self._rows_T)
        return self._kv

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        assert self._kv is not None
        return self._attend(layer, q_THD, self._kv.k_RGD, self._kv.v_RGD)
