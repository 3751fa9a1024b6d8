"""Rotary position embedding (RoPE) and its scaling. Shape suffixes also: F = D / 2 frequencies."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import RopeConfig


class Rope:
    """Computes rotary angles. Channel f is rotated with channel f + D/2; loading reorders weights for this.

    Args:
        rotary_dim: Number of channels that are rotated; None: all.
        scale: A factor of attention scores, such as YaRN's. Cos and sin are multiplied by its square root.
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
        """Return factors of the rotated queries, float32 [T, 1, 1]; None if the model has none.

        They grow with each multiple of the trained length (Llama 4's temperature, which Ministral 3 uses).
        """
        if not self._beta:
            return None
        lengths_T = (positions_T.to(torch.float32) / self._trained).floor()
        return (1.0 + self._beta * lengths_T.log1p())[:, None, None]

    def unrotated(self, angles: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of zero angles in the shape of `angles`, for layers without RoPE."""
        cos_T1F, sin_T1F = angles
        return torch.full_like(cos_T1F, self._still_magnitude), torch.zeros_like(sin_T1F)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies in radians per token, float32 [F], and the factor of cos and sin.

    The factor is YaRN's or LongRoPE's, otherwise 1. transformers computes scaled frequencies.
    """
    if config.kind not in ("default", "factors"):
        return _scaled(config, head_dim)
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base_F = 1.0 / config.theta**exponent_F
    factors_F = torch.tensor(config.scaling.get("factors", [1.0] * len(base_F)), dtype=torch.float32)
    if factors_F.shape != base_F.shape:
        raise ModelError(f"rope has {factors_F.numel()} frequency factors for {base_F.numel()} frequencies")
    return base_F / factors_F, float(config.scaling.get("attention_factor", 1.0))


def _scaled(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes half a second

    shape = SimpleNamespace(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        rope_parameters={**config.scaling, "rope_theta": config.theta},
        standardize_rope_params=lambda: None,
    )
    frequencies_F, magnitude = ROPE_INIT_FUNCTIONS[config.kind](shape, torch.device("cpu"))
    return frequencies_F, float(magnitude)
