"""A model's digest, which changes with the values that the model computes, and with nothing else.

It covers the decoder's shape with overrides, and name, type, shape and first bytes of each tensor, an
adapter's too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...settings import ModelSpec
from .headers import open_gguf, read_header
from .json_files import read_json
from .model_config import ModelConfig, config_of
from .store import adapter_directory, gguf_parts, model_directory, weight_file, weight_index

SAMPLE_BYTES = 4096
"""Bytes of each tensor that are hashed. Training and merging change a whole matrix, so its first rows show
it."""

_LEFT_OUT = ("positions", "eos_ids", "o_bias", "mlp_bias", "norms", "fused_qkv", "fused_gate_up")
"""Fields that change no result, or that tensors show."""
_LEFT_OUT_AT_DEFAULT = """qk_norm_all_heads activation rotary_dim interleaved_rope unrotated_layers
    embedding_scale logit_scale attention_scale mixture window_layers window_rope norm_offset""".split()
"""A new field of ModelConfig belongs here or above. Otherwise it would change every model's digest, and no
profile would fit any more."""

_ADAPTER_SCALE = ("lora_alpha", "use_rslora")

Tensor = tuple[str, str, list[int], bytes]
"""Name, dtype, shape and first bytes."""


def model_digest(model: ModelSpec) -> str:
    """Return the model's digest, a sha256 in hexadecimal. Raises ModelError."""
    digest = hashlib.sha256()
    _add(digest, _about(config_of(model)), _weights(model_directory(model.path)))
    if model.adapter is not None:
        adapter = adapter_directory(model.adapter)
        config = read_json(adapter / "adapter_config.json")
        scale = {key: config.get(key) or False for key in _ADAPTER_SCALE}
        _add(digest, scale, _safetensors(adapter / "adapter_model.safetensors"))
    return digest.hexdigest()


def _about(config: ModelConfig) -> dict[str, Any]:
    left_out = {*_LEFT_OUT, *(_at_default(config) & {*_LEFT_OUT_AT_DEFAULT})}
    about = {key: value for key, value in dataclasses.asdict(config).items() if key not in left_out}
    if config.mixture is not None:
        for key in _at_default(config.mixture):
            del about["mixture"][key]
    return about


def _at_default(config: Any) -> set[str]:
    return {
        field.name for field in dataclasses.fields(config) if getattr(config, field.name) == field.default
    }


def _add(digest: Any, about: dict[str, Any], tensors: Iterable[Tensor]) -> None:
    digest.update(json.dumps(about, sort_keys=True).encode())
    for name, kind, shape, sample in sorted(tensors):
        digest.update(json.dumps([name, kind, shape]).encode())
        digest.update(sample)


def _weights(directory: Path) -> Iterator[Tensor]:
    index = weight_index(directory)
    for path in [weight_file(directory)] if index is None else set(index.values()):
        yield from _gguf(path) if path.suffix == ".gguf" else _safetensors(path)


def _safetensors(path: Path) -> Iterator[Tensor]:
    stored = read_header(path)
    with path.open("rb") as file:
        for name, tensor in stored.items():
            file.seek(tensor.begin)
            sample = file.read(min(tensor.end - tensor.begin, SAMPLE_BYTES))
            yield name, tensor.dtype, list(tensor.shape), sample


def _gguf(path: Path) -> Iterator[Tensor]:
    for part in gguf_parts(path):
        for tensor in open_gguf(part).tensors:
            sample = tensor.data.reshape(-1).view("uint8")[:SAMPLE_BYTES].tobytes()
            yield tensor.name, tensor.tensor_type.name, [int(size) for size in tensor.shape], sample
