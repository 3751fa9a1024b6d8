from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..directory.fp8_checkpoint import Fp8Checkpoint, fp8_checkpoint, is_scale
from ..directory.json_files import ModelError, read_json
from ..directory.store import weight_file, weight_index
from ..directory.text_part import text_names
from .gguf_source import GgufSource


class WeightSource(Protocol):
    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> torch.Tensor: ...


class SafetensorsSource:
    """It opens a shard when one of its tensors is read. files: by a tensor's name there. stored_names: the
    name there of each tensor that can be read."""

    def __init__(self, files: Mapping[str, Path], stored_names: Mapping[str, str]) -> None:
        self._files = files
        self._stored_names = stored_names
        self._open: dict[Path, Any] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._stored_names)

    def read(self, name: str) -> torch.Tensor:
        stored = self._stored_names[name]
        path = self._files[stored]
        if path not in self._open:
            self._open[path] = open_safetensors(path)
        try:
            tensor: torch.Tensor = self._open[path].get_tensor(stored)
        except SafetensorError as error:  # an index may name a tensor that its file lacks
            raise ModelError(f"{path}: {error}") from None
        return tensor


class Fp8Source:
    """A checkpoint in 8-bit floats as the numbers that it stands for."""

    def __init__(self, source: WeightSource, checkpoint: Fp8Checkpoint) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._stored = source.names()

    def names(self) -> frozenset[str]:
        return frozenset(name for name in self._stored if not is_scale(name))

    def read(self, name: str) -> torch.Tensor:
        """Return a scaled matrix in float32, other tensors as they are stored."""
        tensor = self._source.read(name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        scale = self._checkpoint.scale_of(name, self._stored)
        if scale is None:
            raise ModelError(f"tensor {name!r} is in 8 bits and has no scale")
        factor = self._source.read(scale).float()
        if problem := self._checkpoint.check_scale(tuple(tensor.shape), tuple(factor.shape)):
            raise ModelError(f"tensor {scale!r} {problem}")
        return tensor.float() * self._spread(factor, *tensor.shape)

    def _spread(self, factor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        block = self._checkpoint.block
        if factor.numel() == 1:
            return factor.reshape(1, 1)
        if block is None:
            return factor.reshape(rows, 1)
        spread = factor.repeat_interleave(block[0], 0)[:rows]
        return spread.repeat_interleave(block[1], 1)[:, :columns]


def open_weights(directory: str | Path) -> WeightSource:
    """Raises ModelError."""
    root = Path(directory)
    files = weight_index(root)
    if files is None:
        single = weight_file(root)
        if single.suffix == ".gguf":
            return GgufSource(single)
        files = dict.fromkeys(open_safetensors(single).keys(), single)
    raw = read_json(root / "config.json")
    source, fp8 = SafetensorsSource(files, text_names(files, raw)), fp8_checkpoint(root, raw)
    return source if fp8 is None else Fp8Source(source, fp8)


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
