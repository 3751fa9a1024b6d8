"""What of one answer has gone out to its client, as ids and as text. It outlives workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...workers.messages.events import FinishReason
from .calls import GenerateCall
from .detokenize import AnswerText, Match


class Streamed:
    """Takes an answer's tokens in order. decode: ids to text."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], call: GenerateCall, eos_ids: Sequence[int]
    ) -> None:
        self.ids: list[int] = []
        self._text = AnswerText(decode, call.stop)
        self._eos_ids = () if call.sampling.ignore_eos else tuple(eos_ids)
        self._stopped = False
        for token in call.answered:
            self.push(token)

    def push(self, token: int) -> Match:
        """The token's part of the text: one that ends the answer has none."""
        self.ids.append(token)
        match = Match("") if token in self._eos_ids else self._text.push(token)
        self._stopped = match.stopped
        return match

    def flush(self) -> Match:
        """Text that was held back."""
        return self._text.flush()

    def ended(self, left: int) -> FinishReason | None:
        """Why nothing can follow, if nothing can. left: tokens that may still be generated."""
        if not self.ids:
            return None
        if self._stopped:
            return FinishReason.STOP_STRING
        if self.ids[-1] in self._eos_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if left <= 0 else None
