"""MLPs that are mixtures of experts, as config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .json_files import ModelError, positive_int


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Every layer's MLP is `experts` small ones, and a router chooses `per_token` of them for each token.

    Args:
        normed: The chosen experts' probabilities are divided by their sum.
    """

    experts: int
    per_token: int
    normed: bool


def read_mixture(raw: Mapping[str, Any]) -> MixtureConfig | None:
    """Return None for a family without experts. Raises ModelError unless every layer has them."""
    if raw.get("num_experts") is None:
        return None
    experts, chosen = positive_int(raw, "num_experts"), positive_int(raw, "num_experts_per_tok")
    if chosen > experts:
        raise ModelError(f"config.json: num_experts_per_tok = {chosen} of num_experts = {experts}")
    if raw["decoder_sparse_step"] != 1 or raw["mlp_only_layers"]:
        raise ModelError(
            "config.json: decoder_sparse_step and mlp_only_layers give some layers a dense MLP, which is not "
            "supported beside mixtures of experts"
        )
    return MixtureConfig(experts=experts, per_token=chosen, normed=bool(raw["norm_topk_prob"]))
