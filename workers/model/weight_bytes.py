"""Counts the bytes of weights as `weights.stack_weights` holds them: matrices in 8 bits if they are
quantised, some numbers in float32, all others in the model's dtype."""

import math

from deltafront.workers.model.directory.model_config import LINEAR, XIELU, ModelConfig, Shape

_SCALE_BYTES = _WIDE_BYTES = 4
_KEPT = "gate", "shared_gate", "in_proj_ba", "in_proj_b", "in_proj_a"
"""Modules whose matrices are never quantised: routers, gates of shared experts, and linear attention's beta
and decay."""
_WIDE = f"{LINEAR}.A_log", f"{LINEAR}.dt_bias", f"{LINEAR}.norm.weight", *(f"mlp.act_fn.{n}" for n in XIELU)


def attention_bytes(kind: ModelConfig, number_bytes: int, quantised: bool) -> int:
    """Count the bytes of a layer's attention, with its norms.

    Args:
        kind: The layer's configuration (`ModelConfig.of_layer`), or that of a rank's part of it.
        number_bytes: Bytes of a number in the model's dtype.
        quantised: True if the layers' matrices are in FP8.
    """
    half = kind.attention_half()
    held = sum(_bytes(kind, name, shape, number_bytes, quantised) for name, shape in half.items())
    both_norms = kind.qk_norm_after_rope and not kind.of_linear_layers
    return held + both_norms * kind.head_dim * _WIDE_BYTES


def mlp_bytes(kind: ModelConfig, number_bytes: int, quantised: bool) -> int:
    """Count the bytes of a layer's MLP or experts, with norms. Arguments are those of `attention_bytes`."""
    shapes = kind.mlp_half().items()
    return sum(_bytes(kind, name, shape, number_bytes, quantised) for name, shape in shapes)


def final_norm_bytes(model: ModelConfig, number_bytes: int) -> int:
    return model.hidden * (_norm_bytes(model, number_bytes) + model.norm_bias * number_bytes)


def _bytes(kind: ModelConfig, name: str, shape: Shape, number_bytes: int, quantised: bool) -> int:
    numbers, module = math.prod(shape), name.split(".")[-2]
    if quantised and len(shape) == 2 and name.endswith(".weight") and module not in _KEPT:
        return numbers + shape[0] * _SCALE_BYTES
    if name in _WIDE or (name.startswith("mlp.gate.") and kind.mixture and kind.mixture.has_bias):
        return numbers * _WIDE_BYTES
    if name.endswith("norm.weight"):
        return numbers * _norm_bytes(kind, number_bytes) * _copies(kind, module)
    return numbers * number_bytes


def _norm_bytes(model: ModelConfig, number_bytes: int) -> int:
    """Return the bytes of a number of a norm's weights. Those with an offset are float32, but LayerNorms'."""
    return _WIDE_BYTES if model.norm_offset and not model.layer_norms else number_bytes


def _copies(kind: ModelConfig, module: str) -> int:
    """Return how often a norm's weights are held: those of q and k once for each head."""
    if kind.qk_norm_all_heads:
        return 1
    return {"q_norm": kind.q_heads, "k_norm": kind.kv_heads}.get(module, 1)
