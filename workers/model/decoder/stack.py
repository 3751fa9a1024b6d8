"""The decoder: runs any contiguous part of a model's layers.

The caller supplies attention (`LayerAttention`), because it knows where the KV cache is. Prefill, decode and
calibration share one loop over layers. Each step between GEMMs is one kernel, and nothing waits for the
device.

Shape suffixes also: X = H + 2 G.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from deltafront.kernels.gated_delta.chunked import CHUNK
from deltafront.kernels.gated_delta.layer import gated_delta
from deltafront.kernels.gated_delta.states import LayerStates, RowStates, SequenceStates
from deltafront.kernels.interface import Phase, no_phase
from deltafront.kernels.layers.fp8 import Fp8Rows
from deltafront.kernels.layers.norm import LinearInput, add_norm
from deltafront.kernels.layers.rope import HeadNorm, KVRows, rotate_and_store
from deltafront.workers.model.decoder.collectives import SINGLE_RANK, Collectives
from deltafront.workers.model.decoder.rope_angles import Rope
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights.layer_weights import (
    AttentionWeights,
    GatedDeltaWeights,
    LayerNorm,
    MlpWeights,
    Norm,
)
from deltafront.workers.model.weights.mixture_weights import MixtureWeights
from deltafront.workers.model.weights.projections import Fp8Linear, Linear
from deltafront.workers.model.weights.stack_weights import StackSpec, StackWeights

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q_THD, k_TGD, v_TGD) returns out_THD, for callers without a KV cache. q and k are rotated."""

Angles = tuple[torch.Tensor, torch.Tensor]


class LayerAttention(Protocol):
    """Computes the attention of a layer. `layer` is the layer's index in the model."""

    def kv_rows(self, layer: int) -> KVRows:
        """Return where to write the layer's new K and V. Called before the layer's first kernel launch."""

    def row_states(self, layer: int) -> RowStates:
        """Return the states of a layer with linear attention, which the rows read and write."""

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor | None:
        """Compute the attention of rotated queries. Their K and V have been written to `kv_rows`.

        Returns:
            out_THD of the rows that later layers need: the last rows, or `needed_T`; None if later layers
            need no row.
        """

    @property
    def needed_T(self) -> torch.Tensor | None:
        """Indices of the rows of `attend`'s last output, if they are not the last rows."""


def no_states(layer: int) -> RowStates:
    raise ModelError(f"layer {layer} has linear attention, for whose state this caller has no room")


@dataclass(frozen=True)
class AttentionCalls:
    kv_rows: Callable[[int], KVRows]
    attend: Callable[[int, torch.Tensor], torch.Tensor | None]
    row_states: Callable[[int], RowStates] = no_states
    needed_T: torch.Tensor | None = None


@dataclass
class Residual:
    """The residual stream, and the update that the next norm adds to it.

    With several ranks, each rank holds a part of the update. The next norm sums these parts.

    `normed` is the normed input of a layer's attention, kept for a gate of its output, or if attention and
    MLP run in parallel on one input.
    """

    hidden_TC: torch.Tensor
    update_TC: torch.Tensor | None = None
    collectives: Collectives = SINGLE_RANK
    normed: LinearInput | None = None

    def total(self) -> torch.Tensor:
        if self.update_TC is None:
            return self.hidden_TC
        return self.hidden_TC + self.collectives.sum(self.update_TC)

    def narrow(self, rows: int, needed_T: torch.Tensor | None) -> None:
        """Keep the rows `needed_T`; None: the last `rows` rows."""
        if rows == len(self.hidden_TC):
            return
        kept = slice(len(self.hidden_TC) - rows, None) if needed_T is None else needed_T
        self.hidden_TC = self.hidden_TC[kept]
        self.update_TC = None if self.update_TC is None else self.update_TC[kept]
        self.normed = None if self.normed is None else rows_of(self.normed, kept)


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer. If another stack computes its attention or its MLP, those weights are None."""

    number: int
    config: ModelConfig
    attention: AttentionWeights | GatedDeltaWeights | None
    mlp_weights: MlpWeights | MixtureWeights | None
    collectives: Collectives = SINGLE_RANK

    def qkv(self, residual: Residual, angles: Angles, kv: KVRows) -> torch.Tensor:
        """Compute q, k and v from the normed residual. Returns rotated q_THD, and writes K and V to `kv`."""
        weights, config = self._attention, self.config
        qkv_TO = self._projected(residual, weights)
        if config.qk_norm_all_heads and weights.qk_norm_JD is not None:
            _norm_all_heads(qkv_TO, weights.qk_norm_JD.flatten(), config, self.collectives)
            return self._rotated(qkv_TO, angles, None, kv)
        norm = None if weights.qk_norm_JD is None else HeadNorm(weights.qk_norm_JD, config.rms_eps)
        q_THD, scale_D = self._rotated(qkv_TO, angles, norm, kv), weights.q_scale_D
        return q_THD if scale_D is None else (q_THD * scale_D).to(q_THD.dtype)

    def _projected(self, residual: Residual, weights: AttentionWeights) -> torch.Tensor:
        normed = norm_of(residual, weights.input_norm, self.config.rms_eps, weights.qkv.quantised)
        if self.config.parallel or weights.gate is not None:
            residual.normed = normed
        return weights.qkv(normed)

    def _rotated(
        self, qkv_TO: torch.Tensor, angles: Angles, norm: HeadNorm | None, kv: KVRows
    ) -> torch.Tensor:
        config = self.config
        qkv_TXD = qkv_TO.view(-1, config.q_heads + 2 * config.kv_heads, config.head_dim)
        return rotate_and_store(qkv_TXD, *angles, norm, kv)

    @property
    def is_linear(self) -> bool:
        return isinstance(self.attention, GatedDeltaWeights)

    def linear_attention(self, residual: Residual, rows: RowStates) -> None:
        """Compute linear attention from the normed residual, and write the states in `rows`."""
        weights = self.attention
        assert isinstance(weights, GatedDeltaWeights)
        normed = norm_of(residual, weights.input_norm, self.config.rms_eps, quantised=False)
        assert isinstance(normed, torch.Tensor)
        ba_TJ = F.linear(normed, weights.ba_JC)
        out_TO = gated_delta(weights.qkvz(normed), ba_TJ, weights.delta, rows)
        self._update(residual, weights.output(out_TO), None)

    def attend_out(self, residual: Residual, out_THD: torch.Tensor) -> None:
        residual.hidden_TC = residual.total()
        update_TC = self._attention.output(self._gated(residual, out_THD.flatten(1)))
        self._update(residual, update_TC, self._attention.output_norm_C)

    def _gated(self, residual: Residual, out_TO: torch.Tensor) -> torch.Tensor:
        """Multiply the output of attention by its gate, if it has one."""
        gate, normed = self._attention.gate, residual.normed
        if gate is None:
            return out_TO
        assert normed is not None, "`_projected` keeps it for a gate"
        residual.normed = normed if self.config.parallel else None
        return out_TO * gate(normed).sigmoid()

    def mlp(self, residual: Residual) -> None:
        weights, eps = self.mlp_weights, self.config.rms_eps
        if isinstance(weights, MixtureWeights):
            normed = norm_of(residual, weights.input_norm_C, eps, quantised=False)
            assert isinstance(normed, torch.Tensor)
            self._update(residual, weights(normed), weights.output_norm_C)
        elif weights is not None:
            shared, residual.normed = residual.normed, None
            if shared is not None and residual.update_TC is not None:
                residual.update_TC = residual.update_TC + weights.down(self._active(weights, shared))
                return
            normed = norm_of(residual, weights.input_norm, eps, weights.gate_up.quantised)
            self._update(residual, weights.down(self._active(weights, normed)), weights.output_norm_C)

    def _active(self, weights: MlpWeights, normed: LinearInput) -> LinearInput:
        up = weights.gate_up
        if weights.activation is not None:
            return up.activated(normed, weights.activation)
        activate = {"silu": up.gated, "gelu_pytorch_tanh": up.gelu_gated, "relu2": up.squared}
        return activate[self.config.activation](normed)

    def _update(self, residual: Residual, update_TC: torch.Tensor, weight_C: torch.Tensor | None) -> None:
        """Store the output of attention or MLP for the next norm to add. If weight_C is given (a norm after
        attention or MLP), instead all-reduce the output, norm it, and add it to the residual now."""
        if weight_C is None:
            residual.update_TC = update_TC
            return
        whole_TC = self.collectives.sum(update_TC)
        _same, normed_TC = add_norm(whole_TC, None, weight_C, self.config.rms_eps, fp8=False)
        assert isinstance(normed_TC, torch.Tensor)
        residual.hidden_TC, residual.update_TC = residual.hidden_TC + normed_TC, None

    @property
    def output_weight_CO(self) -> torch.Tensor:
        return self._held.output.weight_OI

    @property
    def _attention(self) -> AttentionWeights:
        if isinstance(weights := self._held, GatedDeltaWeights):
            raise ModelError(
                f"layer {self.number} has linear attention, without queries and keys to attend to"
            )
        return weights

    @property
    def _held(self) -> AttentionWeights | GatedDeltaWeights:
        if self.attention is None:
            raise ModelError(f"this stack does not have the attention of layer {self.number}")
        return self.attention


def _products(weights: AttentionWeights | GatedDeltaWeights) -> list[Linear | Fp8Linear]:
    if isinstance(weights, GatedDeltaWeights):
        return [weights.qkvz, weights.output]
    return [weights.qkv, weights.output, *([] if weights.gate is None else [weights.gate])]


def rows_of(rows: LinearInput, kept: slice | torch.Tensor) -> LinearInput:
    if isinstance(rows, torch.Tensor):
        return rows[kept]
    return Fp8Rows(rows.values_TI[kept], rows.scale_T1[kept])


def _norm_all_heads(
    qkv_TO: torch.Tensor, weight_O: torch.Tensor, config: ModelConfig, collectives: Collectives
) -> None:
    """Norm q and k in place, each over all of its heads, including those on other ranks."""
    widths = [heads * config.head_dim for heads in (config.q_heads, config.kv_heads)]
    parts = torch.split(qkv_TO[:, : sum(widths)], widths, dim=1), torch.split(weight_O, widths)
    if collectives.ranks > 1:
        squares = [part_TO.float().square().mean(1) for part_TO in parts[0]]
        size_XT1 = (collectives.sum(torch.stack(squares)) / collectives.ranks + config.rms_eps).rsqrt()[
            ..., None
        ]
        for part_TO, part_O, size_T1 in zip(*parts, size_XT1, strict=True):
            part_TO.copy_(part_TO.float() * size_T1 * part_O)
        return
    for part_TO, part_O in zip(*parts, strict=True):
        _same, normed_TO = add_norm(part_TO, None, part_O, config.rms_eps, fp8=False)
        assert isinstance(normed_TO, torch.Tensor)
        part_TO.copy_(normed_TO)


def norm_of(residual: Residual, norm: Norm | None, eps: float, quantised: bool) -> LinearInput:
    """Add the update to the residual, and return the normed residual, quantised if `quantised`. If there is
    no norm, return the residual itself."""
    if norm is None or isinstance(norm, LayerNorm):
        residual.hidden_TC, residual.update_TC = residual.total(), None
        return residual.hidden_TC if norm is None else norm(residual.hidden_TC, eps, quantised)
    sum_TC, normed = residual.collectives.add_norm(
        residual.hidden_TC, residual.update_TC, norm, eps, quantised
    )
    residual.hidden_TC, residual.update_TC = sum_TC, None
    return normed


class LayerStack:
    """Consecutive layers of a model, with the embedding on the first stage and the output head on the last.

    A stage may begin with the MLP of the layer before `layers`, and end without the MLP of its last layer.
    With several tensor-parallel ranks, the stack has a part of every layer, and `config` has this rank's
    numbers of heads and MLP columns. Every rank has complete hidden states and logits.
    """

    def __init__(
        self, spec: StackSpec, weights: StackWeights, collectives: Collectives = SINGLE_RANK
    ) -> None:
        layers, mlps = spec.layers, spec.share.mlps
        if layers.step != 1 or not layers or layers.start < 0 or layers.stop > spec.config.layers:
            raise ModelError(f"layers {layers} are not a contiguous part of the model's {spec.config.layers}")
        before, after = layers.start - mlps.start, layers.stop - mlps.stop
        if mlps.step != 1 or mlps.start < 0 or before not in (0, 1) or after not in (0, 1):
            raise ModelError(f"MLPs of layers {mlps} do not go with the attention of layers {layers}")
        if spec.config.parallel and layers != mlps:
            raise ModelError(f"layers {layers} cannot be cut within: attention and MLP have one input")
        self.config = config = spec.config.of_rank(spec.ranks)
        self.collectives = collectives
        self.layers = layers
        self.mlps = mlps
        self.dtype = spec.dtype
        self.device = spec.device
        self._weights = weights
        self._layers = [
            DecoderLayer(
                number,
                config,
                weights.attentions[number - layers.start] if number in layers else None,
                weights.mlps[number - mlps.start] if number in mlps else None,
                collectives,
            )
            for number in range(mlps.start if mlps else layers.start, layers.stop)
        ]
        self._rope, self._window_rope = (
            Rope(
                rope,
                config.head_dim,
                self.device,
                rotary_dim=config.rotary_dim,
                scale=config.attention_scale,
            )
            for rope in (config.rope, config.window_rope or config.rope)
        )

    def sinks(self, layer: int) -> torch.Tensor | None:
        """Return the layer's attention sinks (`AttentionInput.sink_H`)."""
        weights = self._weights.attentions[layer - self.layers.start]
        return weights.sink_H if isinstance(weights, AttentionWeights) else None

    def layer(self, number: int) -> DecoderLayer:
        return self._layers[number - self._layers[0].number]

    @property
    def has_head(self) -> bool:
        return self._weights.head is not None

    @property
    def quantised(self) -> bool:
        first = self._weights.attentions[0]
        return (first.qkv if isinstance(first, AttentionWeights) else first.qkvz).quantised

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return hidden_TC of token ids. The caller must check that they are below the vocabulary's size."""
        if self._weights.embedding_VC is None:
            raise ModelError("this stack has no embedding: only the first stage embeds tokens")
        hidden_TC = F.embedding(ids_T.to(self.device, torch.int64), self._weights.embedding_VC)
        scale = self.config.embedding_scale
        return hidden_TC if scale == 1.0 else hidden_TC * scale

    def forward(
        self,
        hidden_TC: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        layers: range | None = None,
        row_states: Callable[[int], RowStates] | None = None,
    ) -> torch.Tensor:
        """Run layers without a KV cache. `attend` gets each layer's rotated q, k and v.

        Args:
            row_states: States of layers with linear attention; None: the rows are a sequence from its start.

        Raises:
            ModelError: Rows that are no sequence from its start need states.
        """
        shape = len(hidden_TC), self.config.kv_heads, self.config.head_dim
        rows_T = torch.arange(len(hidden_TC), device=self.device)
        fresh: dict[int, KVRows] = {}

        def kv_rows(layer: int) -> KVRows:
            k_TGD, v_TGD = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in "kv")
            fresh[layer] = KVRows(k_TGD, v_TGD, rows_T)
            return fresh[layer]

        def attended(layer: int, q_THD: torch.Tensor) -> torch.Tensor:
            kv = fresh.pop(layer)
            return attend(layer, q_THD, kv.k_RGD, kv.v_RGD)

        def states(layer: int) -> SequenceStates:
            if positions_T.tolist() != list(range(len(hidden_TC))):
                raise ModelError(
                    f"layer {layer} has linear attention: rows after a sequence's start need states"
                )
            return SequenceStates(self.fresh_states(1), 0, ((len(hidden_TC), 0),))

        calls = AttentionCalls(kv_rows, attended, row_states or states)
        return self.run(hidden_TC, positions_T, calls, layers=layers)

    def fresh_states(self, slots: int) -> LayerStates:
        """Return states of a layer with linear attention before a sequence's first row: zeros."""
        if (linear := self.config.linear) is None:
            raise ModelError("no layer of this model has linear attention")
        return LayerStates(
            torch.zeros((slots, *linear.conv_shape), dtype=self.dtype, device=self.device),
            torch.zeros((slots, *linear.recurrent_shape), dtype=torch.float32, device=self.device),
        )

    def run(
        self,
        hidden_TC: torch.Tensor,
        positions_T: torch.Tensor,
        attention: LayerAttention,
        *,
        layers: range | None = None,
        phase: Phase = no_phase,
    ) -> torch.Tensor:
        """Run layers on hidden states.

        Args:
            positions_T: Each row's absolute position, in any order.
            layers: The layers to run; None: all of the stack.
            phase: Times all work outside attention as "projection", and with it linear attention. `attention`
                times itself.

        Returns:
            hidden_TC of the rows that later layers or logits need.
        """
        layers = self.layers if layers is None else layers
        with phase("projection"):
            residual, angles_of = Residual(hidden_TC, None, self.collectives), self._angles(positions_T)
            grown_T11 = self._rope.query_scale(positions_T.to(self.device))
            if layers.start == self.layers.start and self._layers[0].attention is None:
                self._layers[0].mlp(residual)  # the previous stage has computed this layer's attention
        for layer in map(self.layer, layers):
            if layer.is_linear:
                rows = attention.row_states(layer.number)
                with phase("projection"):
                    layer.linear_attention(residual, rows)
                    layer.mlp(residual)
                continue
            kv = attention.kv_rows(layer.number)
            with phase("projection"):
                q_THD = layer.qkv(residual, angles_of(layer.number), kv)
                q_THD = q_THD if grown_T11 is None else q_THD * grown_T11.to(q_THD.dtype)
            out_THD = attention.attend(layer.number, q_THD)
            if out_THD is None:
                break
            residual.narrow(len(out_THD), attention.needed_T)
            with phase("projection"):
                layer.attend_out(residual, out_THD)
                layer.mlp(residual)
        with phase("projection"):
            return residual.total()

    def _angles(self, positions_T: torch.Tensor) -> Callable[[int], Angles]:
        config, positions_T = self.config, positions_T.to(self.device)
        angles, own = self._rope.angles(positions_T), dict[int, Angles]()
        if config.window_rope is not None:
            own |= dict.fromkeys(config.window_layers, self._window_rope.angles(positions_T))
        if config.unrotated_layers:
            own |= dict.fromkeys(config.unrotated_layers, self._rope.unrotated(angles))
        return lambda layer: own.get(layer, angles)

    def compile_gemms(self) -> None:
        products: list[Linear | Fp8Linear | MixtureWeights] = []
        for attention in {type(one): one for one in self._weights.attentions}.values():
            products += _products(attention)
        for mlp in {type(mlp): mlp for mlp in self._weights.mlps}.values():
            products += [mlp] if isinstance(mlp, MixtureWeights) else [mlp.gate_up, mlp.down]
        for product in products:
            product.compile()

        self._warm_linear_attention()

    def _warm_linear_attention(self) -> None:
        """Run linear attention once on a GPU, which compiles its kernels for any number of rows."""
        weights = next((one for one in self._weights.attentions if isinstance(one, GatedDeltaWeights)), None)
        if weights is None or self.device.type != "cuda":
            return
        rows = SequenceStates(self.fresh_states(1), 0, ((CHUNK, 0),))
        hidden_TC = torch.zeros(CHUNK, self.config.hidden, dtype=self.dtype, device=self.device)
        gated_delta(weights.qkvz(hidden_TC), F.linear(hidden_TC, weights.ba_JC), weights.delta, rows)

    def logits(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        """Return float32 logits_TV."""
        if self._weights.head is None or self._weights.final_norm is None:
            raise ModelError("this stack has no LM head: only the last stage gives logits")
        head = self._weights.head
        normed = norm_of(Residual(hidden_TC), self._weights.final_norm, self.config.rms_eps, head.quantised)
        logits_TV = self.collectives.gather(head(normed))[:, : self.config.vocab].float()
        scale = self.config.logit_scale
        return logits_TV if scale == 1.0 else logits_TV * scale
