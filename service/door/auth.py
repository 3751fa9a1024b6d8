"""Bearer tokens from a file: who calls, and what each may have at once."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import Unauthenticated
from ..request.callers import Caller, Quota
from .tls import Gate

ANYONE = Caller("", "anyone")
"""Everybody, and the owner of everything, when no token file is configured."""
_NAME_DIGITS = 12

log = logging.getLogger(__name__)


def digest(token: str) -> str:
    """An owner's name that says nothing about its token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class TokenFile:
    """One token a line, then what is special about it: `TOKEN [name=…] [requests=N] [tokens=N]`. `#` starts a
    comment line. Read again whenever the file changes.

    name: for logs; by default the beginning of the token's digest. requests, tokens: its `Quota`, where
    it differs from `usual`; 0: no limit.

    Raises OSError if the file cannot be read, and ValueError if it holds no token or a line that makes no
    sense when first opened. A line that makes no sense later is logged and lets nobody in, as does a file
    that is gone.
    """

    def __init__(self, path: Path, usual: Quota) -> None:
        self._path = path
        self._usual = usual
        self._stamp = _stamp(path)
        self._callers, wrong = self._read()
        if wrong:
            raise ValueError(f"{path}, {wrong[0]}")
        if not self._callers:
            raise ValueError(f"{path} holds no token: write one a line, or leave out the token file")

    def caller(self, token: str) -> Caller | None:
        """Whose token it is. Takes as long for one that is right as for one that is not."""
        self._refresh()
        given, found = digest(token), None
        for caller in self._callers:
            if hmac.compare_digest(caller.owner, given):
                found = caller
        return found

    def _refresh(self) -> None:
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._callers, wrong = self._read()
            self._stamp = stamp
        except OSError as error:
            if self._callers:
                log.error("the token file cannot be read, so nobody may call: %s", error)
            self._callers, self._stamp = (), (0, 0, 0)
            return
        for trouble in wrong:
            log.error("%s, %s", self._path, trouble)
        log.info("the token file was read again: %d tokens", len(self._callers))

    def _read(self) -> tuple[tuple[Caller, ...], list[str]]:
        """The callers, and what is wrong with lines that name none."""
        callers, wrong = [], []
        for number, raw in enumerate(self._path.read_bytes().splitlines(), 1):
            try:
                line = raw.decode("utf-8").strip()
                if line and not line.startswith("#"):
                    callers.append(_caller(line, self._usual))
            except UnicodeDecodeError:
                wrong.append(f"line {number}: it is not UTF-8")
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
        return tuple(callers), wrong


@dataclass(frozen=True)
class Authenticator:
    """Finds the caller of a request; everybody is ANYONE when there is no token file. gate: lets only
    encrypted requests in; None: all."""

    tokens: TokenFile | None
    gate: Gate | None = None

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Raises Unauthenticated."""
        metadata = list(metadata)
        if self.gate is not None:
            self.gate.check(metadata)
        if self.tokens is None:
            return ANYONE
        given = [value for key, value in metadata if key.lower() == "authorization"]
        if len(given) != 1:
            raise Unauthenticated("this server needs a token: send `authorization: Bearer <token>`")
        value = given[0].decode("latin-1") if isinstance(given[0], bytes) else given[0]
        scheme, _, token = value.partition(" ")
        found = self.tokens.caller(token.strip())
        if scheme.lower() != "bearer" or found is None:
            raise Unauthenticated("the token is not known to this server")
        return found


def _stamp(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


def _caller(line: str, usual: Quota) -> Caller:
    """Raises ValueError, in words that do not show the token."""
    token, *pairs = line.split()
    owner = digest(token)
    name, quota = owner[:_NAME_DIGITS], usual
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key == "name" and value:
            name = value
        elif key == "requests" and value.isdecimal():
            quota = replace(quota, requests=int(value) or None)
        elif key == "tokens" and value.isdecimal():
            quota = replace(quota, tokens=int(value) or None)
        else:
            raise ValueError("after a token only name=…, requests=N and tokens=N may follow")
    return Caller(owner, name, quota)
