"""Bearer tokens, read from a file with each caller's limits."""

import hashlib
import hmac
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from deltafront.service.door.tls import Gate
from deltafront.service.errors import Unauthenticated
from deltafront.service.request.callers import OTHERS, Caller, Quota
from deltafront.workers.messages.service_tiers import ServiceTier

ANYONE = Caller("", "anyone", best=ServiceTier.PRIORITY)
"""The caller of all requests if there is no token file."""
_NAME_DIGITS = 12
_LIMITS = tuple(field.name for field in fields(Quota))

log = logging.getLogger(__name__)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class TokenFile:
    """A file of lines `TOKEN [name=…] [best=TIER] [LIMIT=N …]` and `# comment`, read again when it changes.

    Limits are requests, tokens, requests_per_minute and tokens_per_minute. A token's name is for logs and
    metrics. Without one, logs have the beginning of the token's digest, metrics `others`. A token without
    limits of its own has the limits of `usual`; 0 is no limit. `best` is the best service tier that it may
    ask for (priority, default or flex; by default `default`). After the start, an invalid line or a missing
    file is logged, and its tokens are refused.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no token, or an invalid line.
    """

    def __init__(self, path: Path, usual: Quota) -> None:
        self._path = path
        self._usual = usual
        self._stamp = _stamp(path)
        self._callers, problems = self._read()
        if problems:
            raise ValueError(f"{path}, {problems[0]}")
        if not self._callers:
            raise ValueError(f"{path} holds no token: write one a line, or leave out the token file")

    def caller(self, token: str) -> Caller | None:
        """Return the caller that has a token."""
        return self.owner(digest(token))

    def owner(self, owner: str) -> Caller | None:
        """Return the caller with an owner id. Every comparison takes the same time."""
        self._refresh()
        match = None
        for caller in self._callers:
            if hmac.compare_digest(caller.owner, owner):
                match = caller
        return match

    def _refresh(self) -> None:
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._callers, problems = self._read()
            self._stamp = stamp
        except OSError as error:
            if self._callers:
                log.error("the token file cannot be read, so no caller is let in: %s", error)
            self._callers, self._stamp = (), (0, 0, 0)
            return
        for problem in problems:
            log.error("%s, %s", self._path, problem)
        log.info("the token file was read again: %d tokens", len(self._callers))

    def _read(self) -> tuple[tuple[Caller, ...], list[str]]:
        callers, problems = [], []
        for number, raw in enumerate(self._path.read_bytes().splitlines(), 1):
            try:
                line = raw.decode("utf-8").strip()
                if line and not line.startswith("#"):
                    callers.append(_caller(line, self._usual))
            except UnicodeDecodeError:
                problems.append(f"line {number}: it is not UTF-8")
            except ValueError as error:
                problems.append(f"line {number}: {error}")
        return tuple(callers), problems


@dataclass(frozen=True)
class Authenticator:
    """Authenticates a request's caller. With a `gate`, requests that did not come through the TLS port are
    refused."""

    tokens: TokenFile | None
    gate: Gate | None = None

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Return the caller that the metadata's token names. Raises Unauthenticated."""
        metadata = list(metadata)
        if self.gate is not None:
            self.gate.check(metadata)
        if self.tokens is None:
            return ANYONE
        match = self.tokens.caller(_token(metadata))
        if match is None:
            raise Unauthenticated("the token is not known to this server")
        return match

    def caller_of(self, owner: str) -> Caller:
        """Return a caller by its owner id, for work that goes on without its requests. Raises
        Unauthenticated if its token is not valid any more."""
        found = ANYONE if self.tokens is None and owner == ANYONE.owner else None
        if self.tokens is not None:
            found = self.tokens.owner(owner)
        if found is None:
            raise Unauthenticated("the token that asked for this is not known to this server any more")
        return found


def _token(metadata: Sequence[tuple[str, str | bytes]]) -> str:
    """Return the bearer token, or Anthropic's `x-api-key`. Raises Unauthenticated."""
    for name, scheme in (("authorization", "bearer "), ("x-api-key", "")):
        values = [value for key, value in metadata if key.lower() == name]
        if len(values) == 1:
            value = values[0].decode("latin-1") if isinstance(values[0], bytes) else values[0]
            return value[len(scheme) :].strip() if value.lower().startswith(scheme) else ""
        if values:
            break
    raise Unauthenticated("this server needs a token: send `authorization: Bearer <token>`")


def _stamp(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


def _caller(line: str, usual: Quota) -> Caller:
    """Parse a line of the token file. Raises ValueError, whose message does not contain the token."""
    token, *pairs = line.split()
    owner = digest(token)
    name, label, quota, best = owner[:_NAME_DIGITS], OTHERS, usual, ServiceTier.DEFAULT
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key == "name" and value:
            name = label = value
        elif key == "best" and value in list(ServiceTier):
            best = ServiceTier(value)
        elif key in _LIMITS and value.isdecimal():
            quota = replace(quota, **{key: int(value) or None})
        else:
            limits = "=N, ".join(_LIMITS)
            tiers = "|".join(ServiceTier)
            raise ValueError(f"after a token only name=…, best={tiers} and limits may follow: {limits}=N")
    return Caller(owner, name, quota, label, best)
