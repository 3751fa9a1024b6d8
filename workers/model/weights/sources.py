"""Opens safetensors or GGUF weights under Hugging Face's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..directory.json_files import ModelError
from ..directory.store import weight_file, weight_index
from .gguf_source import GgufSource


class WeightSource(Protocol):
    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> torch.Tensor: ...


class SafetensorsSource:
    """A shard stays shut until one of its tensors is read."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, Any] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def read(self, name: str) -> torch.Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _open_safetensors(path)
        try:
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:  # an index may name a tensor that its file lacks
            raise ModelError(f"{path}: {error}") from None
        return tensor


def open_weights(directory: str | Path) -> WeightSource:
    """Raises ModelError that says what was looked for."""
    root = Path(directory)
    index = weight_index(root)
    if index is not None:
        return SafetensorsSource(index)
    single = weight_file(root)
    if single.suffix == ".gguf":
        return GgufSource(single)
    return SafetensorsSource(dict.fromkeys(_open_safetensors(single).keys(), single))


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
