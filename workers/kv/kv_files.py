"""Groups of pages as files of safetensors, one for each group and rank.

A file is complete or not there: it is written under another name first. It says what K/V it is and a checksum
of each tensor. All workers of one model and configuration may share a directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from .pages.store_tier import StoreError

_SUFFIX = ".safetensors"
_UNFINISHED_S = 3600.0
"""A file that is being written for so long is of a worker that died."""


class KVFiles:
    """form: names everything that K/V depends on but the prompt and its key: model, types, shapes, rank."""

    def __init__(self, directory: Path, form: str) -> None:
        self._form = form
        self._folder = directory / hashlib.sha256(form.encode()).hexdigest()[:32]
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.part"):
            if path.stat().st_mtime < time.time() - _UNFINISHED_S:
                path.unlink(missing_ok=True)

    def names(self) -> Iterator[bytes]:
        """The least recently used first."""
        files = ((path.stat().st_mtime, path.name) for path in self._folder.glob(f"*{_SUFFIX}"))
        for _used, file in sorted(files):
            yield bytes.fromhex(file.removesuffix(_SUFFIX))

    def save(self, name: bytes, sides: Sequence[torch.Tensor]) -> None:
        """Raises StoreError."""
        path = self._path(name)
        unfinished = path.with_suffix(f".{secrets.token_hex(4)}.part")
        tensors = {str(n): side.contiguous() for n, side in enumerate(sides)}
        sums = {key: str(_checksum(x)) for key, x in tensors.items()}
        try:
            save_file(tensors, unfinished, metadata={"form": self._form, **sums})
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise StoreError(f"{path}: {error}") from error

    def load(self, name: bytes) -> list[torch.Tensor]:
        """Raises StoreError for a file that is gone, cut short, changed, or of other K/V."""
        path = self._path(name)
        try:
            os.utime(path)
            content = path.read_bytes()  # long reads: a mapped file would be read in small pieces
            tensors = load(content)
            metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get(
                "__metadata__", {}
            )
            sides = [tensors[str(n)] for n in range(len(tensors))]
        except (OSError, SafetensorError, KeyError) as error:
            raise StoreError(f"{path}: {error}") from error
        if metadata.get("form") != self._form:
            raise StoreError(f"{path}: it is of other K/V: {metadata.get('form')}")
        if any(metadata.get(str(n)) != str(_checksum(side)) for n, side in enumerate(sides)):
            raise StoreError(f"{path}: it has changed since it was written")
        return sides

    def remove(self, name: bytes) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self._folder / (name.hex() + _SUFFIX)


def _checksum(x: torch.Tensor) -> int:
    """Of its type and shape, too: they stand in the file's header."""
    form = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data, form)
