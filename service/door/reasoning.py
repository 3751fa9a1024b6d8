"""Splits an answer's reasoning (`<think>…</think>` at its beginning) from its content."""

from enum import Enum, auto

from deltafront.service.request.answers import AnswerPart
from deltafront.service.request.text.detokenize import overlap
from deltafront.service.request.text.thoughts import CLOSE, OPEN


class _State(Enum):
    BEGINNING = auto()
    REASONING = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """Splits a streamed answer into reasoning and content. Text that may begin a marker is held back.

    Args:
        opened: True if the chat template has already written the opening marker.
        trims: True to leave out the white space between reasoning and content.

    Attributes:
        tokens: Tokens of the answer up to the closing marker; 0 without reasoning.
    """

    def __init__(self, opened: bool, trims: bool = False) -> None:
        self._state = _State.REASONING if opened else _State.BEGINNING
        self._held = ""
        self._trims = trims
        self.tokens = 0

    def push(self, text: str, tokens: int) -> AnswerPart:
        """Split the next text. tokens: tokens of the answer so far, including this text."""
        self._held += text
        if self._state is _State.BEGINNING:
            self._begin(self._held.lstrip())
        if self._state is _State.REASONING:
            self.tokens = tokens
            return self._trimmed(self._reason())
        if self._state is _State.CONTENT:
            return self._trimmed(AnswerPart(content=self._take()))
        return AnswerPart()

    def flush(self) -> AnswerPart:
        rest = self._take()
        return AnswerPart(reasoning=rest) if self._state is _State.REASONING else AnswerPart(content=rest)

    def _trimmed(self, part: AnswerPart) -> AnswerPart:
        if not (self._trims and self.tokens):
            return part
        content = part.content.lstrip()
        self._trims = not content
        return part._replace(content=content)

    def _begin(self, begun: str) -> None:
        if begun.startswith(OPEN):
            self._state, self._held = _State.REASONING, begun.removeprefix(OPEN)
        elif not OPEN.startswith(begun):
            self._state = _State.CONTENT

    def _reason(self) -> AnswerPart:
        reasoning, close, content = self._held.partition(CLOSE)
        if not close:
            return AnswerPart(reasoning=self._take(len(self._held) - overlap(self._held, CLOSE)))
        self._state, self._held = _State.CONTENT, ""
        return AnswerPart(reasoning, content)

    def _take(self, length: int | None = None) -> str:
        length = len(self._held) if length is None else length
        taken, self._held = self._held[:length], self._held[length:]
        return taken
