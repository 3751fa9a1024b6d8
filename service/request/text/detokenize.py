"""Token ids to text while they arrive: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 16
"""Tokens held back for an unfinished character. UTF-8 needs at most 4 bytes; more means garbage."""
_MOST_SILENT = 16
"""Tokens decoded again that have no text. More are special ones, which change nothing."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Pushes of ids return text whose concatenation is `decode(all ids)`.

    Text is the difference of two decodings that start at the same token, because tokenizers treat the
    first token of a sequence specially (a leading space is dropped); it is one that has text. A decoding
    that ends in U+FFFD is taken for an unfinished character and held back.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._unread()
        if text.endswith(_UNFINISHED) and len(self._ids) - self._read < _MOST_HELD:
            return ""
        if text:
            self._window = self._read
        elif len(self._ids) - self._window > _MOST_SILENT:
            self._ids.pop()
        self._read = len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back, with U+FFFD for bytes that never became a character."""
        text = self._unread()
        self._window = self._read = len(self._ids)
        return text

    def _unread(self) -> str:
        known = self._decode(self._ids[self._window : self._read])
        return self._decode(self._ids[self._window :])[len(known) :]


@dataclass(frozen=True)
class Match:
    """text may be shown; stopped: a stop string was found right after it."""

    text: str
    stopped: bool = False


class StopMatcher:
    """Holds back text that may be the start of a stop string. The stop string itself is never shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Match:
        held = self._held + text
        found = [position for stop in self._stops if (position := held.find(stop)) >= 0]
        if found:
            self._held = ""
            return Match(held[: min(found)], stopped=True)
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return Match(held[: len(held) - keep])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0


class AnswerText:
    """Detokeniser and stop matcher, one after the other."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stops)

    def push(self, token_id: int) -> Match:
        return self._matcher.push(self._detokenizer.push(token_id))

    def flush(self) -> Match:
        """The rest of the answer; even the last held characters may complete a stop string."""
        match = self._matcher.push(self._detokenizer.flush())
        return match if match.stopped else Match(match.text + self._matcher.flush())
