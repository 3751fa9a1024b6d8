"""Log-probabilities of the tokens of an answer's text, without those of reasoning and tool calls."""

from collections import deque
from dataclasses import dataclass, field

from deltafront.service.door.edges.edge import Json
from deltafront.service.door.openai.logprobs import ChatLogprobs
from deltafront.service.request.answers import GenerateFinished
from deltafront.workers.messages.events import FinishReason, Token


@dataclass
class ContentLogprobs:
    """Takes all tokens, and returns the entries of those that bring content. A token without text of its own,
    such as a part of a character, belongs to the text after it; an end token to none.

    Args:
        places: Where each content begins in the answer's text (`AnswerSplitter.note_places`).
    """

    chat: ChatLogprobs
    places: deque[int]
    _length: int = 0
    _begin: int = 0
    """Where the first of `_pieces` begins."""
    _pieces: deque[tuple[int, list[Json]]] = field(default_factory=deque)
    """The end of each piece of text, and the entries of its tokens."""
    _taken: list[Json] = field(default_factory=list)

    def add(self, token: Token) -> None:
        self.chat.add(token)
        if token.text:
            self._add(token.text, self.chat.entries())

    def finish(self, finish: GenerateFinished) -> None:
        """Take the text that was held back until the answer's end."""
        entries = self.chat.entries()
        self._add(finish.text, entries[:-1] if finish.reason is FinishReason.STOP else entries)

    def content(self, text: str) -> None:
        """Take the next content that the splitter has returned."""
        begin = self.places.popleft()
        while self._pieces and self._begin < begin + len(text):
            self._begin, entries = self._pieces.popleft()
            if self._begin > begin:
                self._taken += entries

    def take(self) -> list[Json]:
        """Return the entries of the content since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def _add(self, text: str, entries: list[Json]) -> None:
        self._length += len(text)
        self._pieces.append((self._length, entries))
