"""Rotary position embedding with its scalings. Shape suffixes also: F = D / 2 frequencies."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import RopeConfig


class Rope:
    """Computes rotary angles. Channel f rotates with channel f + D/2; weights are reordered for that at load.

    Args:
        rotary_dim: Channels that are rotated; None: all.
        scale: Factor of attention scores, such as YaRN's: cos and sin are multiplied by its square root.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        device: torch.device | str,
        *,
        rotary_dim: int | None = None,
        scale: float = 1.0,
    ) -> None:
        frequencies_F, magnitude = inverse_frequencies(config, rotary_dim or head_dim)
        self._still_magnitude = math.sqrt(scale)
        self._magnitude: float | torch.Tensor = magnitude * self._still_magnitude
        if still := head_dim // 2 - len(frequencies_F):
            magnitude_F = torch.full_like(frequencies_F, self._magnitude)
            self._magnitude = F.pad(magnitude_F, (0, still), value=self._still_magnitude).to(device)
            frequencies_F = F.pad(frequencies_F, (0, still))
        self._frequencies_F = frequencies_F.to(device)
        self._beta = float(config.scaling.get("llama_4_scaling_beta", 0.0))
        self._trained = float(config.scaling.get("original_max_position_embeddings", 0.0))

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, float32 [T, 1, F]."""
        angle_T1F = positions_T.to(torch.float32)[:, None, None] * self._frequencies_F
        return angle_T1F.cos() * self._magnitude, angle_T1F.sin() * self._magnitude

    def query_scale(self, positions_T: torch.Tensor) -> torch.Tensor | None:
        """Return factors that multiply rotated queries, float32 [T, 1, 1]; None if the model has none.

        They grow with each multiple of the trained length (Llama 4's temperature, used by Ministral 3).
        """
        if not self._beta:
            return None
        lengths_T = (positions_T.to(torch.float32) / self._trained).floor()
        return (1.0 + self._beta * lengths_T.log1p())[:, None, None]

    def unrotated(self, angles: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin that rotate nothing, shaped like `angles`, for layers without RoPE."""
        cos_T1F, sin_T1F = angles
        return torch.full_like(cos_T1F, self._still_magnitude), torch.zeros_like(sin_T1F)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies in radians per token, float32 [F], and YaRN's or LongRoPE's factor of cos
    and sin (otherwise 1).
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base_F = 1.0 / config.theta**exponent_F
    scaling = config.scaling
    if config.kind == "default":
        return base_F, 1.0
    if config.kind == "linear":
        return base_F / float(scaling["factor"]), 1.0
    if config.kind == "llama3":
        return _llama3(base_F, scaling), 1.0
    if config.kind == "yarn":
        return _yarn(base_F, config.theta, scaling)
    if config.kind == "factors":
        factors_F = torch.tensor(scaling["factors"], dtype=torch.float32)
        if factors_F.shape != base_F.shape:
            raise ModelError(
                f"rope has {factors_F.numel()} frequency factors for {base_F.numel()} frequencies"
            )
        return base_F / factors_F, float(scaling.get("attention_factor", 1.0))
    raise ModelError(f"rope scaling {config.kind!r} is not supported")


def _llama3(base_F: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Slow down channels as Llama 3.1 does: slow ones by `factor`, fast ones not, those between by
    interpolation.

    A channel's speed is its number of turns over the original context.
    """
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns_F = float(scaling["original_max_position_embeddings"]) * base_F / (2 * math.pi)
    unscaled_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return unscaled_F * base_F + (1.0 - unscaled_F) * base_F / factor


def _yarn(base_F: torch.Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023), sections 3.2 (interpolation by parts) and 3.4 (attention temperature).

    As in the authors' code, the ramp runs over channels; in equation 20 it runs over turns.
    """
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    last = 2 * base_F.numel() - 1

    def channel(turns: float) -> float:
        return base_F.numel() * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    unscaled = channel(float(scaling.get("beta_fast") or 32))
    scaled = channel(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        unscaled, scaled = math.floor(unscaled), math.ceil(scaled)
    start, end = max(unscaled, 0), min(scaled, last)
    width = end - start if end != start else 0.001
    ramp_F = ((torch.arange(base_F.numel(), dtype=torch.float32) - start) / width).clamp(0.0, 1.0)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        mscale, all_dim = (float(scaling.get(key) or 0.0) for key in ("mscale", "mscale_all_dim"))
        has_both = mscale and all_dim
        magnitude = _temperature(factor, mscale if has_both else 1.0)
        magnitude /= _temperature(factor, all_dim) if has_both else 1.0
    return base_F * (1.0 - ramp_F) + base_F / factor * ramp_F, float(magnitude)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
