"""Merges a PEFT LoRA adapter into weights while they are loaded."""

from pathlib import Path

import torch

from deltafront.workers.model.adapter import AdapterFiles
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.weights.sources import open_safetensors


class LoraAdapter:
    """A LoRA adapter in a directory. Raises ModelError as `AdapterFiles.read` does."""

    def __init__(self, directory: str | Path, model: ModelConfig) -> None:
        self._files = AdapterFiles.read(directory, model)
        self._tensors = open_safetensors(self._files.weights)

    def merge(self, name: str, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return W + B·A·scale in float32; the weight itself if the adapter does not change `name`."""
        sides = self._files.modules.get(name.removesuffix(".weight"))
        if not name.endswith(".weight") or sides is None:
            return weight_OI
        a_RI, b_OR = (self._tensors.get_tensor(sides[side]).float() for side in "AB")
        return torch.addmm(weight_OI.float(), b_OR, a_RI, alpha=self._files.scale(len(a_RI)))
