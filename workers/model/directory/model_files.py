"""Reads the files of a model directory, and finds the weight files."""

import contextlib
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WEIGHT_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_GGUF_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The file name of a part that llama-gguf-split has written."""

_LFS_POINTER = b"version https://git-lfs.github.com/"
_MOST = 10_000
"""Limit for the number of layers or experts. More would make the checks slow, and no model has more."""
UNFORESEEN = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError)
"""Exceptions that file readers may raise for unexpected content."""


class ModelError(ValueError):
    """A model cannot be used. The message says what to do."""


@contextlib.contextmanager
def broken(path: Path) -> Iterator[None]:
    """Turn unexpected exceptions about a file's content into a ModelError that names the file."""
    try:
        yield
    except ModelError:
        raise
    except UNFORESEEN as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"{path} is broken ({reason}): take it from another copy of this model") from error


def check_file(path: Path) -> None:
    """Raise ModelError for a folder, pipe, device or Git LFS pointer, and OSError if the file is missing.

    Reading a pipe would block, and reading a device may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ModelError(f"{path} is a folder, pipe or device: a file is needed")
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelError(
                f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` there, or download it"
            )


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ModelError, which names the file."""
    try:
        check_file(path)
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: a model directory needs a {path.name}") from None
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}: download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not contain a JSON object, but a {type(content).__name__}")
    return content


def read_json_or_empty(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def positive_int(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} = {value!r} is not a positive whole number")
    return value


def few(raw: Mapping[str, Any], key: str, value: int) -> int:
    """Check and return a number of layers or experts. Raises ModelError if it is implausibly large."""
    if value > _MOST:
        raise ModelError(f"config.json: {key} = {raw[key]!r} is more than any model has")
    return value


def natural(raw: Mapping[str, Any], key: str) -> int:
    """Read a positive integer from a key; 0 if the key is missing. Raises ModelError."""
    return positive_int(raw, key) if raw.get(key) else 0


def positive_number(where: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{where}: {key} = {value!r} is not a number above 0")
    return float(value)


def weight_index(directory: Path) -> dict[str, Path] | None:
    """Return each tensor's file from the index; None if there is no index. Raises ModelError."""
    path = directory / WEIGHT_INDEX
    if not path.exists():
        return None
    try:
        return {name: directory / file for name, file in read_json(path)["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors index: {error!r}") from None


def weight_file(directory: Path) -> Path:
    """Return the only weight file; the first part if it is a split GGUF. Raises ModelError."""
    single = directory / _SINGLE
    if single.exists():
        return single
    if len(ggufs := gguf_files(directory)) == 1:
        return ggufs[0]
    counts = {".safetensors": len(list(directory.glob("*.safetensors"))), ".gguf": len(ggufs)}
    others = [f"{count} other {kind} files" for kind, count in counts.items() if count]
    raise ModelError(
        f"no weights in {directory}: looked for {WEIGHT_INDEX}, {_SINGLE} and one .gguf, found "
        f"{' and '.join(others) or 'none of them'}"
    )


def gguf_parts(path: Path) -> list[Path]:
    """Return all parts of a GGUF file in order. Raises ModelError if one is missing."""
    match = _GGUF_PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    parts = [path.with_name(f"{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    if lost := [part.name for part in parts if not part.is_file()]:
        raise ModelError(f"{path} is one of {count} parts, and {', '.join(lost)} beside it are not there")
    return parts


def gguf_files(directory: Path) -> list[Path]:
    """Return the GGUF files of a folder, with only the first part of each split file. Raises ModelError."""
    return sorted({gguf_parts(path)[0] for path in directory.glob("*.gguf")})
