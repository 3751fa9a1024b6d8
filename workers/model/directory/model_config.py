"""Reads config.json, the shape of a Llama-family decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .json_files import ModelError, read_json, read_json_or_empty
from .layer_shares import LayerShare, balanced
from .quantised import quantised_form
from .text_part import text_config
from .tokenizer_files import end_tokens

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
}
"""transformers' `model_type` → architecture."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Shape = tuple[int, ...]

OVERRIDES = frozenset({"rope_theta", "max_position_embeddings"})
"""Keys of config.json that a deployment may override."""

_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "factors": ("factors",),
}
"""Keys that each rope type needs. `factors`, one divisor per frequency, is how GGUF stores llama3 scaling."""

_SPLIT_TOKENS = 512
"""Tokens per row of the LM head."""
_SPLIT_KEYS = 5_700
"""Keys of each query: half of 131,072, times 0.087, `dpxa`'s share of dense attention's time."""


@dataclass(frozen=True)
class RopeConfig:
    """scaling always has a `rope_type`."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})

    @property
    def kind(self) -> str:
        return str(self.scaling["rope_type"])


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`positions` bounds a prompt with its answer. `sliding_window` is None after `read_config`."""

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

    def split(self, stages: int) -> tuple[LayerShare, ...]:
        """Share the layers so that the slowest stage is fastest. Cuts may be within layers.

        Costs are multiply-adds per token of a long prompt. The last layer needs no output, and the last stage
        runs the LM head once per 512 tokens. Raises ModelError for more stages than layers.
        """
        most = self.layers
        if not 1 <= stages <= most:
            raise ModelError(f"{most} layers cannot be split over {stages} stages: use 1 to {most}")
        attention = self.attention_matrices + self.macs_per_pair * _SPLIT_KEYS
        costs = [attention, self.mlp_matrices] * self.layers
        costs[-2:] = self.qkv_matrices + self.vocab * self.hidden // _SPLIT_TOKENS, 0
        return balanced(tuple(costs), stages)

    def of_rank(self, ranks: int) -> ModelConfig:
        """Describe one of `ranks` parts of every layer. Raises ModelError unless each has whole key/value
        heads and as many MLP columns."""
        for count, what in ((self.kv_heads, "key/value heads"), (self.intermediate, "MLP columns")):
            if count % ranks:
                raise ModelError(
                    f"decode.tensor_parallel: {ranks} ranks cannot share the model's {count} {what} equally"
                )
        return replace(
            self,
            q_heads=self.q_heads // ranks,
            kv_heads=self.kv_heads // ranks,
            intermediate=self.intermediate // ranks,
        )

    def matrix_widths(self, ranks: int = 1) -> tuple[int, ...]:
        """Return the inputs of a rank's matrices. Raises ModelError as `of_rank`."""
        part = self.of_rank(ranks)
        return self.hidden, part.intermediate, part.q_heads * self.head_dim

    @property
    def macs_per_pair(self) -> int:
        """Multiply-adds of a layer's attention for each query and key."""
        return 2 * self.q_heads * self.head_dim

    @property
    def attention_matrices(self) -> int:
        """Numbers in a layer's attention matrices, which are a token's multiply-adds."""
        return self.qkv_matrices + self.hidden * self.head_dim * self.q_heads

    @property
    def qkv_matrices(self) -> int:
        return self.hidden * self.head_dim * (self.q_heads + 2 * self.kv_heads)

    @property
    def mlp_matrices(self) -> int:
        return 3 * self.hidden * self.intermediate

    def weights(
        self, layers: int, mlps: int | None = None, *, embedding: bool = True, head: bool = True
    ) -> int:
        """Count the numbers in `layers` attentions, `mlps` MLPs (None: as many) and ends."""
        attention, mlp = (sum(map(math.prod, shapes.values())) for shapes in self._halves())
        if self.qk_norm:  # its scales are loaded once for each head
            attention += (self.q_heads + self.kv_heads - 2) * self.head_dim
        tables = 1 if embedding and head and self.tied_embeddings else embedding + head
        halves = layers * attention + (layers if mlps is None else mlps) * mlp
        return halves + (tables * self.vocab + head) * self.hidden

    def shapes(self) -> dict[str, Shape]:
        """Return all tensors' shapes by Hugging Face's names, without a tied head."""
        table = {EMBEDDING: (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        head = {} if self.tied_embeddings else {HEAD: (self.vocab, self.hidden)}
        attention, mlp = self._halves()
        layer, numbers = attention | mlp, range(self.layers)
        layers = {f"model.layers.{number}.{name}": layer[name] for number in numbers for name in layer}
        return {**table, **head, **layers}

    def _halves(self) -> tuple[dict[str, Shape], dict[str, Shape]]:
        hidden, inner = self.hidden, self.intermediate
        attention: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
        for name, heads in (("q", self.q_heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            rows = heads * self.head_dim
            attention |= _linear(f"self_attn.{name}_proj", rows, hidden, self.qkv_bias)
            if self.qk_norm and name != "v":
                attention[f"self_attn.{name}_norm.weight"] = (self.head_dim,)
        attention |= _linear("self_attn.o_proj", hidden, self.q_heads * self.head_dim, self.o_bias)
        mlp: dict[str, Shape] = {"post_attention_layernorm.weight": (hidden,)}
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            mlp |= _linear(f"mlp.{name}_proj", rows, columns, self.mlp_bias)
        return attention, mlp

    def kv_values(self, layers: int) -> int:
        """Count the numbers in one token's K and V."""
        return 2 * layers * self.kv_heads * self.head_dim


def _linear(module: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{module}.weight": (rows, columns)}
    return weight | {f"{module}.bias": (rows,)} if bias else weight


def read_config(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read config.json, and end tokens from all files that name some.

    Args:
        overrides: Values for keys of OVERRIDES.

    Raises:
        ModelError: A file or key is missing, or our decoder would compute something else.
    """
    raw = text_config(read_json(Path(directory) / "config.json"))
    extra = dict(overrides or {})
    for key in extra:
        if key not in OVERRIDES:
            raise ModelError(f"model override {key!r} is unknown; known: {', '.join(sorted(OVERRIDES))}")
    architecture = _architecture(raw)
    rope = _rope(raw, extra)
    _refuse_unscaled(extra, raw, rope)
    raw = {**raw, **extra}
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"activation {raw['hidden_act']!r} is not supported, only 'silu'")
    quantised_form(Path(directory), raw)
    heads, hidden = _positive_int(raw, "num_attention_heads"), _positive_int(raw, "hidden_size")
    default_dim = 128 if architecture in ("Qwen3ForCausalLM", "SeedOssForCausalLM") else hidden // heads
    config = ModelConfig(
        architecture=architecture,
        layers=_positive_int(raw, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_positive_int(raw, "intermediate_size"),
        q_heads=heads,
        kv_heads=_positive_int(raw, "num_key_value_heads", heads),
        head_dim=_positive_int(raw, "head_dim", default_dim),
        vocab=_positive_int(raw, "vocab_size"),
        positions=_positions(raw, rope, extra),
        rms_eps=_number("config.json", "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        **_biases(raw, architecture),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_ids=_eos_ids(Path(directory), raw),
    )
    _refuse_uneven_heads(config)
    _refuse_sliding_window(raw, config)
    _refuse_dual_chunks(raw, config)
    return config


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or [ARCHITECTURES.get(str(raw.get("model_type")), raw.get("model_type"))]
    if not isinstance(named, list):
        raise ModelError(f"config.json: architectures = {named!r} is not a list")
    if named[0] not in ARCHITECTURES.values():
        raise ModelError(
            f"architecture {named[0]!r} is not supported; known: {', '.join(ARCHITECTURES.values())}"
        )
    return str(named[0])


def _positive_int(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} = {value!r} is not a positive whole number")
    return value


def _number(where: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{where}: {key} = {value!r} is not a number above 0")
    return float(value)


def _rope(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> RopeConfig:
    given = _rope_keys(raw)
    kind = str(given["rope_type"])
    if kind not in _ROPE_KEYS or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"rope scaling {kind!r} ({given}) is not supported; known: {', '.join(_ROPE_KEYS)}")
    _refuse_partial(given, raw)
    key = "original_max_position_embeddings"
    if key in _ROPE_KEYS[kind]:
        trained = raw.get(key) or raw.get("max_position_embeddings")
        scaled_from = given.setdefault(key, trained)
        if raw.get(key) not in (None, scaled_from):
            raise ModelError(
                f"config.json says {key} = {raw[key]}, but {scaled_from} in its rope scaling: leave one"
            )
    missing = [key for key in _ROPE_KEYS[kind] if given.get(key) is None]
    if missing:
        raise ModelError(f"rope scaling {kind!r} lacks {', '.join(missing)} in config.json")
    for key in _ROPE_KEYS[kind]:
        for number in given[key] if isinstance(given[key], list) else [given[key]]:
            _number(f"rope scaling {kind!r}", key, number)
    theta = overrides.get("rope_theta", given.get("rope_theta"))
    theta = 10_000.0 if theta is None else _number("config.json", "rope_theta", theta)
    if theta <= 1.0:
        raise ModelError(f"rope_theta = {theta} must be above 1")
    return RopeConfig(theta, _without_theta(given))


def _rope_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Unite `rope_parameters` of transformers 5 with the older keys. Contradictions are refused."""
    new, old = (_scaling_keys(raw, key) for key in ("rope_parameters", "rope_scaling"))
    top = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    if new and old and _without_theta(new) != _without_theta(old):
        raise ModelError(
            f"config.json has rope_parameters ({new['rope_type']}) and another rope_scaling "
            f"({old['rope_type']}): put the scaling into rope_parameters, beside its rope_theta, and delete "
            "rope_scaling"
        )
    thetas = [keys["rope_theta"] for keys in (new, old, top) if "rope_theta" in keys]
    if any(theta != thetas[0] for theta in thetas[1:]):
        raise ModelError(f"config.json has several rope_theta, {thetas}: leave the right one")
    return {"rope_type": "default", **top, **old, **new}


def _scaling_keys(raw: Mapping[str, Any], section: str) -> dict[str, Any]:
    given = raw.get(section) or {}
    if not isinstance(given, dict):
        raise ModelError(f"config.json: {section} = {given!r} is not a section of keys")
    keys = {key: value for key, value in given.items() if value is not None}
    return {"rope_type": keys.pop("type", "default"), **keys} if keys else {}


def _without_theta(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != "rope_theta"}


def _refuse_partial(given: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    part = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    part = 1.0 if part is None else _number("config.json", "partial_rotary_factor", part)
    if given.get("mscale") or part != 1.0:
        raise ModelError(f"rope scaling with mscale or a partial rotary factor is not supported: {given}")


def _positions(raw: Mapping[str, Any], rope: RopeConfig, overrides: Mapping[str, Any]) -> int:
    """Count as vLLM does: YaRN reaches `factor` times as far as training, unless overridden."""
    given = _positive_int(raw, "max_position_embeddings")
    if rope.kind != "yarn" or "max_position_embeddings" in overrides:
        return given
    return int(rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"])


def _refuse_unscaled(overrides: Mapping[str, Any], raw: Mapping[str, Any], rope: RopeConfig) -> None:
    """More positions need a rope that was stretched to them: its scaling, or another rope_theta."""
    wanted = overrides.get("max_position_embeddings", 0)
    known = _positions(raw, rope, {}) if wanted else 0
    if wanted > known and rope.kind in ("default", "yarn") and "rope_theta" not in overrides:
        raise ModelError(
            f"model.max_position_embeddings (--max-model-len) = {wanted}, but the model has {known} "
            "positions: more need YaRN in config.json with a factor that reaches so far, or another "
            "model.rope_theta"
        )


def _biases(raw: Mapping[str, Any], architecture: str) -> dict[str, bool]:
    """Say which linear layers have biases. A missing key means what transformers takes it for."""
    seed = architecture == "SeedOssForCausalLM"
    attention, mlp = bool(raw.get("attention_bias", seed)), bool(raw.get("mlp_bias"))
    output = bool(raw.get("attention_out_bias")) if seed else attention
    fixed = {"Qwen2ForCausalLM": (True, False, False), "MistralForCausalLM": (False, False, False)}
    known = fixed.get(architecture, (attention, output, mlp and architecture != "Qwen3ForCausalLM"))
    for key, given, has in (("attention_bias", attention, known[0]), ("mlp_bias", mlp, known[2])):
        if given and not has:
            raise ModelError(f"config.json sets {key}, which {architecture} does not have: leave it out")
    return dict(zip(("qkv_bias", "o_bias", "mlp_bias"), known, strict=True))


def _refuse_uneven_heads(config: ModelConfig) -> None:
    if config.q_heads % config.kv_heads or config.head_dim % 2:
        raise ModelError(
            f"{config.q_heads} query heads on {config.kv_heads} key/value heads of dimension "
            f"{config.head_dim}: heads must divide evenly and the dimension must be even"
        )


def _refuse_sliding_window(raw: Mapping[str, Any], config: ModelConfig) -> None:
    """A missing key means what transformers takes it for."""
    qwen = config.architecture.startswith("Qwen")
    if qwen and not (raw.get("use_sliding_window", False) and _slides(raw, config.layers)):
        return
    assumed = 4096 if qwen or config.architecture == "MistralForCausalLM" else None
    window = raw.get("sliding_window", assumed)
    if isinstance(window, int) and window < config.positions:
        raise ModelError(
            f"sliding-window attention ({window} of {config.positions} positions) is not supported: use a "
            "model with full attention, or set max_position_embeddings to the window"
        )


def _slides(raw: Mapping[str, Any], layers: int) -> bool:
    named = raw.get("layer_types")
    return layers > raw.get("max_window_layers", 28) if named is None else "sliding_attention" in named


def _refuse_dual_chunks(raw: Mapping[str, Any], config: ModelConfig) -> None:
    """Up to one chunk's length this is plain attention."""
    chunks = raw.get("dual_chunk_attention_config")
    if not chunks:
        return
    size = _positive_int(chunks, "chunk_size") if isinstance(chunks, dict) else 0
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
