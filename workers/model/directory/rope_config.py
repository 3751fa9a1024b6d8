"""Reads RoPE and the maximum context length from config.json, under the key names of all versions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltafront.workers.model.directory.model_files import ModelError, positive_int, positive_number
from deltafront.workers.model.families.family import Family
from deltafront.workers.model.family_registry import FAMILIES

_TRAINED = "original_max_position_embeddings"
_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _TRAINED),
    "yarn": ("factor", _TRAINED),
    "longrope": ("short_factor", "long_factor", _TRAINED),
    "factors": ("factors",),
}
"""The keys that each RoPE type needs. GGUF stores llama3 scaling as `factors`, one divisor per frequency."""
_LOCAL = "rope_local_base_freq"
"""The key for the RoPE base of layers with sliding windows, in families where it differs."""
_MOST_STRETCHED = 4
"""The largest YaRN factor that makers' cards recommend."""
_OLD_TYPES = {"su": "longrope"}
_BETA = "llama_4_scaling_beta"


@dataclass(frozen=True)
class RopeConfig:
    """The parameters of a RoPE. `scaling` always has a `rope_type`. If it has `llama_4_scaling_beta`, queries
    are scaled by their position."""

    theta: float
    scaling: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})

    @property
    def kind(self) -> str:
        return str(self.scaling["rope_type"])


def read_rope(raw: Mapping[str, Any], overrides: Mapping[str, Any], family: Family) -> RopeConfig:
    """Read and check the RoPE. Raises ModelError."""
    given = _rope_keys(raw)
    grown = _growth(given, raw, family)
    kind = str(given["rope_type"])
    if kind not in _KEYS or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"rope scaling {kind!r} ({given}) is not supported; known: {', '.join(_KEYS)}")
    _refuse_unknown(given, raw, family)
    if beta := given.pop(_BETA, raw.get(_BETA)):
        given[_BETA] = positive_number("config.json", _BETA, beta)
    if _TRAINED in _KEYS[kind]:
        trained = raw.get(_TRAINED) or raw.get("max_position_embeddings")
        scaled_from = given.setdefault(_TRAINED, trained)
        if raw.get(_TRAINED) not in (None, scaled_from):
            raise ModelError(
                f"config.json says {_TRAINED} = {raw[_TRAINED]}, but {scaled_from} in its rope scaling: "
                "leave one"
            )
    missing = [key for key in _KEYS[kind] if given.get(key) is None]
    if missing:
        raise ModelError(f"rope scaling {kind!r} lacks {', '.join(missing)} in config.json")
    for key in _KEYS[kind]:
        for value in given[key] if isinstance(given[key], list) else [given[key]]:
            positive_number(f"rope scaling {kind!r}", key, value)
    theta = overrides.get("rope_theta", given.get("rope_theta"))
    theta = family.rope_theta if theta is None else positive_number("config.json", "rope_theta", theta)
    if theta <= 1.0:
        raise ModelError(f"rope_theta = {theta} must be above 1")
    return RopeConfig(theta * grown, _without(given, "rope_theta", "partial_rotary_factor"))


def _growth(given: dict[str, Any], raw: Mapping[str, Any], family: Family) -> float:
    """Return the factor alpha^(D / (D - 2)) by which Hunyuan's dynamic RoPE multiplies rope_theta, and turn
    `given` into an unscaled RoPE. For other models, return 1 and leave `given` unchanged."""
    if not ("alpha" in family.implied and given.get("alpha") and given["rope_type"] == "dynamic"):
        return 1.0
    alpha = positive_number("rope scaling 'dynamic'", "alpha", given["alpha"])
    dim = positive_int(raw, "head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    plain = {key: given[key] for key in ("rope_theta",) if key in given}
    given.clear()
    given |= {"rope_type": "default", **plain}
    return float(alpha ** (dim / (dim - 2)))


def of_full_layers(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return config.json with `rope_parameters` reduced to those of full-attention layers, if it lists them
    by layer type; else a copy."""
    ropes = raw.get("rope_parameters") if _LOCAL in family.implied else None
    own = ropes.get("full_attention") if isinstance(ropes, dict) else None
    return {**raw, "rope_parameters": own} if isinstance(own, dict) else dict(raw)


def window_rope(raw: Mapping[str, Any], full: RopeConfig, family: Family) -> RopeConfig | None:
    """Return the RoPE of layers with sliding windows; None if it equals `full`, the RoPE of the other layers.

    Older versions of config.json give only its base.
    """
    if _LOCAL not in family.implied:
        return None
    ropes, theta = raw.get("rope_parameters"), raw[_LOCAL]
    own = ropes.get("sliding_attention") if isinstance(ropes, dict) else None
    if not isinstance(own, dict):
        own = {"rope_theta": full.theta if theta is None else theta}
    rope = read_rope({"rope_parameters": own}, {}, family)
    return None if rope == full else rope


def rotary_dim(raw: Mapping[str, Any], head_dim: int, family: Family) -> int:
    """Return the number of a head's first channels that are rotated. Raises ModelError."""
    part = _rope_keys(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if part is None and "rotary_dim" in family.implied and raw["rotary_dim"]:
        part = positive_int(raw, "rotary_dim") / head_dim
    part = 1.0 if part is None else positive_number("config.json", "partial_rotary_factor", part)
    dim = int(head_dim * part)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ModelError(f"config.json: partial_rotary_factor = {part} rotates {dim} of {head_dim} channels")
    return dim


def positions(raw: Mapping[str, Any], rope: RopeConfig, overrides: Mapping[str, Any]) -> int:
    """Return the maximum context length, as vLLM does: with YaRN, `factor` times the trained length. An
    override takes precedence."""
    given = positive_int({**raw, **overrides}, "max_position_embeddings")
    if rope.kind != "yarn" or "max_position_embeddings" in overrides:
        return given
    return int(rope.scaling["factor"] * rope.scaling[_TRAINED])


def refuse_unscaled(overrides: Mapping[str, Any], known: int, architecture: str) -> None:
    """Raise ModelError if a context longer than the model's own (`known`) is configured, unless rope_theta is
    overridden, too."""
    wanted, scaling = overrides.get("max_position_embeddings", 0), overrides.get("rope_scaling")
    if scaling is not None:
        known = int(scaling["factor"] * scaling[_TRAINED])
    if wanted > known and "rope_theta" not in overrides:
        raise ModelError(
            f"model.max_position_embeddings (--max-model-len) = {wanted}, but the model has {known} "
            f"positions: {_longer(proposed_yarn(wanted, known, architecture))}"
        )


def proposed_yarn(wanted: int, known: int, architecture: str) -> str | None:
    """Return the rope_scaling that model cards of this architecture give to extend `known` positions to
    `wanted`; None if none does."""
    family = FAMILIES.get(architecture)
    trained = family.yarn.get(known) if family is not None else None
    factor = math.ceil(wanted / trained) if trained else math.inf
    if factor > _MOST_STRETCHED:
        return None
    return f"{{rope_type: yarn, factor: {factor:.1f}, {_TRAINED}: {trained}}}"


def _longer(scaling: str | None) -> str:
    if scaling is not None:
        return (
            f"if its makers' card recommends YaRN, set model.rope_scaling: {scaling}, which scales short "
            "prompts, too"
        )
    return (
        "more need YaRN (model.rope_scaling) with a factor that reaches so far, another model.rope_theta, or "
        "max_position_embeddings in config.json, where it understates the training"
    )


def rescaled(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the override's rope scaling in place of its own. Raises ModelError."""
    scaling = overrides.get("rope_scaling")
    if scaling is None:
        return dict(raw)
    if not isinstance(scaling, Mapping) or scaling.get("rope_type") != "yarn":
        raise ModelError(f"model.rope_scaling = {scaling!r}: only YaRN can replace a model's own scaling")
    kept = {
        key: own for key, own in _rope_keys(raw).items() if key in ("rope_theta", "partial_rotary_factor")
    }
    rest = _without(raw, "rope_theta", "rope_scaling", "rope_parameters", _TRAINED)
    return {**rest, "rope_parameters": {**kept, **scaling}}


def resolved(rope: RopeConfig, raw: Mapping[str, Any], positions: int) -> RopeConfig:
    """Choose LongRoPE's short or long factors (Ding et al. 2024, section 3.3) once for all prompts, as vLLM
    does.

    KV of a prompt must not depend on the prompt's final length, because it is cached. `positions` is the
    maximum context length.
    """
    if rope.kind != "longrope":
        return rope
    scaling, trained = rope.scaling, rope.scaling[_TRAINED]
    factors = scaling["long_factor" if positions > trained else "short_factor"]
    stretch = scaling.get("factor") or raw["max_position_embeddings"] / trained
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    return RopeConfig(rope.theta, {"rope_type": "factors", "factors": factors, "attention_factor": magnitude})


def _rope_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the `rope_parameters` of transformers 5 with the older keys. Raises ModelError if they differ."""
    new, old = (_scaling_keys(raw, key) for key in ("rope_parameters", "rope_scaling"))
    top = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    if new and old and _without(new, "rope_theta") != _without(old, "rope_theta"):
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
    if not keys:
        return {}
    kind = str(keys.setdefault("rope_type", keys.pop("type", "default")))
    return {**keys, "rope_type": _OLD_TYPES.get(kind, kind)}


def _without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


def _refuse_unknown(given: Mapping[str, Any], raw: Mapping[str, Any], family: Family) -> None:
    kind, part = str(given["rope_type"]), given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    part = 1.0 if part is None else positive_number("config.json", "partial_rotary_factor", part)
    beta = given.get(_BETA, raw.get(_BETA))
    if family.fixed.get("qk_norm_after_rope") and kind in ("yarn", "longrope"):
        raise ModelError(f"rope scaling {kind!r} before norms ({family.architecture}) is not supported")
    if part != 1.0 and "partial_rotary_factor" not in family.implied:
        raise ModelError(f"partial rotary factor is not supported for {family.architecture}: {given}")
    if given.get("mscale") and not (kind == "yarn" and given.get("mscale_all_dim")):
        raise ModelError(f"mscale needs yarn and mscale_all_dim, else it is not supported: {given}")
    if beta and (_BETA not in family.implied or _TRAINED not in _KEYS[kind]):
        raise ModelError(f"{_BETA} with rope scaling {kind!r} is not supported for {family.architecture}")
