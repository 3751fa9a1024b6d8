"""Turns token ids into text as they arrive. Sends whole characters, and nothing after a stop string."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 16
"""The most tokens that are held back. An unfinished character has at most 4 bytes, so more tokens are garbage
or special tokens without text."""


class Detokenizer:
    """Decodes tokens incrementally by tokenizers' DecodeStream. The pieces add up to the decoding of all ids.

    On bytes that form no character, a DecodeStream waits forever and decodes all of them at each step; it
    raises if later tokens change text that was already returned. Then the tokens that it holds are decoded
    separately, and a new stream begins after the last complete text.

    Args:
        spoken: Ids of special tokens that are decoded to their text.
    """

    def __init__(self, tokenizer: Tokenizer, spoken: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._spoken = spoken or {}
        self._before: list[int] = []
        self._held: list[int] = []
        self._stream = self._begin()

    def push(self, token_id: int) -> str:
        if token_id in self._spoken:
            return self.flush() + self._spoken[token_id]
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises nothing narrower
            return self.flush()
        if text:
            self._before, self._held = self._held, []
        elif len(self._held) > _MAX_HELD_TOKENS:
            return self.flush()
        return text or ""

    def flush(self) -> str:
        """Return the remaining text, with U+FFFD for incomplete characters."""
        text = str(self._tokenizer.decode(self._held)) if self._held else ""
        if text and not text.endswith(_UNFINISHED):
            self._before = self._held
        self._held, self._stream = [], self._begin()
        return text

    def _begin(self) -> DecodeStream:
        """Start a stream after earlier tokens, because the first token of a text loses its space."""
        return DecodeStream(ids=self._before, skip_special_tokens=True)


@dataclass(frozen=True)
class Match:
    """Text that may be sent, and the stop string found after it; empty if there is none."""

    text: str
    stop: str = ""


class StopMatcher:
    """Holds back text that may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Match:
        held = self._held + text
        found = [(position, stop) for stop in self._stops if (position := held.find(stop)) >= 0]
        if found:
            self._held, (position, stop) = "", min(found)
            return Match(held[:position], stop)
        keep = max((overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return Match(held[: len(held) - keep])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0


class AnswerText:
    """Turns an answer's tokens into text. The client already has the text of `answered`. EOS tokens have
    none.

    Attributes:
        answered: The text of each token of `answered`.

    Args:
        min_tokens: A stop string within the text of the first `min_tokens` tokens does not end the answer.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        eos_ids: Collection[int] = (),
        answered: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._min_tokens = min_tokens
        self._matcher = StopMatcher(stops)
        self._eos_ids = eos_ids
        self.ids: list[int] = []
        self.stop = ""
        self.answered = tuple(self.push(token_id).text for token_id in answered)

    @property
    def ended(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self._eos_ids

    def push(self, token_id: int) -> Match:
        self.ids.append(token_id)
        text = "" if self.ended else self._detokenizer.push(token_id)
        match = Match(text) if len(self.ids) <= self._min_tokens else self._matcher.push(text)
        self.stop = match.stop
        return match

    def flush(self) -> Match:
        """Return the held-back text, which may complete a stop string."""
        match = self._matcher.push(self._detokenizer.flush())
        return match if match.stop else Match(match.text + self._matcher.flush())
