"""Turns token ids into text while they arrive: whole characters, and nothing past a stop string."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 16
"""An unfinished character has at most 4 bytes. More tokens are garbage."""
_MAX_TEXTLESS_TOKENS = 16
"""More tokens without text are special ones, which change nothing."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Makes pieces of text that add up to `decode(all ids)`.

    A piece is the difference of two decodings from the same token with text, because tokenizers drop a
    sequence's leading space. A decoding that ends in U+FFFD is held back as an unfinished character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._unread()
        if text.endswith(_UNFINISHED) and len(self._ids) - self._read < _MAX_HELD_TOKENS:
            return ""
        if text:
            self._window = self._read
        elif len(self._ids) - self._window > _MAX_TEXTLESS_TOKENS:
            self._ids.pop()
        self._read = len(self._ids)
        return text

    def flush(self) -> str:
        """Return the rest, with U+FFFD for bytes that are no character."""
        text = self._unread()
        self._window = self._read = len(self._ids)
        return text

    def _unread(self) -> str:
        known = self._decode(self._ids[self._window : self._read])
        return self._decode(self._ids[self._window :])[len(known) :]


@dataclass(frozen=True)
class Match:
    """A stop string follows `text` if `stopped`."""

    text: str
    stopped: bool = False


class StopMatcher:
    """Holds back text that may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Match:
        held = self._held + text
        found = [position for stop in self._stops if (position := held.find(stop)) >= 0]
        if found:
            self._held = ""
            return Match(held[: min(found)], stopped=True)
        keep = max((overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return Match(held[: len(held) - keep])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0


class AnswerText:
    """An answer's token ids and text. The client already has `answered`. End tokens have no text."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str],
        eos_ids: Collection[int] = (),
        answered: Iterable[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stops)
        self._eos_ids = eos_ids
        self.ids: list[int] = []
        self.stopped = False
        for token_id in answered:
            self.push(token_id)

    @property
    def ended(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self._eos_ids

    def push(self, token_id: int) -> Match:
        self.ids.append(token_id)
        match = Match("") if self.ended else self._matcher.push(self._detokenizer.push(token_id))
        self.stopped = match.stopped
        return match

    def flush(self) -> Match:
        """Return the held-back text, which may complete a stop string."""
        match = self._matcher.push(self._detokenizer.flush())
        return match if match.stopped else Match(match.text + self._matcher.flush())
