"""Reads config.json into a `ModelConfig`. `families` describes the differences between model families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltafront.kernels.constants import DECODE_HEAD_DIMS
from deltafront.workers.model.directory.layer_config import (
    layers_without_windows,
    read_linear,
    read_mixture,
    read_windows,
    unrotated_layers,
)
from deltafront.workers.model.directory.model_config import ModelConfig
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
    rescaled,
    resolved,
    rotary_dim,
    window_rope,
)
from deltafront.workers.model.directory.text_part import text_config
from deltafront.workers.model.directory.tokenizer_files import end_tokens
from deltafront.workers.model.families.family import OPTIONAL, Family
from deltafront.workers.model.family_registry import FAMILIES, family_of, unserved_features

OVERRIDES = frozenset({"rope_theta", "rope_scaling", "max_position_embeddings", "rolling_buffer"})
"""Keys of config.json that the service's configuration may override, and its own `rolling_buffer`."""

_MISTRAL_7B = "LlamaForCausalLM", 32, 4096, 14_336, 8
_MISTRAL_WINDOW = 4096
"""Architecture, layers, widths and KV heads of Mistral 7B v0.1's GGUF files, and the model's sliding
window."""

_MULTIPLIERS = ("_multiplier", "_scaling", "logit_scale")


def read_config(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read config.json, and the end-of-sequence tokens from all files that name some.

    Args:
        overrides: Values for the keys in OVERRIDES.

    Raises:
        ModelError: A file or key is missing, or the model has a feature that our decoder lacks.
    """
    path = Path(directory) / "config.json"
    with broken(path):
        raw = text_config(read_json(path))
        config = _parsed(raw, overrides or {})
        quantised_form(path.parent, raw)
        return replace(config, eos_ids=_eos_ids(path.parent, raw))


def _parsed(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> ModelConfig:
    """Parse a language model's config.json, without end-of-sequence tokens."""
    extra = dict(overrides)
    for key in extra:
        if key not in OVERRIDES:
            raise ModelError(f"model override {key!r} is unknown; known: {', '.join(sorted(OVERRIDES))}")
    family = served_family(raw)
    given = family.own_config(raw)
    raw = rescaled(of_full_layers(given, family), extra)
    rope = read_rope(raw, extra, family)
    refuse_unscaled(extra, positions(raw, rope, {}), family.architecture)
    _refuse_unread(raw, family)
    heads, hidden = positive_int(raw, "num_attention_heads"), positive_int(raw, "hidden_size")
    channels = positive_int(raw, "head_dim", family.implied.get("head_dim", hidden // heads))
    rotated = rotary_dim(raw, channels, family)
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
        "head_dim": channels,
        "vocab": positive_int(raw, "vocab_size"),
        "positions": reach,
        "rope": resolved(rope, raw, reach),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": biased,
        "o_bias": bool(raw["attention_out_bias"]) if "attention_out_bias" in family.implied else biased,
        "mlp_bias": bool(raw.get("mlp_bias")),
        "activation": family.hidden_act,
        "rotary_dim": None if rotated == channels else rotated,
        "unrotated_layers": unrotated_layers(raw, layers),
        "mixture": mixture,
        "linear": read_linear(raw, family, layers),
        "qk_norm": "use_qk_norm" in family.implied and bool(raw["use_qk_norm"]),
        "sliding_window": window,
        "window_layers": sliding,
        "window_rope": window_rope(given, rope, family) if sliding else None,
        "rolling_buffer": bool(extra.get("rolling_buffer")),
        **_multipliers(raw, channels),
    }
    if family.scales_by_width and raw.get("mup_enabled", True):
        fields["embedding_scale"] = hidden**0.5
    if family.rotates_windows_alone and raw.get("sliding_window"):
        fields["unrotated_layers"] = layers_without_windows(raw, family, layers)
    config = ModelConfig(**fields | dict(family.fixed))
    _refuse_uneven_heads(config)
    _refuse_combinations(config)
    _refuse_dual_chunks(raw, config)
    return _padded(config)


def _padded(config: ModelConfig) -> ModelConfig:
    """Pad heads whose size is between two that GPU kernels take.

    Heads with norms are left, because norms count channels; so are smaller heads, which no public model has.
    """
    small, *others = DECODE_HEAD_DIMS
    size = next((dim for dim in others if small < config.head_dim <= dim), config.head_dim)
    if size == config.head_dim or config.qk_norm:
        return config
    return replace(
        config,
        head_dim=size,
        head_padding=size - config.head_dim,
        rotary_dim=config.rotary_dim or config.head_dim,
        attention_scale=config.attention_scale * (size / config.head_dim) ** 0.5,
    )


def lost_window_note(config: ModelConfig) -> str | None:
    """Return a warning if this is Mistral 7B v0.1, or a fine-tuned version, without its sliding window.

    llama.cpp converts this model to a Llama, which has no window. It is recognised by its shape and RoPE
    base.
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
    """Return the model family of a config.json. Raises ModelError if the family is not supported."""
    named = raw.get("architectures") or [raw.get("model_type")]
    if not isinstance(named, list):
        raise ModelError(f"config.json: architectures = {named!r} is not a list")
    family = family_of(raw)
    if family is None:
        features = ", ".join(unserved_features(raw))
        has = f" (it has {features})" if features else " (no model family describes it)"
        raise ModelError(f"architecture {named[0]!r} is not supported{has}; known: {', '.join(FAMILIES)}")
    return family


def _refuse_unread(raw: Mapping[str, Any], family: Family) -> None:
    for key, served in family.only.items():
        values = raw[key] if isinstance(raw[key], list) else [raw[key]]
        if odd := [value for value in values if value not in served]:
            features = ", ".join(unserved_features(raw))
            raise ModelError(
                f"{family.architecture} with {key} = {odd[0]!r} is not supported, only with "
                + (" or ".join(repr(value) for value in served if value is not None) or "null")
                + (f" (it has {features})" if features else "")
            )
    for key in family.needs:
        if raw.get(key) is None:
            raise ModelError(f"config.json: {key} is missing, which {family.architecture} needs")
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


def _multipliers(raw: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    """Read the factors of embeddings, attention scores and logits.

    `residual_multiplier` scales every update of the residual. Dividing the embeddings by it instead has the
    same effect, because RMSNorms divide by the residual's size. Their epsilon must then be divided by its
    square.
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
        "logit_scale": of["logit_scale"] / of["logits_scaling"],
    }


def _refuse_uneven_heads(config: ModelConfig) -> None:
    if config.q_heads % config.kv_heads or config.head_dim % 2:
        raise ModelError(
            f"{config.q_heads} query heads on {config.kv_heads} key/value heads of dimension "
            f"{config.head_dim}: heads must divide evenly and the dimension must be even"
        )


def _refuse_combinations(config: ModelConfig) -> None:
    """Refuse features that the decoder cannot combine, which a family from outside may ask for."""
    if (mixture := config.mixture) is not None and (not config.is_gated or config.parallel):
        raise ModelError("experts without a gate, or in parallel layers, are not supported")
    if config.activation == "clamped_swiglu" and (
        mixture is None or mixture.dense_layers or mixture.shared_width
    ):
        raise ModelError("the activation clamped_swiglu is supported only for routed experts")
    if config.layer_norms and config.norms != "before":
        raise ModelError("LayerNorms after attention or MLP are not supported")
    if config.qk_norm_after_rope and config.qk_norm_all_heads:
        raise ModelError("QK norm over all heads after the rotation is not supported")
    if config.linear is not None and (config.parallel or config.norms != "before"):
        raise ModelError("linear attention is supported only with norms before attention and MLP")
    if config.rolling_buffer and not 0 < len(config.window_layers) < config.layers:
        raise ModelError(
            "model.rolling_buffer: set it to false, because only a model with sliding windows in some of its "
            "layers, and not in all, can have it"
        )
    if config.fused_q_gate and (config.fused_qkv or config.qkv_bias or not config.attention_gate):
        raise ModelError("a gate in q_proj is supported only beside k_proj and v_proj without biases")


def _refuse_dual_chunks(raw: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse dual chunk attention, unless one chunk covers all positions, which is ordinary attention."""
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
