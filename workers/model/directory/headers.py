"""Compares weights with a configuration by their files' headers alone, in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .fp8_checkpoint import E4M3, Fp8Checkpoint, fp8_checkpoint, is_scale
from .json_files import ModelError, read_json, refuse_pointer
from .model_config import EMBEDDING, HEAD, ModelConfig, Shape
from .store import weight_file, weight_index
from .text_part import text_names

_DTYPES = ("F64", "F32", "F16", "BF16")
_SCALES = tuple("_scale _scale_inv _scales _zero_point qweight qzeros g_idx _packed .absmax".split())
_DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints have it."""
_OF_ANOTHER = "take weights and config.json of one model"


@dataclass(frozen=True)
class Stored:
    """Bytes begin .. end - 1 of a file."""

    dtype: str
    shape: Shape
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name.

    The file begins with the length of its JSON header (uint64); offsets count from the header's end. Raises
    ModelError.
    """
    try:
        refuse_pointer(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            content = json.loads(file.read(min(start, size) - 8))
        tensors = dict(_tensors(content, start))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
    end = max((tensor.end for tensor in tensors.values()), default=start)
    if size != end:
        raise ModelError(f"{path} has {size} bytes of {end}: download it again")
    return tensors


def _tensors(content: Mapping[str, dict[str, list[int]]], start: int) -> Iterator[tuple[str, Stored]]:
    for name, about in content.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            yield name, Stored(str(about["dtype"]), tuple(about["shape"]), start + begin, start + end)


def check_weights(directory: Path, config: ModelConfig) -> None:
    """Check that each tensor of the decoder is complete, in its shape, in 16 bits or in 8 with its scale, and
    that none is left over. GGUF weights are checked when they are read. Raises ModelError."""
    stored = _stored(directory)
    if stored is None:
        return
    raw = read_json(directory / "config.json")
    stored = {own: stored[name] for own, name in text_names(stored, raw).items()}
    fp8 = fp8_checkpoint(directory, raw)
    if fp8 is not None:
        for problem in _fp8_problems(stored, fp8):
            raise ModelError(f"{directory}: {problem}")
        stored = {
            name: replace(tensor, dtype="F32") if tensor.dtype == E4M3 else tensor
            for name, tensor in stored.items()
            if not is_scale(name)
        }
    expected = config.shapes()
    if config.tied_embeddings and HEAD in stored:  # loading compares it with the embedding
        table = expected[EMBEDDING] if EMBEDDING in stored else expected.pop(EMBEDDING)
        expected[HEAD] = table
    for problem in _problems(stored, expected, config):
        raise ModelError(f"{directory}: {problem}")


def _stored(directory: Path) -> dict[str, Stored] | None:
    index = weight_index(directory)
    if index is None:
        single = weight_file(directory)
        return None if single.suffix == ".gguf" else read_header(single)
    files = sorted(set(index.values()))
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelError(
            f"{directory} lacks {len(missing)} of its {len(files)} files of weights, such as {missing[0]}: "
            "download them"
        )
    headers = {path: read_header(path) for path in files}
    for name, path in index.items():
        if name not in headers[path]:
            raise ModelError(f"{path} lacks the tensor {name}, which the index says is in it: download both")
    return {name: headers[path][name] for name, path in index.items()}


def _problems(
    stored: Mapping[str, Stored], expected: Mapping[str, Shape], config: ModelConfig
) -> Iterator[str]:
    """The likeliest cause comes first."""
    yield from _quantised(stored)
    missing = [name for name in expected if name not in stored]
    if missing and (prefix := _prefix(stored)) is not None:
        yield (
            f"tensors are called {prefix}… where model.… is expected ({_several(missing)}): save the "
            "language model by itself"
        )
    if missing:
        yield f"the weights lack {_several(missing)}, which config.json asks for: {_OF_ANOTHER}"
    yield from _left_over(stored, expected, config)
    for name, shape in expected.items():
        if stored[name].shape != shape:
            yield f"tensor {name} is {stored[name].shape}, config.json says {shape}: {_OF_ANOTHER}"


def _fp8_problems(stored: Mapping[str, Stored], fp8: Fp8Checkpoint) -> Iterator[str]:
    for name, tensor in stored.items():
        if tensor.dtype == E4M3:
            scale = fp8.scale_of(name, stored)
            if scale is None:
                yield f"tensor {name} is in 8 bits and has no scale: download the model again"
            elif problem := fp8.check_scale(tensor.shape, stored[scale].shape):
                yield f"tensor {scale} {problem}"


def _quantised(stored: Mapping[str, Stored]) -> Iterator[str]:
    advice = "config.json does not say how they are quantised: take the model in 16 bits"
    if scales := [name for name in stored if name.endswith(_SCALES)]:
        yield f"the weights hold scales, {_several(scales)}; {advice}"
    if odd := [name for name, tensor in stored.items() if tensor.dtype not in _DTYPES]:
        yield f"the weights hold {stored[odd[0]].dtype}, {_several(odd)}; {advice}"


def _prefix(stored: Iterable[str]) -> str | None:
    for end in ("embed_tokens.weight", "layers.0.mlp.down_proj.weight"):
        for name in stored:
            if name.endswith(end) and name != f"model.{end}":
                return name.removesuffix(end)
    return None


def _left_over(
    stored: Mapping[str, Stored], expected: Mapping[str, Shape], config: ModelConfig
) -> Iterator[str]:
    left = [name for name in stored if name.startswith(("model.", "lm_head.")) and name not in expected]
    left = [name for name in left if not name.endswith(_DERIVED)]
    beyond = f"model.layers.{config.layers}."
    if any(name.startswith(beyond) for name in left):
        yield f"the weights have a layer {config.layers}, but config.json says {config.layers} layers"
    if left:
        yield f"the decoder has no place for {_several(left)}: {_OF_ANOTHER}"


def _several(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors such as {names[0]}"
