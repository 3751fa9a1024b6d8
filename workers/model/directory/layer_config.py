"""Reads from config.json which layers have experts, linear attention, sliding windows, and no RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from deltafront.workers.model.directory.model_files import (
    ModelError,
    few,
    natural,
    positive_int,
    positive_number,
)
from deltafront.workers.model.families.family import Family

CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
"""The bias of a router's choice, in a layer."""
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_FLOAT32_BYTES = 4
_CHUNK = 64
_KEY_HEADS, _VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
_SCORES = "softmax", "sigmoid", "biased_softmax"
_GATED = "shared_expert_intermediate_size"


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """A mixture of experts: a router chooses `per_token` of `experts` small MLPs for each token.

    `kernels.experts.routing.Router` explains the fields that are not listed here.

    Args:
        sigmoid: True if the router's scores are sigmoids, and a bias is added to them to choose experts.
            Otherwise the scores are a softmax.
        biased_softmax: True if a bias is added to softmax scores to choose experts.
        shared_width: Width of the shared expert, an MLP for all tokens; 0: none.
        shared_gate: True if the shared expert's output is multiplied by the sigmoid of another linear layer.
        dense_layers: Layers with an ordinary MLP of width `dense_width`.
    """

    experts: int
    per_token: int
    normed: bool
    sigmoid: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_width: int = 0
    shared_gate: bool = False
    biased_softmax: bool = False

    @property
    def has_bias(self) -> bool:
        return self.sigmoid or self.biased_softmax

    @property
    def bias_shape(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of the router's bias in a checkpoint. ERNIE stores a matrix with one row."""
        shape = (1, self.experts) if self.biased_softmax else (self.experts,)
        return {CHOICE_BIAS: shape} if self.has_bias else {}

    def of_rank(self, ranks: int) -> MixtureConfig:
        """Return the configuration of each rank, if there are `ranks` tensor-parallel ranks."""
        shared, dense = self.shared_width // ranks, self.dense_width // ranks
        return replace(self, shared_width=shared, dense_width=dense)


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """Layers with gated delta networks instead of attention (Yang et al. 2024, arXiv 2412.06464).

    Args:
        layers: Indices of these layers, ascending.
        key_heads: Heads of queries and keys. Value head h uses key head h // (value_heads / key_heads).
        conv_width: Inputs that each output of the causal convolution is made of.
        fused: True if checkpoints store a key head's rows of q, k, v and the output gate together, and its
            rows of beta and decay.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    fused: bool = False

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The shape of a layer's convolution state: earlier inputs, and their channels."""
        return self.conv_width - 1, self.conv_channels

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    def state_bytes(self, number_bytes: int) -> int:
        """Count the bytes of one layer's state of one sequence. The recurrent state is float32, whatever the
        model's dtype."""
        conv, recurrent = math.prod(self.conv_shape), math.prod(self.recurrent_shape)
        return conv * number_bytes + recurrent * _FLOAT32_BYTES

    def of_rank(self, ranks: int) -> LinearConfig:
        """Return the sizes on each of `ranks` tensor-parallel ranks."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    @property
    def sections(self) -> dict[str, tuple[int, ...]]:
        """The rows of each part of the modules that have several: q, k, v and z, or beta and decay. Ranks
        share every part."""
        keys, values = self.key_heads * self.key_dim, self.value_width
        qkv = keys, keys, values
        gates = self.value_heads, self.value_heads
        return {"in_proj_qkvz": (*qkv, values), "in_proj_qkv": qkv, "conv1d": qkv, "in_proj_ba": gates}

    def rows_by_kind(self, module: str) -> list[int]:
        """Return the order of a fused matrix's rows in which all q come first, then all k, v and z, or all
        beta, then all decays. A checkpoint has them by key heads."""
        cuts = [0, *accumulate(rows // self.key_heads for rows in self.sections[module])]
        return [
            head * cuts[-1] + row
            for start, end in pairwise(cuts)
            for head in range(self.key_heads)
            for row in range(start, end)
        ]

    @property
    def modules(self) -> dict[str, int]:
        """The output channels of each linear layer before the convolution."""
        gates = {"in_proj_ba": 2 * self.value_heads}
        if self.fused:
            return {"in_proj_qkvz": self.conv_channels + self.value_width, **gates}
        gates = dict.fromkeys(("in_proj_b", "in_proj_a"), self.value_heads)
        return {"in_proj_qkv": self.conv_channels, "in_proj_z": self.value_width, **gates}

    @property
    def recurrent_macs(self) -> int:
        """Multiply-adds of convolution and recurrence per token, in chunks of 64 tokens (Yang et al. 2024,
        section 3.3): three products with the state, and two with the chunk's keys and values each."""
        state = 3 * self.key_dim * self.value_dim
        chunk = 2 * _CHUNK * (self.key_dim + self.value_dim)
        return self.value_heads * (state + chunk) + self.conv_channels * self.conv_width


def read_linear(raw: Mapping[str, Any], family: Family, layers: int) -> LinearConfig | None:
    """Read the linear-attention layers; None if the family has none. Raises ModelError for values that do not
    go together."""
    if _VALUE_HEADS not in family.implied:
        return None
    kinds = _linear_kinds(raw, layers)
    if _FULL not in kinds:
        raise ModelError(
            "config.json: all layers have linear attention, but a model needs one with a KV cache"
        )
    keys, values = positive_int(raw, _KEY_HEADS), positive_int(raw, _VALUE_HEADS)
    if values % keys:
        raise ModelError(f"config.json: {_VALUE_HEADS} = {values} is no multiple of {_KEY_HEADS} = {keys}")
    if (width := positive_int(raw, "linear_conv_kernel_dim")) < 2:
        raise ModelError(f"config.json: linear_conv_kernel_dim = {width} must be 2 or more")
    if _LINEAR not in kinds:
        return None
    return LinearConfig(
        layers=tuple(n for n, kind in enumerate(kinds) if kind == _LINEAR),
        key_heads=keys,
        value_heads=values,
        key_dim=positive_int(raw, "linear_key_head_dim"),
        value_dim=positive_int(raw, "linear_value_head_dim"),
        conv_width=width,
        fused=family.fuses_linear,
    )


def _linear_kinds(raw: Mapping[str, Any], layers: int) -> list[str]:
    """Return each layer's kind: those of `layer_types`, or full attention in every n-th layer."""
    if (named := raw.get("layer_types")) is None:
        every = positive_int(raw, "full_attention_interval", 4)
        return [_LINEAR if (n + 1) % every else _FULL for n in range(layers)]
    if not isinstance(named, list) or len(named) != layers or not {_LINEAR, _FULL}.issuperset(named):
        raise ModelError(f"config.json: layer_types = {named!r} must be {layers} of {_LINEAR} and {_FULL}")
    return named


def read_mixture(raw: Mapping[str, Any], layers: int) -> MixtureConfig | None:
    """Read the mixture of experts; None if the model has none. Raises ModelError for contradictory values."""
    if not raw.get("num_experts"):
        return None
    experts = few(raw, "num_experts", positive_int(raw, "num_experts"))
    chosen = positive_int(_uniform(raw, "num_experts_per_tok"), "num_experts_per_tok")
    groups, chosen_groups = positive_int(raw, "n_group", 1), positive_int(raw, "topk_group", 1)
    if experts % groups or (groups > 1 and experts < 2 * groups) or chosen_groups > groups:
        raise ModelError(
            f"config.json: n_group = {groups} and topk_group = {chosen_groups} cannot be groups of two or "
            f"more of {experts} experts"
        )
    if chosen > experts // groups * chosen_groups:
        among = (
            f"num_experts = {experts}" if groups == 1 else f"{chosen_groups} groups of {experts // groups}"
        )
        raise ModelError(f"config.json: num_experts_per_tok = {chosen} of {among}")
    scale = raw.get("routed_scaling_factor")
    if (scores := raw.get("scoring_func", "softmax")) not in _SCORES:
        raise ModelError(f"config.json: scoring_func = {scores!r} is not supported, only softmax and sigmoid")
    width, dense = positive_int(raw, "moe_intermediate_size"), _dense_layers(raw, layers)
    return MixtureConfig(
        experts=experts,
        per_token=chosen,
        normed=bool(raw["norm_topk_prob"]),
        sigmoid=scores == "sigmoid",
        biased_softmax=scores == "biased_softmax",
        groups=groups,
        chosen_groups=chosen_groups,
        scale=positive_number("config.json", "routed_scaling_factor", 1.0 if scale is None else scale),
        shared_width=width * natural(raw, "n_shared_experts") + natural(raw, _GATED),
        shared_gate=natural(raw, _GATED) > 0,
        dense_layers=dense,
        dense_width=positive_int(raw, "intermediate_size") if dense else 0,
    )


def _uniform(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the key's value. A list with a value for each layer must have equal values (Hunyuan)."""
    value = raw.get(key)
    if isinstance(value, list) and value:
        if any(other != value[0] for other in value):
            raise ModelError(f"config.json: {key} = {value!r} differs between layers, which is not supported")
        value = value[0]
    return {key: value}


def _dense_layers(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without experts: the first (DeepSeek, GLM), the last (ERNIE), or listed or periodic
    ones (Qwen)."""
    if (kinds := raw.get("mlp_layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not {"dense", "sparse"}.issuperset(kinds):
            raise ModelError(f"config.json: mlp_layer_types = {kinds!r} must be {layers} of dense and sparse")
        return tuple(n for n, kind in enumerate(kinds) if kind == "dense")
    first, every = natural(raw, "first_k_dense_replace"), positive_int(raw, "decoder_sparse_step", 1)
    listed = raw.get("mlp_only_layers") or ()
    if not isinstance(listed, list | tuple) or not all(type(layer) is int for layer in listed):
        raise ModelError(f"config.json: mlp_only_layers = {listed!r} is not a list of layers")
    end = raw.get("moe_layer_end_index")
    last = layers - 1 if end in (None, -1) else positive_int(raw, "moe_layer_end_index")
    return tuple(n for n in range(layers) if not first <= n <= last or n in listed or (n + 1) % every)


def read_windows(
    raw: Mapping[str, Any], family: Family, layers: int, positions: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window in tokens (including the query's own), and the layers that have it; None and
    () if there is none.

    Raises:
        ModelError: The model has a window, but its family in transformers has none.
    """
    window, implied = raw.get("sliding_window"), family.implied
    is_read = "use_sliding_window" in implied or "sliding_window" not in implied  # others ignore the key
    if not window or (is_read and not raw.get("use_sliding_window", True)):
        return None, ()
    if positive_int(raw, "sliding_window") >= positions:
        return None, ()
    if "sliding_window" not in implied:
        raise ModelError(
            f"sliding-window attention ({window} of {positions} positions) is not supported for "
            f"{family.architecture}: use a model with full attention, or set max_position_embeddings to the "
            "window"
        )
    sliding = tuple(n for n, kind in enumerate(_kinds(raw, family, layers)) if kind == _SLIDING)
    return (window, sliding) if sliding else (None, ())


def layers_without_windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """Return the full-attention layers by config.json, even if the sliding window exceeds the context."""
    return tuple(n for n, kind in enumerate(_kinds(raw, family, layers)) if kind == _FULL)


def _kinds(raw: Mapping[str, Any], family: Family, layers: int) -> list[str]:
    named = raw.get("layer_types") if "layer_types" in family.implied else None
    if named is not None:
        if not isinstance(named, list) or len(named) != layers or not {_SLIDING, _FULL}.issuperset(named):
            raise ModelError(
                f"config.json: layer_types = {named!r} must be {layers} of {_SLIDING} and {_FULL}"
            )
        return named
    every, first = raw.get("sliding_window_pattern"), raw.get("max_window_layers", 0)
    if every is not None and not isinstance(every, int):
        raise ModelError(f"config.json: sliding_window_pattern = {every!r}: name all layers in layer_types")
    slides = [n >= first and not (every and (n + 1) % every == 0) for n in range(layers)]
    return [_SLIDING if slide else _FULL for slide in slides]


def unrotated_layers(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without RoPE: those with a 0 in `no_rope_layers`, or every n-th layer."""
    named, every = raw.get("no_rope_layers"), raw.get("no_rope_layer_interval")
    if named is None:
        return () if every is None else tuple(n for n in range(layers) if (n + 1) % every == 0)
    if not isinstance(named, list) or len(named) < layers:
        raise ModelError(f"config.json: no_rope_layers = {named!r} does not name {layers} layers")
    return tuple(n for n in range(layers) if not named[n])
