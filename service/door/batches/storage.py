"""A folder on any file system that fsspec knows. Its calls run in threads of their own, because storage that
hangs must not take the door's other threads."""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

_T = TypeVar("_T")
_THREADS = 8
_BUFFER_BYTES = 1 << 20


class Storage:
    """Names are relative to the folder. Every method but `run` blocks: call it in `run`.

    Args:
        place: A path, or a URL such as s3://bucket/folder.

    Raises:
        ImportError, ValueError: fsspec has no file system for this place.
    """

    def __init__(self, place: str) -> None:
        self._fs, self._root = url_to_fs(place, use_listings_cache=False, skip_instance_cache=True)
        self._local = isinstance(self._fs, LocalFileSystem)
        self._pool = ThreadPoolExecutor(_THREADS, "batches")

    async def run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError."""
        return bytes(self._fs.cat_file(self._path(name), start=start, end=end))

    def read_all(self, names: Sequence[str]) -> list[bytes]:
        """Return several files' bytes. Object storage is asked for all at once. Raises FileNotFoundError."""
        paths = [self._path(name) for name in names]
        found: list[bytes] = self._fs.cat_ranges(paths, None, None, on_error="raise")
        return found

    def open(self, name: str) -> io.BufferedReader:
        """Open a file to read it in order. Raises FileNotFoundError."""
        return io.BufferedReader(self._fs.open(self._path(name), "rb"), _BUFFER_BYTES)

    def write(self, name: str, chunks: Iterable[bytes]) -> int:
        """Write a file, and return its bytes. A reader sees the old file or the new one, because object
        storage shows a file when it is complete, and a local file is moved to its name."""
        path = self._path(name)
        if not self._local:
            return self._write(path, chunks)
        folder, _, last = path.rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        part = f"{folder}/.{last}.{secrets.token_hex(4)}"
        try:
            size = self._write(part, chunks)
            self._fs.mv(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(part)
            raise
        return size

    def _write(self, path: str, chunks: Iterable[bytes]) -> int:
        with self._fs.open(path, "wb") as file:
            size: int = sum(file.write(chunk) for chunk in chunks)
            return size

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none without such a folder."""
        try:
            paths = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(name for name in names if not name.startswith("."))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each folder in a folder, with all below it."""
        path = self._path(folder)
        sizes: dict[str, int] = {}
        for name, found in self._fs.find(path, detail=True).items():
            inner = name[len(path) :].lstrip("/").partition("/")[0]
            sizes[inner] = sizes.get(inner, 0) + int(found["size"] or 0)
        return sizes

    def delete(self, name: str) -> None:
        """Delete a file or a folder, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"
