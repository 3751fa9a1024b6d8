"""A decoder's sizes and features, and values that follow from them: tensors' shapes, and stages' layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.workers.model.directory.layer_config import LinearConfig, MixtureConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import RopeConfig
from deltafront.workers.model.layer_shares import LayerShare, balanced

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LINEAR = "linear_attn"
"""The module of a layer's gated delta network."""

SHARED, SHARED_GATE = "mlp.shared_experts", "mlp.shared_gate"
"""Names of a layer's shared expert and of its gate."""

Shape = tuple[int, ...]
XIELU = "alpha_p", "alpha_n", "beta", "eps"
"""The parameters of a layer's xIELU activation, in module mlp.act_fn."""

_SPLIT_TOKENS = 512
"""`split` assumes that the output head runs once per this many tokens."""
_SPLIT_KEYS = 5_700
"""`split` assumes that a query attends to this many keys: half of 131,072, times 0.087, the share of dense
attention's time that `dpxa` takes."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's sizes and features. The fields after `eos_ids` have defaults for families without them.

    Args:
        intermediate: Width of an MLP, or of each expert.
        positions: The maximum context length, in tokens of prompt and answer.
        sliding_window: Number of tokens that a query in `window_layers` attends to, including its own; None:
            no layer has a window.
        norms: The layer's norms: before attention and MLP, after them, or both.
        qk_norm_all_heads: True if QK norm is over all heads together, not per head.
        fused_qkv, fused_gate_up: True if checkpoints store these matrices as one tensor.
        activation: SiLU, GELU or experts' `clamped_swiglu` with a gate, or ReLU², GELU or xIELU without.
        rotary_dim: Number of first channels of a head that are rotated; None: all.
        interleaved_rope: True if channel 2 f is rotated with channel 2 f + 1.
        unrotated_layers: Layers whose q and k are not rotated.
        embedding_scale, logit_scale: Factors of embeddings and logits.
        attention_scale: Factor of attention scores, in addition to head_dim ** -0.5.
        mixture: The experts of all layers except its `dense_layers`; None: no layer has experts.
        window_rope: The RoPE of `window_layers`, if it differs from `rope`.
        norm_offset: A number to add to the weights of all norms.
        layer_norms: True if the norms before attention and MLP, and the last norm, are LayerNorms.
        norm_bias: True if these norms have a bias.
        parallel: True if a layer's MLP has the same input as its attention.
        qk_norm_after_rope: True if QK norm comes after RoPE.
        attention_gate: True if the output of attention is multiplied by a gate of its input.
        attention_sinks: True if each query head has an attention sink (`kernels.interface.AttentionInput`).
        router_bias: True if the router's logits have a bias.
        linear: The layers with gated delta networks instead of attention; None: all layers have attention.
        fused_q_gate: True if checkpoints store each query head's rows of q, then those of its gate, in
            q_proj.
        rolling_buffer: As in `ModelSpec`.
        head_padding: The last channels of a head, which are zero and in no checkpoint.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    rms_eps: float
    rope: RopeConfig
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_ids: tuple[int, ...] = ()
    norms: Literal["before", "after", "both"] = "before"
    qk_norm_all_heads: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    activation: Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu", "relu2", "ungated_gelu", "xielu"] = (
        "silu"
    )
    rotary_dim: int | None = None
    interleaved_rope: bool = False
    unrotated_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float = 1.0
    mixture: MixtureConfig | None = None
    window_layers: tuple[int, ...] = ()
    window_rope: RopeConfig | None = None
    norm_offset: float = 0.0
    layer_norms: bool = False
    norm_bias: bool = False
    parallel: bool = False
    qk_norm_after_rope: bool = False
    attention_gate: bool = False
    attention_sinks: bool = False
    router_bias: bool = False
    linear: LinearConfig | None = None
    fused_q_gate: bool = False
    rolling_buffer: bool = False
    head_padding: int = 0

    def split(self, stages: int) -> tuple[LayerShare, ...]:
        """Split the layers over pipeline stages so that the slowest stage is as fast as possible. A cut may
        be inside a layer.

        Costs are multiply-adds per token of a long prompt. The last layer counts only with its QKV
        projection, unless its attention is linear, and the output head runs once per 512 tokens. Raises
        ModelError if there are more stages than layers.
        """
        most = self.layers
        if not 1 <= stages <= most:
            raise ModelError(f"{most} layers cannot be split over {stages} stages: use 1 to {most}")
        costs: list[int] = []
        for n in range(self.layers):
            keys, kind = self.windows.get(n, _SPLIT_KEYS), self.of_layer(n)
            costs += kind.attention_macs + kind.macs_per_pair * keys, kind.mlp_macs
        if self.layers - 1 not in self.linear_layers:
            costs[-2:] = self.qkv_matrices, 0
        costs[-2] += self.vocab * self.hidden // _SPLIT_TOKENS
        if self.parallel:  # attention and MLP have the same input: cut only between layers
            costs = [cost for pair in zip(costs[::2], costs[1::2], strict=True) for cost in (sum(pair), 0)]
        return balanced(tuple(costs), stages)

    def of_rank(self, ranks: int) -> ModelConfig:
        """Return the configuration of each rank, if there are `ranks` tensor-parallel ranks.

        Raises ModelError unless the heads of keys and values, those of linear attention's keys, and MLP
        columns divide evenly over ranks.
        """
        shared = [(self.kv_heads, "key/value heads"), *((width, "MLP columns") for width in self.mlp_widths)]
        if self.linear is not None:
            shared.append((self.linear.key_heads, "heads of linear attention's keys"))
        for count, what in shared:
            if count % ranks:
                raise ModelError(
                    f"decode.tensor_parallel: {ranks} ranks cannot share the model's {count} {what} equally"
                )
        return replace(
            self,
            q_heads=self.q_heads // ranks,
            kv_heads=self.kv_heads // ranks,
            intermediate=self.intermediate // ranks,
            mixture=None if self.mixture is None else self.mixture.of_rank(ranks),
            linear=None if self.linear is None else self.linear.of_rank(ranks),
        )

    def of_layer(self, layer: int) -> ModelConfig:
        """Return a configuration in which all layers are like this one."""
        mixture, linear, width = self.mixture, self.linear, self.intermediate
        if mixture is not None and layer in mixture.dense_layers:
            width, mixture = mixture.dense_width, None
        if linear is not None:
            linear = replace(linear, layers=tuple(range(self.layers))) if layer in linear.layers else None
        if (mixture, linear) == (self.mixture, self.linear):
            return self
        return replace(self, mixture=mixture, intermediate=width, linear=linear)

    def kinds(self, layers: range) -> list[tuple[ModelConfig, int]]:
        """Return each kind of layer (a configuration from `of_layer`) among `layers`, with its number of
        layers."""
        dense = () if self.mixture is None else self.mixture.dense_layers
        alike: dict[tuple[bool, bool], list[int]] = {}
        for n in layers:
            alike.setdefault((n in self.linear_layers, n in dense), []).append(n)
        return [(self.of_layer(numbers[0]), len(numbers)) for numbers in alike.values()]

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return () if self.linear is None else self.linear.layers

    def attention_layers(self, layers: range) -> tuple[int, ...]:
        """Return those of `layers` that have attention, and therefore K and V."""
        return tuple(n for n in layers if n not in self.linear_layers)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers with a state of fixed size beside the pages: linear attention's, or rolling buffers."""
        return self.window_layers if self.rolling_buffer else self.linear_layers

    def page_layers(self, layers: range) -> tuple[int, ...]:
        """Return those of `layers` whose memory is K and V of all tokens, in pages."""
        return tuple(n for n in layers if n not in self.state_layers)

    @property
    def kv_layers(self) -> int:
        """Number of layers whose K and V of all tokens are in pages."""
        return self.layers - len(self.state_layers)

    @property
    def rolling_tokens(self) -> int:
        """Tokens in a rolling buffer: the pages that a window can touch."""
        return ((self.sliding_window or 0) + 2 * PAGE_TOKENS - 2) // PAGE_TOKENS * PAGE_TOKENS

    def state_bytes(self, layers: range, number_bytes: int) -> int:
        """Count the bytes of one sequence's state in those of `layers` that have one."""
        own = sum(n in self.state_layers for n in layers)
        if self.linear is not None:
            return own * self.linear.state_bytes(number_bytes)
        return self.rolling_tokens * self.kv_bytes(own, number_bytes, int8=False)

    @property
    def exact_layers(self) -> tuple[int, ...]:
        """The layers to which no sparse method applies: those with sliding windows or linear attention."""
        return tuple(sorted({*self.window_layers, *self.linear_layers}))

    @property
    def of_linear_layers(self) -> LinearConfig | None:
        """The sizes of linear attention if all layers have it, as `of_layer` of such a layer says."""
        return self.linear if len(self.linear_layers) == self.layers else None

    def matrix_widths(self, ranks: int = 1) -> tuple[int, ...]:
        """Return the widths of a rank's matrices that FP8 needs in multiples of 16: their inputs, and the
        channels of linear attention's convolution. Other outputs follow. Raises ModelError as `of_rank`
        does."""
        part = self.of_rank(ranks)
        own = () if part.linear is None else (part.linear.value_width, part.linear.conv_channels)
        return self.hidden, *part.mlp_widths, part.q_heads * self.head_dim, *own

    @property
    def windows(self) -> dict[int, int]:
        """The sliding window in tokens, by layer. Layers without a window are left out."""
        return dict.fromkeys(self.window_layers, self.sliding_window or 0)

    @property
    def macs_per_pair(self) -> int:
        """Multiply-adds of a layer's attention per pair of query and key; 0 for linear attention."""
        return 0 if self.of_linear_layers else 2 * self.q_heads * self.head_dim

    @property
    def attention_matrices(self) -> int:
        """Number of parameters in a layer's attention matrices; also their multiply-adds per token.

        In a model with linear attention in some layers, these are the other layers' matrices. `of_layer`
        tells.
        """
        if (linear := self.of_linear_layers) is not None:
            return self.hidden * (sum(linear.modules.values()) + linear.value_width)
        return self.qkv_matrices + (1 + self.attention_gate) * self.hidden * self.head_dim * self.q_heads

    @property
    def attention_macs(self) -> int:
        """Multiply-adds of a layer's attention per token, without those per pair of query and key."""
        linear = self.of_linear_layers
        return self.attention_matrices + (0 if linear is None else linear.recurrent_macs)

    @property
    def qkv_matrices(self) -> int:
        return self.hidden * self.head_dim * (self.q_heads + 2 * self.kv_heads)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        others = (self.mixture.shared_width, self.mixture.dense_width) if self.mixture else ()
        return self.intermediate, *filter(None, others)

    @property
    def mlp_matrices(self) -> int:
        """Number of parameters in a layer's MLP matrices, without the router."""
        return self._mlp_numbers(sum(self.mlp_modules.values()))

    @property
    def mlp_macs(self) -> int:
        """Multiply-adds of a layer's MLP per token."""
        if (mixture := self.mixture) is None:
            return self.mlp_matrices
        width = mixture.per_token * self.intermediate + mixture.shared_width
        return self._mlp_numbers(width) + self.hidden * mixture.experts

    def _mlp_numbers(self, width: int) -> int:
        return (3 if self.is_gated else 2) * self.hidden * width

    @property
    def is_gated(self) -> bool:
        return self.activation in ("silu", "gelu_pytorch_tanh", "clamped_swiglu")

    def weights(
        self, layers: range, mlps: range | None = None, *, embedding: bool = True, head: bool = True
    ) -> int:
        """Count the parameters of the attention of `layers` and of the MLPs of `mlps` (None: the same
        layers).

        `embedding` adds the embedding, `head` the output head with its norm. A tied embedding counts once.
        """
        attention = sum(count * kind._attention_numbers for kind, count in self.kinds(layers))
        tables = 1 if embedding and head and self.tied_embeddings else embedding + head
        kinds = self.kinds(layers if mlps is None else mlps)
        halves = attention + sum(n * _numbers(kind.mlp_half()) for kind, n in kinds)
        return halves + (tables * self.vocab + head * (1 + self.norm_bias)) * self.hidden

    @property
    def _attention_numbers(self) -> int:
        numbers = _numbers(self.attention_half())
        if not self.qk_norm or self.qk_norm_all_heads or self.of_linear_layers:
            return numbers  # otherwise loading repeats the norm's weights for each head
        return numbers + (self.q_heads + self.kv_heads - 2 + self.qk_norm_after_rope) * self.head_dim

    @property
    def as_stored(self) -> ModelConfig:
        """The sizes that a checkpoint has: without padded heads."""
        return replace(self, head_dim=self.head_dim - self.head_padding, head_padding=0)

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of all tensors under a Llama checkpoint's names, without a tied output head."""
        if self.head_padding:
            return self.as_stored.shapes()
        table = {EMBEDDING: (self.vocab, self.hidden)} | self._norm("model.norm")
        head = {} if self.tied_embeddings else {HEAD: (self.vocab, self.hidden)}
        layers = {
            f"model.layers.{number}.{name}": shape
            for number in range(self.layers)
            for kind in (self.of_layer(number),)
            for half in (kind.attention_half(), kind.mlp_half())
            for name, shape in half.items()
        }
        return {**table, **head, **layers}

    @property
    def qkv_modules(self) -> dict[str, int]:
        """The output channels of each linear layer before attention."""
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        return {"qkv_proj": q + 2 * kv} if self.fused_qkv else {"q_proj": q, "k_proj": kv, "v_proj": kv}

    @property
    def gate_up_modules(self) -> dict[str, int]:
        """The linear layers before the activation, with their output width as a multiple of the MLP's
        width."""
        if self.fused_gate_up:
            return {"gate_up_proj": 2}
        return dict.fromkeys(("gate_proj", "up_proj") if self.is_gated else ("up_proj",), 1)

    @property
    def mlp_modules(self) -> dict[str, int]:
        """The MLP modules of a layer (experts, shared expert), with their widths."""
        if (mixture := self.mixture) is None:
            return {"mlp": self.intermediate}
        shared = {SHARED: mixture.shared_width} if mixture.shared_width else {}
        return {f"mlp.experts.{n}": self.intermediate for n in range(mixture.experts)} | shared

    def attention_half(self) -> dict[str, Shape]:
        """Return the shapes of a layer's attention, with norms. If layers differ, call it of `of_layer`."""
        linear = self.of_linear_layers
        return self._full_half() if linear is None else self._linear_half(linear)

    def _linear_half(self, linear: LinearConfig) -> dict[str, Shape]:
        half = self._norm("input_layernorm")
        for module, rows in linear.modules.items():
            half |= _linear(f"{LINEAR}.{module}", rows, self.hidden, bias=False)
        half[f"{LINEAR}.conv1d.weight"] = (linear.conv_channels, 1, linear.conv_width)
        half |= {f"{LINEAR}.{name}": (linear.value_heads,) for name in ("A_log", "dt_bias")}
        half[f"{LINEAR}.norm.weight"] = (linear.value_dim,)
        return half | _linear(f"{LINEAR}.out_proj", self.hidden, linear.value_width, bias=False)

    def _full_half(self) -> dict[str, Shape]:
        hidden, q = self.hidden, self.q_heads * self.head_dim
        attention = self._norms("input_layernorm", "self_attn.post_norm")
        for module, rows in self.qkv_modules.items():
            gate = q if self.fused_q_gate and module == "q_proj" else 0
            attention |= _linear(f"self_attn.{module}", rows + gate, hidden, self.qkv_bias)
        for name, heads in (("q", self.q_heads), ("k", self.kv_heads)) if self.qk_norm else ():
            width = heads * self.head_dim if self.qk_norm_all_heads else self.head_dim
            attention[f"self_attn.{name}_norm.weight"] = (width,)
        attention |= _linear("self_attn.o_proj", hidden, q, self.o_bias)
        if self.attention_gate and not self.fused_q_gate:
            attention |= _linear("self_attn.gate_proj", q, hidden, bias=False)
        return attention | ({"self_attn.sinks": (self.q_heads,)} if self.attention_sinks else {})

    def mlp_half(self) -> dict[str, Shape]:
        """Return the shapes of a layer's MLP or experts, with norms, as `attention_half` does."""
        hidden = self.hidden
        mlp = {} if self.parallel else self._norms("post_attention_layernorm", "mlp.post_norm")
        if self.activation == "xielu":
            mlp |= {f"mlp.act_fn.{name}": (1,) if "alpha" in name else () for name in XIELU}
        if self.mixture is not None:
            mlp |= _linear("mlp.gate", self.mixture.experts, hidden, self.router_bias)
            mlp |= self.mixture.bias_shape
            mlp |= _linear(SHARED_GATE, 1, hidden, bias=False) if self.mixture.shared_gate else {}
        for module, width in self.mlp_modules.items():
            for name, times in self.gate_up_modules.items():
                mlp |= _linear(f"{module}.{name}", times * width, hidden, self.mlp_bias)
            mlp |= _linear(f"{module}.down_proj", hidden, width, self.mlp_bias)
        return mlp

    def _norms(self, before: str, after: str) -> dict[str, Shape]:
        names = {"before": (before,), "after": (after,), "both": (before, after)}[self.norms]
        return {key: shape for name in names for key, shape in self._norm(name).items()}

    def _norm(self, module: str) -> dict[str, Shape]:
        weight: dict[str, Shape] = {f"{module}.weight": (self.hidden,)}
        return weight | ({f"{module}.bias": (self.hidden,)} if self.norm_bias else {})

    def kv_values(self, layers: int) -> int:
        """Count the elements of one token's K and V in `layers` layers."""
        return 2 * layers * self.kv_heads * self.head_dim

    def kv_bytes(self, layers: int, number_bytes: int, int8: bool) -> int:
        """Count the bytes of one token's K and V in `layers` layers. With `int8`, each head's K and V have a
        scale of one byte each."""
        values = self.kv_values(layers)
        return values + 2 * layers * self.kv_heads if int8 else values * number_bytes


def _numbers(shapes: Mapping[str, Shape]) -> int:
    return sum(map(math.prod, shapes.values()))


def _linear(module: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{module}.weight": (rows, columns)}
    return weight | {f"{module}.bias": (rows,)} if bias else weight
