"""Checkpoints that hold matrices in 8-bit floats (e4m3). Without torch.

`X.weight` stands for its numbers times its scale, `X.weight_scale` or `X.weight_scale_inv`: one number, one
per output channel, or one per block. Scales of activations and K/V are not needed, because activations are
quantised as they come and K/V has 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .json_files import ModelError, read_json, read_json_or_empty

E4M3 = "F8_E4M3"
"""The dtype's name in safetensors."""
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
_OTHER_SCALES = ("input_scale", "output_scale", "q_scale", "k_scale", "v_scale")
_SERVED = "take the model in 16 bits, or in FP8 (compressed-tensors, ModelOpt, or blocks of 128 × 128)"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fp8Checkpoint:
    """block: the rows and columns that share a scale; None where each channel, or the matrix, has one."""

    block: tuple[int, int] | None

    def scale_of(self, weight: str, names: Iterable[str]) -> str | None:
        stem = weight.removesuffix("weight")
        return next((stem + scale for scale in _WEIGHT_SCALES if stem + scale in names), None)

    def check_scale(self, weight: Shape, scale: Shape) -> str:
        """Say what is wrong with a scale's shape; empty if nothing is."""
        if prod(scale) == 1:
            return ""
        if self.block is None:
            fits = len(weight) == 2 and scale in ((weight[0],), (weight[0], 1))
            return "" if fits else f"is {scale} for a matrix of {weight}: one a channel is expected"
        wanted = tuple(-(-size // part) for size, part in zip(weight, self.block, strict=False))
        return "" if scale == wanted else f"is {scale}, blocks of {self.block} need {wanted}"


def is_scale(name: str) -> bool:
    return name.rpartition(".")[2] in (*_WEIGHT_SCALES, *_OTHER_SCALES)


def fp8_checkpoint(directory: Path, config: Mapping[str, Any]) -> Fp8Checkpoint | None:
    """Return how weights are quantised; None in 16 bits or more.

    Raises:
        ModelError: They are quantised in a way that is not served.
    """
    given = config.get("quantization_config")
    if not given:
        beside = read_json_or_empty(directory / "hf_quant_config.json").get("quantization")
        given = beside and {"quant_method": "modelopt", **beside}
    if not given:
        return None
    if not isinstance(given, dict):
        raise ModelError(f"config.json: quantization_config = {given!r} is not a section of keys")
    method = str(given.get("quant_method"))
    if method == "fp8":
        return Fp8Checkpoint(_block(given.get("weight_block_size")))
    if method == "modelopt" and given.get("quant_algo") == "FP8":
        return Fp8Checkpoint(None)
    if method == "compressed-tensors":
        return Fp8Checkpoint(_block_of_groups(given))
    kind = given.get("quant_algo") or given.get("quant_type") or given.get("bnb_4bit_quant_type")
    raise ModelError(f"weights quantised by {method}{f' ({kind})' if kind else ''} are not served: {_SERVED}")


def holds_fp8(directory: Path) -> bool:
    return fp8_checkpoint(directory, read_json(directory / "config.json")) is not None


def _block_of_groups(given: Mapping[str, Any]) -> tuple[int, int] | None:
    weights = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
    forms = {(group.get("type"), group.get("num_bits"), group.get("strategy")) for group in weights}
    if len(forms) != 1:
        raise ModelError(f"compressed-tensors with {len(forms)} kinds of weights are not served: {_SERVED}")
    ((kind, bits, strategy),) = forms
    if (kind, bits) != ("float", 8) or strategy not in ("tensor", "channel", "block"):
        raise ModelError(
            f"compressed-tensors weights of {bits} bits ({kind}, by {strategy}) are not served: {_SERVED}"
        )
    return _block(weights[0].get("block_structure")) if strategy == "block" else None


def _block(given: object) -> tuple[int, int] | None:
    if given is None:
        return None
    sizes = given.split("x") if isinstance(given, str) else given
    try:
        rows, columns = map(int, sizes)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise ModelError(f"config.json: {given!r} is no size of blocks of weights")
    return rows, columns
