"""Reads config.json: the shape of a decoder. `families` has the differences between families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deltafront.workers.model.directory.mixture_config import MixtureConfig, read_mixture
from deltafront.workers.model.directory.model_files import (
    ModelError,
    broken,
    few,
    positive_int,
    positive_number,
    read_json,
    read_json_or_empty,
)
from deltafront.workers.model.directory.quantised import quantised_form
from deltafront.workers.model.directory.rope_config import (
    RopeConfig,
    of_full_layers,
    positions,
    read_rope,
    refuse_unscaled,
    resolved,
    rotary_dim,
    window_rope,
)
from deltafront.workers.model.directory.text_part import text_config
from deltafront.workers.model.directory.tokenizer_files import end_tokens
from deltafront.workers.model.directory.window_config import read_windows
from deltafront.workers.model.families.family import OPTIONAL, Family
from deltafront.workers.model.family_registry import FAMILIES, family_of, unserved_features
from deltafront.workers.model.layer_shares import LayerShare, balanced

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

SHARED, CHOICE_BIAS = "mlp.shared_experts", "mlp.gate.e_score_correction_bias"
"""A layer's shared expert, and the bias of its router's choice."""

Shape = tuple[int, ...]

OVERRIDES = frozenset({"rope_theta", "max_position_embeddings"})
"""Keys of config.json that a deployment may override."""

_MISTRAL_7B = "LlamaForCausalLM", 32, 4096, 14_336, 8
_MISTRAL_WINDOW = 4096
"""Architecture, layers, widths and key/value heads of Mistral 7B v0.1's GGUF files, and its own window."""

_MULTIPLIERS = ("_multiplier", "_scaling")

_SPLIT_TOKENS = 512
"""Tokens for each row of the output head."""
_SPLIT_KEYS = 5_700
"""Keys that count for a query: half of 131,072, times the 0.087 of dense attention's time that `dpxa`
takes."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's sizes and features. The fields after `eos_ids` have defaults for families without them.

    Args:
        intermediate: Width of an MLP, or of each expert.
        positions: The most tokens of a prompt with its answer.
        sliding_window: Tokens that a row of `window_layers` sees, its own included; None: there are none.
        norms: Whether layers norm the inputs of attention and MLP, their outputs, or both.
        qk_norm_all_heads: q and k are normed over all their heads together.
        fused_qkv, fused_gate_up: Checkpoints have these as one tensor.
        activation: SiLU or GELU of a gate, or the square of ReLU without a gate.
        rotary_dim: How many channels of a head, the first ones, are rotated; None: all.
        interleaved_rope: Channel 2 f rotates with channel 2 f + 1.
        unrotated_layers: Layers whose q and k are not rotated.
        embedding_scale, logit_scale: Multiply embeddings and logits.
        attention_scale: Multiplies scores, beside head_dim ** -0.5.
        mixture: The layers' experts, except in its `dense_layers`; None: no MLP has experts.
        window_rope: The rope of `window_layers`, if it is another.
        norm_offset: Added to the weights of all norms.
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
    activation: Literal["silu", "relu2", "gelu_pytorch_tanh"] = "silu"
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

    def split(self, stages: int) -> tuple[LayerShare, ...]:
        """Share the layers over stages so that the slowest stage is fastest. Cuts may be within layers.

        Costs are multiply-adds per token of a long prompt. The last layer needs no output, and the last stage
        runs the output head once per 512 tokens. Raises ModelError if there are more stages than layers.
        """
        most = self.layers
        if not 1 <= stages <= most:
            raise ModelError(f"{most} layers cannot be split over {stages} stages: use 1 to {most}")
        costs: list[int] = []
        for n in range(self.layers):
            keys = self.windows.get(n, _SPLIT_KEYS)
            costs += self.attention_matrices + self.macs_per_pair * keys, self.of_layer(n).mlp_macs
        costs[-2:] = self.qkv_matrices + self.vocab * self.hidden // _SPLIT_TOKENS, 0
        return balanced(tuple(costs), stages)

    def of_rank(self, ranks: int) -> ModelConfig:
        """Return the part of every layer that each of `ranks` ranks has.

        Raises ModelError unless ranks can have equally many key/value heads and MLP columns.
        """
        shared = [(self.kv_heads, "key/value heads"), *((width, "MLP columns") for width in self.mlp_widths)]
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
        )

    def of_layer(self, layer: int) -> ModelConfig:
        """Return a model whose layers are all like this one."""
        if self.mixture is None or layer not in self.mixture.dense_layers:
            return self
        return replace(self, mixture=None, intermediate=self.mixture.dense_width)

    def kinds(self, layers: range) -> list[tuple[ModelConfig, int]]:
        """Return each kind of these layers, as from `of_layer`, and their number."""
        dense = [n for n in self.mixture.dense_layers if n in layers] if self.mixture else []
        return [(self, len(layers) - len(dense)), *((self.of_layer(n), len(dense)) for n in dense[:1])]

    def matrix_widths(self, ranks: int = 1) -> tuple[int, ...]:
        """Return the input widths of a rank's matrices. Raises ModelError as `of_rank`."""
        part = self.of_rank(ranks)
        return self.hidden, *part.mlp_widths, part.q_heads * self.head_dim

    @property
    def windows(self) -> dict[int, int]:
        """The number of tokens that a row sees, by layer. Layers that see all tokens are left out."""
        return dict.fromkeys(self.window_layers, self.sliding_window or 0)

    @property
    def macs_per_pair(self) -> int:
        """Multiply-adds of a layer's attention for each query and key."""
        return 2 * self.q_heads * self.head_dim

    @property
    def attention_matrices(self) -> int:
        """Parameters of a layer's attention matrices, which equal a token's multiply-adds."""
        return self.qkv_matrices + self.hidden * self.head_dim * self.q_heads

    @property
    def qkv_matrices(self) -> int:
        return self.hidden * self.head_dim * (self.q_heads + 2 * self.kv_heads)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        others = (self.mixture.shared_width, self.mixture.dense_width) if self.mixture else ()
        return self.intermediate, *filter(None, others)

    @property
    def mlp_matrices(self) -> int:
        """Parameters of a layer's MLP matrices, without the router's."""
        return self._mlp_numbers(sum(self.mlp_modules.values()))

    @property
    def wide_numbers(self) -> int:
        """Parameters of a layer that stay in float32: the router's, if it uses sigmoids."""
        mixture = self.mixture
        return mixture.experts * (self.hidden + 1) if mixture is not None and mixture.sigmoid else 0

    @property
    def mlp_macs(self) -> int:
        """Multiply-adds of a layer's MLP for each token."""
        if (mixture := self.mixture) is None:
            return self.mlp_matrices
        width = mixture.per_token * self.intermediate + mixture.shared_width
        return self._mlp_numbers(width) + self.hidden * mixture.experts

    def _mlp_numbers(self, width: int) -> int:
        return (3 if self.is_gated else 2) * self.hidden * width

    @property
    def is_gated(self) -> bool:
        return self.activation != "relu2"

    def weights(
        self, layers: range, mlps: range | None = None, *, embedding: bool = True, head: bool = True
    ) -> int:
        """Count the parameters of the attentions of `layers` and of the MLPs of `mlps` (None: the same
        layers).

        `embedding` and `head` add those of the embedding, and of the output head with its norm. A tied table
        counts once.
        """
        attention = _numbers(self._halves()[0])
        if self.qk_norm and not self.qk_norm_all_heads:  # its scales are loaded once for each head
            attention += (self.q_heads + self.kv_heads - 2) * self.head_dim
        tables = 1 if embedding and head and self.tied_embeddings else embedding + head
        kinds = self.kinds(layers if mlps is None else mlps)
        halves = len(layers) * attention + sum(n * _numbers(kind._halves()[1]) for kind, n in kinds if n)
        return halves + (tables * self.vocab + head) * self.hidden

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of all tensors by a Llama checkpoint's names, without a tied head."""
        table = {EMBEDDING: (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        head = {} if self.tied_embeddings else {HEAD: (self.vocab, self.hidden)}
        layers = {
            f"model.layers.{number}.{name}": shape
            for number in range(self.layers)
            for half in self.of_layer(number)._halves()
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
        """The linear layers before the activation, and each one's outputs as a multiple of the MLP's
        width."""
        if self.fused_gate_up:
            return {"gate_up_proj": 2}
        return dict.fromkeys(("gate_proj", "up_proj") if self.is_gated else ("up_proj",), 1)

    @property
    def mlp_modules(self) -> dict[str, int]:
        """A layer's modules that are MLPs, and their widths."""
        if (mixture := self.mixture) is None:
            return {"mlp": self.intermediate}
        shared = {SHARED: mixture.shared_width} if mixture.shared_width else {}
        return {f"mlp.experts.{n}": self.intermediate for n in range(mixture.experts)} | shared

    def _halves(self) -> tuple[dict[str, Shape], dict[str, Shape]]:
        hidden, q = self.hidden, self.q_heads * self.head_dim
        attention = self._norms("input_layernorm", "self_attn.post_norm")
        for module, rows in self.qkv_modules.items():
            attention |= _linear(f"self_attn.{module}", rows, hidden, self.qkv_bias)
        for name, heads in (("q", self.q_heads), ("k", self.kv_heads)) if self.qk_norm else ():
            width = heads * self.head_dim if self.qk_norm_all_heads else self.head_dim
            attention[f"self_attn.{name}_norm.weight"] = (width,)
        attention |= _linear("self_attn.o_proj", hidden, q, self.o_bias)
        mlp = self._norms("post_attention_layernorm", "mlp.post_norm")
        if self.mixture is not None:
            mlp |= _linear("mlp.gate", self.mixture.experts, hidden, bias=False)
            mlp |= {CHOICE_BIAS: (self.mixture.experts,)} if self.mixture.sigmoid else {}
        for module, width in self.mlp_modules.items():
            for name, times in self.gate_up_modules.items():
                mlp |= _linear(f"{module}.{name}", times * width, hidden, self.mlp_bias)
            mlp |= _linear(f"{module}.down_proj", hidden, width, self.mlp_bias)
        return attention, mlp

    def _norms(self, before: str, after: str) -> dict[str, Shape]:
        names = {"before": (before,), "after": (after,), "both": (before, after)}[self.norms]
        return {f"{name}.weight": (self.hidden,) for name in names}

    def kv_values(self, layers: int) -> int:
        """Count the elements of one token's K and V."""
        return 2 * layers * self.kv_heads * self.head_dim

    def kv_bytes(self, layers: int, number_bytes: int, int8: bool) -> int:
        """Count the bytes of one token's K and V. In 8 bits each row of a head has a scale of one byte."""
        values = self.kv_values(layers)
        return values + 2 * layers * self.kv_heads if int8 else values * number_bytes


def _numbers(shapes: Mapping[str, Shape]) -> int:
    return sum(map(math.prod, shapes.values()))


def _linear(module: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{module}.weight": (rows, columns)}
    return weight | {f"{module}.bias": (rows,)} if bias else weight


def read_config(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read config.json, and the end tokens that any file names.

    Args:
        overrides: Values for keys of OVERRIDES.

    Raises:
        ModelError: A file or key is missing, or our decoder would compute something else.
    """
    path = Path(directory) / "config.json"
    with broken(path):
        return _read_config(path.parent, dict(overrides or {}))


def _read_config(directory: Path, extra: dict[str, Any]) -> ModelConfig:
    raw = text_config(read_json(directory / "config.json"))
    for key in extra:
        if key not in OVERRIDES:
            raise ModelError(f"model override {key!r} is unknown; known: {', '.join(sorted(OVERRIDES))}")
    family = served_family(raw)
    given = family.own_config(raw)
    raw = of_full_layers(given, family)
    rope = read_rope(raw, extra, family)
    refuse_unscaled(extra, positions(raw, rope, {}))
    _refuse_unread(raw, family)
    quantised_form(directory, raw)
    heads, hidden = positive_int(raw, "num_attention_heads"), positive_int(raw, "hidden_size")
    head_dim = positive_int(raw, "head_dim", family.implied.get("head_dim", hidden // heads))
    rotated = rotary_dim(raw, head_dim)
    layers = few(raw, "num_hidden_layers", positive_int(raw, "num_hidden_layers"))
    mixture = read_mixture(raw, layers)
    reach, biased = positions(raw, rope, extra), bool(raw.get("attention_bias"))
    window, sliding = read_windows(raw, family, layers, reach)
    fields: dict[str, Any] = {
        "architecture": family.architecture,
        "layers": layers,
        "hidden": hidden,
        "intermediate": positive_int(raw, "moe_intermediate_size" if mixture else "intermediate_size"),
        "q_heads": heads,
        "kv_heads": positive_int(raw, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab": positive_int(raw, "vocab_size"),
        "positions": reach,
        "rope": resolved(rope, raw, reach),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": biased,
        "o_bias": bool(raw["attention_out_bias"]) if "attention_out_bias" in family.implied else biased,
        "mlp_bias": bool(raw.get("mlp_bias")),
        "eos_ids": _eos_ids(directory, raw),
        "activation": family.hidden_act,
        "rotary_dim": None if rotated == head_dim else rotated,
        "unrotated_layers": _unrotated(raw, layers),
        "mixture": mixture,
        "qk_norm": "use_qk_norm" in family.implied and bool(raw["use_qk_norm"]),
        "sliding_window": window,
        "window_layers": sliding,
        "window_rope": window_rope(given, rope, family) if sliding else None,
        **_multipliers(raw, head_dim),
    }
    if family.scales_by_width:
        fields["embedding_scale"] = hidden**0.5
    if family.rotates_windows_alone and sliding:
        fields["unrotated_layers"] = tuple(layer for layer in range(layers) if layer not in sliding)
    config = ModelConfig(**fields | dict(family.fixed))
    _refuse_uneven_heads(config)
    if mixture is not None and (config.mlp_bias or not config.is_gated):
        raise ModelError("experts with biases, or without a gate, are not supported")
    _refuse_dual_chunks(raw, config)
    return config


def lost_window_note(config: ModelConfig) -> str | None:
    """Return a line if this is Mistral 7B v0.1, or a model trained from it, without its windows.

    llama.cpp's converter writes it as a Llama, which has none. No other model has this shape and base.
    """
    shape = (config.architecture, config.layers, config.hidden, config.intermediate, config.kv_heads)
    if shape != _MISTRAL_7B or config.rope != RopeConfig(10_000.0) or config.positions <= _MISTRAL_WINDOW:
        return None
    return (
        f"this model has the numbers of Mistral 7B v0.1, whose layers have windows of {_MISTRAL_WINDOW} "
        "tokens, but names none, as its GGUF files do not: prompts beyond them get other answers than the "
        "original's. Its safetensors directory has its windows; "
        f"model.max_position_embeddings: {_MISTRAL_WINDOW} keeps within one"
    )


def served_family(raw: Mapping[str, Any]) -> Family:
    """Return the family of a language model's config.json. Raises ModelError if it is not served."""
    named = raw.get("architectures") or [raw.get("model_type")]
    if not isinstance(named, list):
        raise ModelError(f"config.json: architectures = {named!r} is not a list")
    family = family_of(raw)
    if family is None:
        features = ", ".join(unserved_features(raw))
        has = f" (it has {features})" if features else ""
        raise ModelError(f"architecture {named[0]!r} is not supported{has}; known: {', '.join(FAMILIES)}")
    return family


def _refuse_unread(raw: Mapping[str, Any], family: Family) -> None:
    for key, served in family.only.items():
        values = raw[key] if isinstance(raw[key], list) else [raw[key]]
        if odd := [value for value in values if value not in served]:
            raise ModelError(
                f"{family.architecture} with {key} = {odd[0]!r} is not supported, only with "
                f"{' or '.join(repr(value) for value in served if value is not None)} "
                f"(it has {', '.join(unserved_features(raw)) or 'something else'})"
            )
    act = raw.get("hidden_act", family.hidden_act)
    if act != family.hidden_act:
        raise ModelError(f"activation {act!r} is not supported, only {family.hidden_act!r}")
    if not raw.get("is_causal", True):
        raise ModelError(
            "config.json: is_causal is false, so rows attend to later tokens, as an embedding model's do. "
            "Only causal models are served"
        )
    fixed = {"attention_bias"} if "qkv_bias" in family.fixed else set()
    for key, inert in OPTIONAL.items():
        is_inert = raw.get(key) in (None, inert) or not (raw[key] or inert)
        if key not in family.implied.keys() | fixed and not is_inert:
            raise ModelError(
                f"config.json sets {key}, which {family.architecture} does not have: leave it out"
            )


def _unrotated(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without rope: zeros of a list, or the last of every few layers."""
    named, every = raw.get("no_rope_layers"), raw.get("no_rope_layer_interval")
    if named is None:
        return () if every is None else tuple(n for n in range(layers) if (n + 1) % every == 0)
    if not isinstance(named, list) or len(named) < layers:
        raise ModelError(f"config.json: no_rope_layers = {named!r} does not name {layers} layers")
    return tuple(n for n in range(layers) if not named[n])


def _multipliers(raw: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    """Read factors of embeddings, scores and logits.

    A factor of every residual update is the same as a residual that begins larger by its inverse, because
    RMSNorms divide by its size. Only their epsilon must grow with it.
    """
    given = {key: 1.0 if raw.get(key) is None else raw[key] for key in OPTIONAL if key.endswith(_MULTIPLIERS)}
    of = {key: positive_number("config.json", key, value) for key, value in given.items()}
    residual = of["residual_multiplier"]
    eps = positive_number("config.json", "rms_norm_eps", raw.get("rms_norm_eps", 1e-6))
    scores = 1.0 if raw.get("attention_multiplier") is None else of["attention_multiplier"] * head_dim**0.5
    if (divisor := raw.get("query_pre_attn_scalar")) is not None:
        scores = (head_dim / positive_number("config.json", "query_pre_attn_scalar", divisor)) ** 0.5
    return {
        "rms_eps": eps / residual**2,
        "embedding_scale": of["embedding_multiplier"] / residual,
        "attention_scale": scores,
        "logit_scale": 1.0 / of["logits_scaling"],
    }


def _refuse_uneven_heads(config: ModelConfig) -> None:
    if config.q_heads % config.kv_heads or config.head_dim % 2:
        raise ModelError(
            f"{config.q_heads} query heads on {config.kv_heads} key/value heads of dimension "
            f"{config.head_dim}: heads must divide evenly and the dimension must be even"
        )


def _refuse_dual_chunks(raw: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse attention by chunks, unless one chunk covers all positions, which is plain attention."""
    chunks = raw.get("dual_chunk_attention_config")
    if not chunks:
        return
    size = positive_int(chunks, "chunk_size") if isinstance(chunks, dict) else 0
    if size < config.positions:
        raise ModelError(
            f"dual_chunk_attention_config: attention by chunks, beyond {size} tokens, is not supported: set "
            f"model.max_position_embeddings to {size} or less"
        )


def _eos_ids(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    generation = read_json_or_empty(directory / "generation_config.json")
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id_) is int for id_ in ids):
        raise ModelError(f"{directory}: eos_token_id holds something else than token ids: {ids}")
    return tuple(dict.fromkeys([*ids, *end_tokens(directory)]))
