"""Reads the files of a PEFT LoRA adapter, without torch. It refuses adapters that need unsupported features.

Sources: LoRA (Hu et al. 2021), section 4.1: W + B·A·alpha/r; rsLoRA (Kalajdzievski 2023): alpha/sqrt(r).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltafront.workers.model.directory.headers import Stored, read_header
from deltafront.workers.model.directory.model_config import ModelConfig, Shape
from deltafront.workers.model.directory.model_files import ModelError, read_json

_NAME = re.compile(
    r"base_model\.model\.(model\.layers\.\d+\.(?:self_attn\.(?:[qkvo]|qkv)_proj|mlp\.(?:gate|up|down|gate_up)_proj))"
    r"\.lora_([AB])\.weight"
)

_REFUSED = (
    *("fan_in_fan_out", "use_dora", "modules_to_save", "alpha_pattern", "lora_bias"),
    *("trainable_token_indices", "layer_replication", "alora_invocation_tokens", "use_qalora"),
)

_KEEPS_THE_BASE = ("", "true", "false", "none", "gaussian", "eva", "orthogonal")
"""Initialisations of adapters for unchanged base weights. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract the
adapter's initial value from the base weights (peft 0.21, tuners/lora/layer.py)."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter's files.

    Attributes:
        weights: The file with the adapter's tensors.
        modules: For each linear layer that the adapter changes, the names of the tensors A and B.
    """

    weights: Path
    modules: Mapping[str, Mapping[str, str]]
    alpha: float
    rslora: bool

    @classmethod
    def read(cls, directory: str | Path, model: ModelConfig) -> AdapterFiles:
        """Read an adapter's files. Raises ModelError if one is broken or does not fit the model, or if a
        feature is not supported."""
        config = _read_config(Path(directory) / "adapter_config.json")
        path = Path(directory) / "adapter_model.safetensors"
        if not path.exists():
            raise ModelError(f"{path} does not exist: an adapter needs its weights in safetensors")
        stored = read_header(path)
        modules = _modules(path, stored)
        _check_shapes(path, modules, stored, model.shapes())
        return cls(path, modules, float(config["lora_alpha"]), bool(config.get("use_rslora")))

    def scale(self, rank: int) -> float:
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type {config.get('peft_type')!r} is not supported, only LORA")
    for key in _REFUSED:
        if config.get(key):
            raise ModelError(f"{path}: {key} is set, which is not supported; merge the adapter beforehand")
    init = config.get("init_lora_weights")
    if str(init or "").lower() not in _KEEPS_THE_BASE:
        raise ModelError(
            f"{path}: init_lora_weights {init!r} is for other base weights than the model's: save the adapter"
            " with path_initial_model_for_weight_conversion, or merge it beforehand"
        )
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias {config['bias']!r} is not supported, only 'none'")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise ModelError(f"{path}: lora_alpha is missing or not a number")
    return config


def _modules(path: Path, names: Iterable[str]) -> dict[str, dict[str, str]]:
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{path}: tensor {name!r} does not belong to a linear layer of this model")
        modules.setdefault(match[1], {})[match[2]] = name
    for module, sides in modules.items():
        if len(sides) != 2:
            raise ModelError(f"{path}: {module} has only one of lora_A and lora_B")
    return modules


def _check_shapes(
    path: Path,
    modules: Mapping[str, Mapping[str, str]],
    stored: Mapping[str, Stored],
    expected: Mapping[str, Shape],
) -> None:
    for module, sides in modules.items():
        if (weight := expected.get(f"{module}.weight")) is None:
            raise ModelError(f"{path}: the model has no linear layer {module}")
        a, b = stored[sides["A"]].shape, stored[sides["B"]].shape
        if (len(a), len(b)) != (2, 2) or b[1] != a[0] or not a[0] or (b[0], a[1]) != weight:
            raise ModelError(
                f"{path}: {module} has B {b} · A {a}, but the weight is {weight}: this adapter was made for "
                "another model"
            )
