"""Saves groups of pages as safetensors files, one file per group and tensor-parallel rank.

A file is first written under a temporary name, so it is either complete or absent. It contains the form of
its KV (`host_memory.kv_form`) and a checksum of each tensor. All workers of one model and configuration may
share a directory.

A group's name is a hash of the prompt's tokens. If this hash were the file's name, a user who can list the
directory could test whether a text was sent. The file's name is therefore an HMAC of the group's name with a
secret of the directory. The file contains the group's name.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from deltafront.workers.kv.pages.store_tier import StoreError

_SUFFIX = ".safetensors"
_OURS = re.compile(rf"[0-9a-f]{{64}}{re.escape(_SUFFIX)}")
_SECRET, _SECRET_BYTES = ".secret", 32
_LONGEST_HEADER = 1 << 20
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""Errors of reading a file that is gone, truncated or something else. RuntimeError: JSON is nested too
deeply."""
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
_UNFINISHED_S = 3600.0
"""Seconds after which an unfinished file counts as left by a dead worker."""

log = logging.getLogger(__name__)


class KVFiles:
    """One rank's files in a directory.

    Args:
        form: The form of the rank's KV, from `host_memory.kv_form`.
    Raises:
        StoreError: The directory cannot be used.
    """

    def __init__(self, directory: Path, form: str) -> None:
        self._form = form
        self._own = threading.local()
        self._folder = directory / hashlib.sha256(form.encode()).hexdigest()[:32]
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._secret = _secret_of(directory)
        except OSError as error:
            raise StoreError(f"decode.store: {error}") from error
        for path in self._folder.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):  # another worker has finished or removed it
                if path.stat().st_mtime < time.time() - _UNFINISHED_S:
                    path.unlink()

    def saved(self) -> list[tuple[bytes, float]]:
        """Return each group's name and date, earliest date first. Dates are seconds from now.

        A date in the future is the end of the group's retention, a date in the past its last use. Other files
        are skipped.
        """
        now, found = time.time(), []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                name = self._name_in(path)
                found.append((path.stat().st_mtime - now, name))
            except FileNotFoundError:
                continue
            except _BROKEN as error:
                log.warning("%s is no group of this store, and is left alone: %s", path, error)
        return [(name, date) for date, name in sorted(found)]

    def _name_in(self, path: Path) -> bytes:
        """Return the name of the page group in a file. Raises one of _BROKEN if the file holds none."""
        if not _OURS.fullmatch(path.name) or not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError("other files have other names")
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), _LONGEST_HEADER))
        name = bytes.fromhex(json.loads(header)["__metadata__"]["name"])
        if self._path(name).name != path.name:
            raise ValueError("it was saved under another name")
        return name

    def date(self, groups: Sequence[tuple[bytes, float]]) -> None:
        """Set the groups' dates (see `saved`) as the files' modification times. Raises StoreError.

        Files that another worker has removed are skipped.
        """
        now = time.time()
        for name, seconds in groups:
            try:
                os.utime(self._path(name), (now, now + seconds))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(str(error)) from error

    def save(self, name: bytes, sides: Sequence[torch.Tensor]) -> None:
        """Write a group's file. Raises StoreError."""
        path = self._path(name)
        unfinished = path.with_suffix(f".{secrets.token_hex(4)}.part")
        tensors = {str(n): side.contiguous() for n, side in enumerate(sides)}
        sums = {key: str(_checksum(x)) for key, x in tensors.items()}
        try:
            save_file(tensors, unfinished, metadata={"form": self._form, "name": name.hex(), **sums})
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise StoreError(f"{path}: {error}") from error

    def load(self, name: bytes) -> list[torch.Tensor]:
        """Load a group's KV tensors. This thread's next call overwrites them.

        Raises:
            StoreError: The file is gone, truncated or changed, or has another form of KV.
        """
        path = self._path(name)
        try:
            content = self._read(path)
            start = 8 + int.from_bytes(content[:8], "little")
            about = json.loads(bytes(content[8:start]))
            metadata = about.pop("__metadata__")
            sides = [_tensor(content, start, about[str(n)]) for n in range(len(about))]
        except _BROKEN as error:
            raise StoreError(f"{path}: {error}") from error
        if metadata.get("form") != self._form:
            raise StoreError(f"{path}: it is of other KV: {metadata.get('form')}")
        if any(metadata.get(str(n)) != str(_checksum(side)) for n, side in enumerate(sides)):
            raise StoreError(f"{path}: it has changed since it was written")
        return sides

    def _read(self, path: Path) -> memoryview:
        """Read a file into this thread's buffer. Allocating new memory would take longer than reading."""
        with path.open("rb", buffering=0) as file:
            size, done = os.fstat(file.fileno()).st_size, 0
            if size > len(getattr(self._own, "room", b"")):
                self._own.room = bytearray(size)
            content = memoryview(self._own.room)[:size]
            while done < size and (count := file.readinto(content[done:])):
                done += count
        if done < size:
            raise ValueError(f"{done} of {size} bytes can be read")
        return content

    def remove(self, name: bytes) -> None:
        """Remove a group's file, if it exists. Raises StoreError."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(str(error)) from error

    def _path(self, name: bytes) -> Path:
        return self._folder / (hmac.digest(self._secret, name, "sha256").hex() + _SUFFIX)


def _secret_of(directory: Path) -> bytes:
    """Return the directory's secret. The first worker makes it, with an atomic link. Raises StoreError."""
    path = directory / _SECRET
    if not path.exists():
        new = path.with_suffix(f".{secrets.token_hex(4)}.part")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
        new.unlink()
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise StoreError(f"decode.store: {path} is not a secret of {_SECRET_BYTES} bytes: empty the store")
    return secret


def _tensor(content: memoryview, start: int, about: Mapping[str, Any]) -> torch.Tensor:
    begin, end = about["data_offsets"]
    flat = torch.frombuffer(content[start + begin : start + end], dtype=_TYPES[about["dtype"]])
    return flat.view(about["shape"])


def _checksum(x: torch.Tensor) -> int:
    form = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data, form)
