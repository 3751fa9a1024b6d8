"""Digests that identify a model and its adapter.

`model_digest` covers the decoder's configuration with overrides, and the name, dtype, shape and first bytes
of each tensor. Profiles contain the model digest. `content_digest` covers every byte of the weights. Files of
cached KV contain the content digest, since KV of another model would make wrong answers. `mark_complete`
checks downloaded files against their published digests.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deltafront.workers.model.directory.headers import open_gguf, read_header
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import (
    ModelError,
    gguf_parts,
    read_json,
    weight_file,
    weight_index,
)
from deltafront.workers.model.directory.store import (
    adapter_directory,
    config_of,
    located,
)
from deltafront.workers.settings import ModelSpec

SAMPLE_BYTES = 4096
"""Number of first bytes of each tensor that are hashed. Training and merging change whole matrices, so that
the first bytes differ, too."""

_LEFT_OUT = ("positions", "eos_ids", "o_bias", "mlp_bias", "norms", "fused_qkv", "fused_gate_up",
             "rolling_buffer")  # fmt: skip
"""Fields of ModelConfig that are not hashed: they change no result, or follow from the tensors."""
_LEFT_OUT_AT_DEFAULT = """qk_norm_all_heads activation rotary_dim interleaved_rope unrotated_layers
    embedding_scale logit_scale attention_scale mixture window_layers window_rope norm_offset
    layer_norms norm_bias parallel qk_norm_after_rope attention_gate
    attention_sinks router_bias linear fused_q_gate head_padding""".split()
"""Fields that are hashed only if they differ from their default. Add every new field of ModelConfig to one of
these two lists. Otherwise all models' digests change, and no existing profile fits any more."""

COMPLETE = ".complete"
"""Name of the file that `mark_complete` writes into a checked directory. Pods wait for it."""
_SUMS, _HUB_NOTES = "SHA256SUMS", ".cache/huggingface/download"
_COMPARED = ("*.json", "*.jinja", "*.safetensors", "*.gguf", "tokenizer.model")
"""Patterns of the files that must have a published digest."""

_ADAPTER_SCALE = ("lora_alpha", "use_rslora")

_PIECE_BYTES = 1 << 28
"""Number of bytes of a file that one thread hashes at a time."""
_THREADS = 8
_SETTLED_S = 2.0
"""Minimum age of a file in seconds for its digest to be cached. A later change of a younger file might not
change its modification time, on file systems with coarse clocks."""

Tensor = tuple[str, str, list[int], bytes]
"""Name, dtype, shape and first bytes."""


def model_digest(model: ModelSpec) -> str:
    """Return the model's digest, a sha256 in hexadecimal. Raises ModelError."""
    model, digest = located(model), hashlib.sha256()
    _add(digest, _about(config_of(model)), _weights(Path(model.path)))
    if model.adapter is not None:
        adapter = adapter_directory(model.adapter)
        config = read_json(adapter / "adapter_config.json")
        scale = {key: config.get(key) or False for key in _ADAPTER_SCALE}
        _add(digest, scale, _safetensors(adapter / "adapter_model.safetensors"))
    return digest.hexdigest()


def checked_model(model: ModelSpec) -> ModelSpec:
    """Return the spec with the model's local directory as path, after a check of `model_digest`.

    The check detects another model or revision. `mark_complete` detects damaged files.

    Raises:
        ModelError: There is no such model, or its digest is not `model.digest`.
    """
    local = located(model)
    if model.digest is not None and (found := model_digest(local)) != model.digest:
        raise ModelError(
            f"model.path = {model.path!r}: this node's files have the digest {found[:16]}…, the service was "
            f"started with {model.digest[:16]}…: give every node the same files"
        )
    return local


def content_digest(model: ModelSpec, cache: Path | None = None) -> str:
    """Return a digest of `model_digest` and every byte of weights and adapter. Raises ModelError.

    The first call reads all files, with eight threads: the 140 GB of a 70B model take half a minute from a
    disk of 5 GB/s. Later calls only compare each file's size, times and inode.

    Args:
        cache: Directory where files' digests are cached; None: deltafront/digests in XDG_CACHE_HOME or
            ~/.cache.
    """
    model = located(model)
    files = _weight_files(Path(model.path))
    if model.adapter is not None:
        files.append(adapter_directory(model.adapter) / "adapter_model.safetensors")
    try:
        digests = [_file_digest(file, _cache() if cache is None else cache) for file in files]
    except OSError as error:
        raise ModelError(f"{error.filename or model.path} cannot be read: {error.strerror}") from None
    return hashlib.sha256(" ".join([model_digest(model), *digests]).encode()).hexdigest()


def _weight_files(directory: Path) -> list[Path]:
    index = weight_index(directory)
    if index is not None:
        return sorted(set(index.values()))
    single = weight_file(directory)
    return gguf_parts(single) if single.suffix == ".gguf" else [single]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltafront" / "digests"


def _file_digest(path: Path, cache: Path) -> str:
    """Return a file's digest from the cache, or compute it while other processes wait. The cache is not used
    if it cannot be written."""
    kept = cache / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = stack.enter_context(
                open(os.open(kept, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
            )
        except OSError:
            return _hashed(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        before, held = _identity(path), file.read().split()
        if held[:-1] == before:
            return held[-1]
        digest = _hashed(path)
        if _identity(path) == before and time.time() - path.stat().st_mtime > _SETTLED_S:
            with contextlib.suppress(OSError):  # a full disk
                file.seek(0)
                file.truncate()
                file.write(" ".join([*before, digest]))
        return digest


def _identity(path: Path) -> list[str]:
    status = path.stat()
    numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    return [str(number) for number in numbers]


def _hashed(path: Path) -> str:
    """Hash a file: several threads hash pieces, and the result is a hash of the pieces' digests."""
    starts = range(0, path.stat().st_size, _PIECE_BYTES)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        pieces = list(threads.map(lambda start: _hashed_piece(path, start), starts))
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def _hashed_piece(path: Path, start: int) -> bytes:
    digest, buffer, left = hashlib.sha256(), bytearray(1 << 20), _PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(memoryview(buffer)[:left])):
            digest.update(memoryview(buffer)[:count])
            left -= count
    return digest.digest()


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


def mark_complete(directory: Path) -> int:
    """Check a model's files against their published digests, then write the file COMPLETE.

    The digests come from SHA256SUMS in the directory, or else from the metadata that huggingface_hub writes
    with its downloads.

    Returns:
        The number of checked files.

    Raises:
        ModelError: A file differs, is missing or has no digest. COMPLETE is then not written.
    """
    mark = directory / COMPLETE
    mark.unlink(missing_ok=True)
    digests = _given_digests(directory)
    present = {path.name for pattern in _COMPARED for path in directory.glob(pattern)}
    if unlisted := sorted(present - digests.keys()):
        raise ModelError(f"{directory}: no digest of {', '.join(unlisted)}: {_sums_advice(directory)}")
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda item: _differs(directory / item[0], item[1]), sorted(digests.items()))
        if problems := [*filter(None, found)]:
            raise ModelError(f"{'; '.join(problems)}: fetch or copy these files again")
    mark.touch()
    return len(digests)


def _given_digests(directory: Path) -> dict[str, str]:
    try:
        if (sums := directory / _SUMS).is_file():
            lines = (line.split(maxsplit=1) for line in sums.read_text().splitlines() if line.strip())
            digests = {name.strip().lstrip("*"): digest for digest, name in lines}
            digests.pop(_SUMS, None)  # `sha256sum *` includes an older SHA256SUMS
            return digests
        notes = (directory / _HUB_NOTES).glob("*.metadata")
        return {note.name.removesuffix(".metadata"): note.read_text().split()[1] for note in notes}
    except (OSError, UnicodeDecodeError, ValueError, IndexError) as error:
        raise ModelError(f"{directory}: its list of digests cannot be read: {error}") from None


def _sums_advice(directory: Path) -> str:
    return f"where you trust them, write it: cd {directory} && sha256sum * > {_SUMS}"


def _differs(path: Path, expected: str) -> str:
    """Compare a file with its sha256, or with its git blob sha1 (the hub uses these for small files). Returns
    the problem; empty if equal."""
    if not path.is_file():
        return f"{path} is missing"
    with path.open("rb") as file:
        if len(expected) == 40:
            header = f"blob {path.stat().st_size}\0".encode()
            digest = hashlib.sha1(header + file.read()).hexdigest()
        else:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == expected else f"{path} has the digest {digest[:16]}…, not {expected[:16]}…"
