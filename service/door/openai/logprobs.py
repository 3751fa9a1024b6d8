"""Log-probabilities of an answer's tokens, in the formats of chats and completions."""

import codecs
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from deltafront.service.errors import InvalidArgument
from deltafront.service.request.check import MAX_TOP_LOGPROBS
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.workers.messages.events import Token

Json = dict[str, Any]
_LEAST = -9999.0
"""OpenAI's log-probability of an impossible token, because JSON has no infinity."""


class Logprobs(Protocol):
    """Collects tokens. Each chunk of a stream gets the tokens since the last chunk."""

    def add(self, token: Token) -> None: ...

    def take(self) -> Json | None: ...


@dataclass
class ChatLogprobs:
    """Log-probabilities of a chat: one entry for each token, including the end token.

    Args:
        top: Number of likeliest tokens in an entry.
    """

    token_bytes: TokenBytes
    top: int
    _entries: list[Json] = field(default_factory=list)

    def add(self, token: Token) -> None:
        likeliest = [self._entry(one.token_id, one.logprob) for one in token.top[: self.top]]
        self._entries.append({**self._entry(token.token_id, token.logprob), "top_logprobs": likeliest})

    def take(self) -> Json | None:
        taken = self.entries()
        return {"content": taken, "refusal": None} if taken else None

    def entries(self) -> list[Json]:
        """Return the entries since the last call."""
        taken, self._entries = self._entries, []
        return taken

    def _entry(self, token_id: int, logprob: float) -> Json:
        data = self.token_bytes(token_id)
        return {"token": shown(data), "logprob": max(logprob, _LEAST), "bytes": list(data)}


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass
class TextLogprobs:
    """Log-probabilities of a completion. `text_offset` counts characters, so a token inside a character has
    the offset of that character.

    Args:
        top: Number of likeliest tokens at each place, in addition to the token itself.
    """

    token_bytes: TokenBytes
    top: int
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _offset: int = 0
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def add(self, token: Token) -> None:
        logprob, top = (None, None) if math.isnan(token.logprob) else self._told(token)
        self._rows.append((shown(self.token_bytes(token.token_id)), logprob, top, self._offset))
        self._offset += len(self._decoder.decode(self.token_bytes.shown(token.token_id)))

    def _told(self, token: Token) -> tuple[float, Json]:
        likeliest = {one.token_id: one.logprob for one in token.top[: self.top]}
        likeliest.setdefault(token.token_id, token.logprob)
        return max(token.logprob, _LEAST), self._shown(likeliest)

    def take(self) -> Json | None:
        taken, self._rows = self._rows, []
        return dict(zip(_LISTS, map(list, zip(*taken, strict=True)), strict=True)) if taken else None

    def _shown(self, likeliest: dict[int, float]) -> Json:
        found: Json = {}
        for token_id, logprob in likeliest.items():
            found.setdefault(shown(self.token_bytes(token_id)), max(logprob, _LEAST))
        return found


def shown(data: bytes) -> str:
    """Return a token's text. Bytes of incomplete characters are escaped as in OpenAI's API."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_top(logprobs: object, top: int | None) -> int | None:
    """Return the number of likeliest tokens that a chat requests; None: no log-probabilities. Raises
    InvalidArgument."""
    if logprobs not in (None, False, True, 0) or (logprobs == 1 and logprobs is not True):
        raise InvalidArgument("logprobs", "must be true or false")
    if logprobs:
        return top or 0
    if top:
        raise InvalidArgument("top_logprobs", "needs logprobs: true")
    return None


def text_top(logprobs: object) -> int | None:
    """Return the number of likeliest tokens that a completion requests. Raises InvalidArgument."""
    if logprobs is None or logprobs is False:
        return None
    if type(logprobs) is not int or not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidArgument("logprobs", f"must be a whole number from 0 to {MAX_TOP_LOGPROBS}")
    return logprobs
