from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import EMBEDDING, HEAD, ModelConfig, Shape
from deltafront.workers.model.directory.model_files import (
    ModelError,
    read_json,
    weight_file,
    weight_index,
)
from deltafront.workers.model.directory.quantised import Quantised, is_ignored, quantised_form
from deltafront.workers.model.directory.text_part import ExpertPart, expert_parts, own_names, text_config
from deltafront.workers.model.family_registry import family_of
from deltafront.workers.model.weights.dequantise import dequantised
from deltafront.workers.model.weights.gguf.source import GgufSource


class WeightSource(Protocol):
    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> torch.Tensor: ...


class SafetensorsSource:
    """Reads safetensors files. A file is opened when the first of its tensors is read.

    Args:
        files: The file of each tensor, by the tensor's name in the files.
        stored_names: The name of each tensor in the files, by our name.
    """

    def __init__(self, files: Mapping[str, Path], stored_names: Mapping[str, str]) -> None:
        self._files = files
        self._stored_names = stored_names
        self._names = frozenset(stored_names)
        self._open: dict[Path, Any] = {}

    def names(self) -> frozenset[str]:
        return self._names

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


class StackedExpertsSource:
    """Reads each expert's matrices from tensors of all experts (`directory.text_part`)."""

    def __init__(self, source: WeightSource, parts: Mapping[str, ExpertPart]) -> None:
        self._source, self._parts = source, parts
        stacked = {part.stacked for part in parts.values()}
        self._names = (source.names() - stacked) | parts.keys()

    def names(self) -> frozenset[str]:
        return self._names

    def read(self, name: str) -> torch.Tensor:
        if (part := self._parts.get(name)) is None:
            return self._source.read(name)
        own = self._source.read(part.stacked)[part.expert]
        return (own.T if part.transposed else own)[part.rows]


class QuantisedSource:
    """Reads a quantised checkpoint and returns dequantised matrices.

    Call `check_weights` first. `shapes` has the shapes of all of the model's tensors.
    """

    def __init__(self, source: WeightSource, form: Quantised, shapes: Mapping[str, Shape]) -> None:
        self._source, self._form, self._shapes = source, form, shapes
        self._stored = source.names()
        self._matrices = form.matrices(self._stored)
        parts = {stem + suffix for stem in self._matrices for suffix in form.suffixes}
        parts |= {f"{stem}bias" for stem in self._matrices} - shapes.keys()  # biases of zeros
        weights = {f"{stem}weight" for stem in self._matrices}
        self._names = frozenset(name for name in self._stored - parts if not is_ignored(name)) | weights

    def names(self) -> frozenset[str]:
        return self._names

    def read(self, name: str) -> torch.Tensor:
        """Return a quantised matrix in float32, any other tensor as stored. Raises ModelError."""
        stem, shape = name.removesuffix("weight"), self._shapes.get(name, ())
        if stem not in self._matrices or len(shape) != 2:
            return self._source.read(name)
        found = {part.names[0]: part.find(stem, self._stored) for part in self._form.parts(*shape)}
        parts = {part: self._source.read(stored) for part, stored in found.items() if stored is not None}
        try:
            return dequantised(self._form, parts, *shape)
        except (ModelError, RuntimeError, LookupError, ValueError) as error:
            raise ModelError(f"{name!r} cannot be computed from {', '.join(parts)}: {error}") from None


def open_weights(directory: str | Path) -> WeightSource:
    """Open a model's weights: safetensors, quantised or not, or GGUF. Raises ModelError."""
    root = Path(directory)
    files = weight_index(root)
    if files is None:
        single = weight_file(root)
        if single.suffix == ".gguf":
            return GgufSource(single)
        files = dict.fromkeys(open_safetensors(single).keys(), single)
    source: WeightSource = SafetensorsSource(files, own_names(files, read_json(root / "config.json")))
    family, form = family_of(text_config(read_json(root / "config.json"))), quantised_form(root)
    if family is not None and family.stacks_experts is not None:
        source = _each_expert(source, read_config(root), family.stacks_experts == "alternating")
    if form is None:
        return source
    shapes = read_config(root).shapes()
    return QuantisedSource(source, form, {HEAD: shapes[EMBEDDING]} | shapes)


def _each_expert(source: WeightSource, config: ModelConfig, alternate: bool) -> WeightSource:
    experts = 0 if config.mixture is None else config.mixture.experts
    shapes = {name: tuple(source.read(name).shape) for name in source.names() if ".mlp.experts." in name}
    return StackedExpertsSource(source, expert_parts(shapes, experts, alternate))


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
