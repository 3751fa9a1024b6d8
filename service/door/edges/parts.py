"""Splits an answer's text into reasoning, content and tool calls."""

from deltafront.service.door.reasoning import ReasoningSplitter
from deltafront.service.request.answers import AnswerPart, CallPart
from deltafront.service.request.text.tool_calls import ToolCallParser


class AnswerSplitter:
    """Splits a streamed answer.

    Args:
        reasoning: None: all text is content.
        calls: None: the answer may not call tools.
    """

    def __init__(
        self, reasoning: ReasoningSplitter | None = None, calls: ToolCallParser | None = None
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def called(self) -> bool:
        """True if the answer calls tools, and no call is cut off."""
        return self._calls is not None and self._calls.calls > 0 and self._calls.ended

    @property
    def cut_off(self) -> bool:
        """True if the answer so far ends within a call's arguments."""
        return self._calls is not None and not self._calls.ended

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None if reasoning is not separated from content."""
        return None if self._reasoning is None else self._reasoning.tokens

    def push(self, text: str, tokens: int, last: bool = False) -> list[AnswerPart]:
        """Split the next text. The result is empty while the text is held back.

        Args:
            tokens: Tokens of the answer so far, including this text.
            last: Whether this text ends the answer.
        """
        parts = [AnswerPart(content=text)]
        if self._reasoning is not None:
            parts = [self._reasoning.push(text, tokens), *([self._reasoning.flush()] if last else [])]
        if self._calls is not None:
            parts = [found for part in parts for found in _with_calls(self._calls, part)]
            parts += [AnswerPart(content=rest) for rest in (self._calls.flush() if last else ())]
        return [part for part in parts if any(part)]


def _with_calls(calls: ToolCallParser, part: AnswerPart) -> list[AnswerPart]:
    found = [AnswerPart(reasoning=part.reasoning)]
    for piece in calls.push(part.content):
        if isinstance(piece, CallPart):
            found.append(AnswerPart(calls=(piece,)))
        else:
            found.append(AnswerPart(content=piece))
    return found
