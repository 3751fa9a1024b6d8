"""Bearer tokens from a file, and who owns what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ..errors import Unauthenticated

ANYONE = ""
"""The owner of everything when no token file is configured."""


def digest(token: str) -> str:
    """An owner's name that says nothing about its token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class TokenFile:
    """One token a line, `#` starts a comment line; read again whenever the file changes.

    Raises OSError if it cannot be read and ValueError if it holds no token when first opened. A file that
    later disappears lets nobody in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._owners = _owners(path)
        if not self._owners:
            raise ValueError(f"{path} holds no token: write one a line, or leave out the token file")

    def owners(self) -> frozenset[str]:
        try:
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._owners, self._stamp = _owners(self._path), stamp
        except OSError:
            self._owners, self._stamp = frozenset(), (0, 0, 0)
        return self._owners


class Authenticator:
    """Finds the owner of a call; everybody is ANYONE when there is no token file."""

    def __init__(self, tokens: TokenFile | None) -> None:
        self._tokens = tokens

    def owner(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The caller's digest. Raises Unauthenticated."""
        if self._tokens is None:
            return ANYONE
        given = [value for key, value in metadata if key.lower() == "authorization"]
        if len(given) != 1:
            raise Unauthenticated("this server needs a token: send `authorization: Bearer <token>`")
        value = given[0].decode("latin-1") if isinstance(given[0], bytes) else given[0]
        scheme, _, token = value.partition(" ")
        owner = digest(token.strip())
        if scheme.lower() != "bearer" or owner not in self._tokens.owners():
            raise Unauthenticated("the token is not known to this server")
        return owner


def _stamp(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


def _owners(path: Path) -> frozenset[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return frozenset(digest(line) for line in lines if line and not line.startswith("#"))
