"""Merges a PEFT LoRA adapter into weights while they are loaded.

Source: LoRA (Hu et al. 2021), section 4.1: W + B·A·alpha/r; rsLoRA (Kalajdzievski 2023): alpha/sqrt(r).
"""

import json
import math
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from ..directory.json_files import ModelError
from .sources import open_safetensors

_NAME = re.compile(
    r"base_model\.model\.(model\.layers\.(\d+)\.(?:self_attn\.(?:[qkvo]|qkv)_proj|mlp\.(?:gate|up|down|gate_up)_proj))"
    r"\.lora_([AB])\.weight"
)

_REFUSED = (
    *("fan_in_fan_out", "use_dora", "modules_to_save", "alpha_pattern", "lora_bias"),
    *("trainable_token_indices", "layer_replication", "alora_invocation_tokens", "use_qalora"),
)

_CHANGES_THE_BASE = ("pissa", "corda", "olora", "loftq")
"""Initialisations that subtract the adapter's start from the base weights."""


class LoraAdapter:
    """An adapter in a directory. Raises ModelError if a file is broken or asks for something that is not
    supported."""

    def __init__(self, directory: str | Path, model_layers: int) -> None:
        self._path = Path(directory) / "adapter_model.safetensors"
        self._config = _read_config(Path(directory) / "adapter_config.json")
        if not self._path.exists():
            raise ModelError(f"{self._path} does not exist: an adapter needs its weights in safetensors")
        self._file = open_safetensors(self._path)
        self._tensors = _sorted_names(self._path, list(self._file.keys()), model_layers)

    def require_in(self, names: Container[str]) -> None:
        """Raise ModelError for a module that the model does not have."""
        if lost := [module for module in self._tensors if f"{module}.weight" not in names]:
            raise ModelError(f"{self._path}: the model has no linear layer {lost[0]}")

    def merge(self, name: str, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return W + B·A·scale in float32; the weight itself if the adapter has none for `name`."""
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or module not in self._tensors:
            return weight_OI
        a_RI, b_OR = (self._file.get_tensor(self._tensors[module][side]).float() for side in "AB")
        rank = a_RI.shape[0]
        if b_OR.shape[1] != rank or (b_OR.shape[0], a_RI.shape[1]) != tuple(weight_OI.shape):
            raise ModelError(
                f"{self._path}: {module} has B {tuple(b_OR.shape)} · A {tuple(a_RI.shape)}, but the weight "
                f"is {tuple(weight_OI.shape)}: this adapter was made for another model"
            )
        root = math.sqrt(rank) if self._config.get("use_rslora") else rank
        return torch.addmm(weight_OI.float(), b_OR, a_RI, alpha=float(self._config["lora_alpha"]) / root)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): is this a PEFT adapter directory?") from None
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type {config.get('peft_type')!r} is not supported, only LORA")
    for key in _REFUSED:
        if config.get(key):
            raise ModelError(f"{path}: {key} is set, which is not supported; merge the adapter beforehand")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_THE_BASE):
        raise ModelError(
            f"{path}: init_lora_weights {init!r} is for other base weights than the model's: save the adapter"
            " with path_initial_model_for_weight_conversion, or merge it beforehand"
        )
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias {config['bias']!r} is not supported, only 'none'")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise ModelError(f"{path}: lora_alpha is missing or not a number")
    return dict(config)


def _sorted_names(path: Path, names: list[str], model_layers: int) -> dict[str, dict[str, str]]:
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or int(match[2]) >= model_layers:
            raise ModelError(f"{path}: tensor {name!r} does not belong to a linear layer of this model")
        modules.setdefault(match[1], {})[match[3]] = name
    for module, sides in modules.items():
        if len(sides) != 2:
            raise ModelError(f"{path}: {module} has only one of lora_A and lora_B")
    return modules
