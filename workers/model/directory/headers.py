"""Checks weights against a configuration by the headers of their files, which takes milliseconds.

It reads no tensors except biases that must be 0.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from safetensors import SafetensorError, safe_open

from deltafront.workers.model.directory.model_config import EMBEDDING, HEAD, ModelConfig, Shape
from deltafront.workers.model.directory.model_files import (
    UNFORESEEN,
    ModelError,
    check_file,
    gguf_parts,
    parse_json,
    read_json,
    weight_file,
    weight_index,
)
from deltafront.workers.model.directory.quantised import (
    FLOATS,
    Quantised,
    has_kv_scales,
    is_ignored,
    quantised_form,
)
from deltafront.workers.model.directory.text_part import expert_parts, own_names
from deltafront.workers.model.family_registry import FAMILIES

_SCALES = tuple("_scale _scale_inv _scales _zero_point qweight qzeros g_idx _packed .absmax".split())
_DERIVED = ".rotary_emb.inv_freq"
"""Name of a tensor in old checkpoints that is not needed."""
_LONGEST_HEADER = 100_000_000
"""Maximum bytes of a header that the safetensors library reads."""
_MOST_VALUES = 1 << 23
"""Maximum number of metadata values in a GGUF file, since each is read separately. A large vocabulary has two
million."""
_OF_ANOTHER = "take weights and config.json of one model"


@dataclass(frozen=True)
class Stored:
    """The location of a tensor in a file: bytes begin .. end - 1."""

    path: Path
    dtype: str
    shape: Shape
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Stored]:
    """Return the locations of a safetensors file's tensors, by name. Raises ModelError.

    The file begins with the length of its JSON header (uint64). Offsets count from the header's end.
    """
    try:
        check_file(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > _LONGEST_HEADER:
                raise ValueError(f"its header has {start - 8} bytes")
            content = parse_json(file.read(start - 8))
        tensors = dict(_tensors(path, content, start))
    except ModelError:
        raise
    except (OSError, *UNFORESEEN) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
    end = max((tensor.end for tensor in tensors.values()), default=start)
    if size != end:
        raise ModelError(f"{path} has {size} bytes of {end}: download it again")
    try:
        with safe_open(path, "numpy"):  # checks that offsets fit shapes
            pass
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
    return tensors


class _BoundedReader(GGUFReader):  # type: ignore[misc]  # the library has no types
    """A `GGUFReader` that raises ValueError if a length or count in the metadata exceeds the file."""

    _values = 0

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        self._values += 1
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if not 0 <= end <= len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes of {end}")
        if self._values > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values beside its tensors")
        return super()._get(offset, dtype, count, override_order)


def open_gguf(path: Path) -> Any:
    """Open a GGUF file. Raises ModelError."""
    try:
        check_file(path)
        return _BoundedReader(path)
    except ModelError:
        raise
    except (OSError, *UNFORESEEN) as error:
        raise ModelError(f"{path} cannot be read as GGUF: {error}: download it again") from None


def _tensors(
    path: Path, content: Mapping[str, dict[str, list[int]]], start: int
) -> Iterator[tuple[str, Stored]]:
    for name, about in content.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            yield name, Stored(path, str(about["dtype"]), tuple(about["shape"]), start + begin, start + end)


def check_weights(directory: Path, config: ModelConfig) -> None:
    """Check that safetensors files have exactly the decoder's tensors. GGUF weights are checked at load.

    Each tensor must be complete and have the right shape. It must be unquantised, or quantised with all its
    parts. Raises ModelError.
    """
    stored = _stored(directory)
    if stored is None:
        for part in gguf_parts(weight_file(directory)):
            open_gguf(part)
        return
    stored = {
        own: stored[name] for own, name in own_names(stored, read_json(directory / "config.json")).items()
    }
    if (stacks := FAMILIES[config.architecture].stacks_experts) is not None:
        stored = _each_expert(stored, config, alternate=stacks == "alternating")
    _check_counts(directory, stored, config)
    form, expected = quantised_form(directory), config.shapes()
    if form is not None:
        stored = _as_meant(stored, {HEAD: expected[EMBEDDING]} | expected, form)
    if config.tied_embeddings and HEAD in stored:  # loading checks that both are equal
        table = expected[EMBEDDING] if EMBEDDING in stored else expected.pop(EMBEDDING)
        expected[HEAD] = table
    for problem in _problems(stored, expected, config, form):
        raise ModelError(f"{directory}: {problem}")


def _each_expert(stored: Mapping[str, Stored], config: ModelConfig, alternate: bool) -> dict[str, Stored]:
    """Replace each tensor that holds all experts of a layer by one entry for each expert."""
    experts = 0 if config.mixture is None else config.mixture.experts
    parts = expert_parts({name: one.shape for name, one in stored.items()}, experts, alternate)
    stacked = {part.stacked: stored[part.stacked] for part in parts.values()}
    own = {
        name: replace(whole, shape=part.shape(whole.shape))
        for name, part in parts.items()
        for whole in (stacked[part.stacked],)
    }
    return {name: one for name, one in stored.items() if name not in stacked} | own


def _check_counts(directory: Path, stored: Mapping[str, Stored], config: ModelConfig) -> None:
    """Raise ModelError if config.json names more layers and experts than there are tensors."""
    mixture = config.mixture
    experts = 0 if mixture is None else mixture.experts * (config.layers - len(mixture.dense_layers))
    if config.layers + experts > len(stored):
        of = f" with {mixture.experts} experts" if mixture is not None else ""
        raise ModelError(
            f"{directory}: config.json says {config.layers} layers{of}, but the weights hold {len(stored)} "
            f"tensors: {_OF_ANOTHER}"
        )


def quantisation_notes(directory: Path, held_in: str) -> Iterator[str]:
    """Yield a message for the user about each conversion of a checkpoint's quantised weights at load. Raises
    ModelError.

    `held_in` is the format in which stages keep the weights.
    """
    form = quantised_form(directory)
    if form is None:
        return
    if (form.kind, held_in) != ("FP8", "fp8"):
        other = "" if held_in == "fp8" else "; model.quantisation: fp8 holds 8 bits"
        yield f"{directory} holds weights in {form.name}: they are dequantised and held in {held_in}{other}"
    stored = _stored(directory) or {}
    if (form.kind, held_in) == ("FP8", "fp8") and _is_rescaled(stored, form):
        yield (
            f"{directory} holds weights in FP8 with scales of blocks or of whole matrices: they are rounded "
            "again, to one for each output, by which their error grows from 2.6% to 3.7%"
        )
    if has_kv_scales(stored):
        yield (
            f"{directory} holds scales of KV, which nothing uses: KV has 16 bits, or with decode.kv_dtype: "
            "int8 a scale of its own for each row"
        )


def _is_rescaled(stored: Mapping[str, Stored], form: Quantised) -> bool:
    scales = [one for name, one in stored.items() if name.endswith(("weight_scale", "weight_scale_inv"))]
    return form.block is not None or any(math.prod(one.shape) == 1 for one in scales)


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
    stored: Mapping[str, Stored],
    expected: Mapping[str, Shape],
    config: ModelConfig,
    form: Quantised | None,
) -> Iterator[str]:
    """Yield messages about missing, superfluous and misshapen tensors, the likeliest cause first."""
    yield from _quantised(stored, form)
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


def _as_meant(
    stored: Mapping[str, Stored], expected: Mapping[str, Shape], form: Quantised
) -> dict[str, Stored]:
    """Return `stored` with one entry per quantised matrix in place of its parts (such as scales), without
    ignored tensors. Raises ModelError if a part is missing or wrong."""
    meant = {name: tensor for name, tensor in stored.items() if not is_ignored(name)}
    stems = form.matrices(meant) | {
        name.removesuffix("weight") for name, one in meant.items() if one.dtype not in FLOATS
    }
    matrices = [name for name, shape in expected.items() if name[:-6] in stems and len(shape) == 2]
    if not matrices:
        file = next((tensor.path for tensor in stored.values()), "no file")
        scales = [name for name in meant if name.endswith(_SCALES)]
        holds = _several(scales) if scales else "no quantised matrix"
        raise ModelError(f"{file}: config.json says {form.name}, but the weights hold {holds}: {_OF_ANOTHER}")
    for name in matrices:
        _put_matrix(meant, name, expected[name], form)
        bias = f"{name[:-6]}bias"
        if bias not in expected and bias in meant and _is_zero(meant[bias]):  # AutoGPTQ adds it
            del meant[bias]
    return meant


def _put_matrix(meant: dict[str, Stored], name: str, shape: Shape, form: Quantised) -> None:
    stem = name.removesuffix("weight")
    parts = [(part, part.find(stem, meant)) for part in form.parts(*shape)]
    file = next((meant[found].path for _, found in parts if found), None) or meant[name].path
    for part, found in parts:
        if found is None and not part.optional:
            lacks = f"{file} lacks {stem}{part.names[0]}, without which {name} cannot be computed"
            raise ModelError(f"{lacks} ({form.name}): {_OF_ANOTHER}")
        if found is not None and (problem := part.problem((tensor := meant.pop(found)).dtype, tensor.shape)):
            raise ModelError(f"{tensor.path}: {found} {problem} for {shape} in {form.name}: {_OF_ANOTHER}")
    if name in meant:
        raise ModelError(f"{file}: {name} is given twice, as it is and in {form.name}: {_OF_ANOTHER}")
    meant[name] = Stored(file, "F32", shape, 0, 0)


def _is_zero(tensor: Stored) -> bool:
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        return not any(file.read(tensor.end - tensor.begin))


def _quantised(stored: Mapping[str, Stored], form: Quantised | None) -> Iterator[str]:
    says = "does not say how they are quantised" if form is None else f"says {form.name}"
    advice = f"config.json {says}: take the model in 16 bits"
    if scales := [name for name in stored if name.endswith(_SCALES)]:
        yield f"the weights hold scales, {_several(scales)}; {advice}"
    if odd := [name for name, tensor in stored.items() if tensor.dtype not in FLOATS]:
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
