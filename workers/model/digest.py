"""Which model it is: a digest that equal models share and that whatever changes a model's numbers alters.

It is taken over the decoder's shape with its overrides, over every tensor's name, type, shape and first
values, and over the same of an adapter. So it costs some reads of 4 KiB a layer, however large the model.
Where tensors lie (shards, their order) and what bounds a prompt or ends an answer do not count; nor does the
dtype that is computed in. Free of torch, because the front door takes it too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..settings import ModelSpec
from .config import ModelError, read_config
from .files import read_json
from .store import adapter_directory, model_directory, weight_index

SAMPLE_BYTES = 4096
"""Of each tensor. Training and merging change all of a matrix, so its first rows are told apart."""

_NO_NUMBERS = ("positions", "eos_ids")
"""Fields of ModelConfig that no activation depends on."""

_ADAPTER_SCALE = ("lora_alpha", "use_rslora")
"""What of adapter_config.json enters the merged weights; the rank is in the tensors' shapes."""

Tensor = tuple[str, str, list[int], bytes]
"""Name, type, shape and first bytes."""


def model_digest(model: ModelSpec) -> str:
    """sha256 in hexadecimal of the model with its adapter and overrides.

    Raises ModelError for files that are missing or cannot be read.
    """
    directory = model_directory(model.path)
    shape = dataclasses.asdict(read_config(directory, model.overrides))
    digest = hashlib.sha256()
    _add(digest, {key: value for key, value in shape.items() if key not in _NO_NUMBERS}, _weights(directory))
    if model.adapter is not None:
        adapter = adapter_directory(model.adapter)
        config = read_json(adapter / "adapter_config.json")
        scale = {key: config.get(key) or False for key in _ADAPTER_SCALE}
        _add(digest, scale, _safetensors(adapter / "adapter_model.safetensors"))
    return digest.hexdigest()


def _add(digest: Any, about: dict[str, Any], tensors: Iterable[Tensor]) -> None:
    digest.update(json.dumps(about, sort_keys=True).encode())
    for name, kind, shape, sample in sorted(tensors):
        digest.update(json.dumps([name, kind, shape]).encode())
        digest.update(sample)


def _weights(directory: Path) -> Iterator[Tensor]:
    """Of the file or files that `weights.open_weights` would read."""
    index = weight_index(directory)
    if index is not None:
        for path in set(index.values()):
            yield from _safetensors(path)
        return
    single, ggufs = directory / "model.safetensors", sorted(directory.glob("*.gguf"))
    yield from _gguf(ggufs[0]) if ggufs and not single.exists() else _safetensors(single)


def _safetensors(path: Path) -> Iterator[Tensor]:
    """A file begins with the length of its JSON header (uint64), whose offsets count from its end."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))
            for name, about in header.items():
                if name != "__metadata__":
                    begin, end = about["data_offsets"]
                    file.seek(8 + length + begin)
                    yield name, about["dtype"], about["shape"], file.read(min(end - begin, SAMPLE_BYTES))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None


def _gguf(path: Path) -> Iterator[Tensor]:
    from gguf import GGUFReader

    try:
        reader: Any = GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as GGUF: {error}") from None
    for tensor in reader.tensors:
        sample = tensor.data.reshape(-1).view("uint8")[:SAMPLE_BYTES].tobytes()
        yield tensor.name, tensor.tensor_type.name, [int(size) for size in tensor.shape], sample
