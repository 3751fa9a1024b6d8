"""Makes calibration documents from a user's texts. It imports no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.workers.calibration import probes
from deltafront.workers.calibration.probes import Document, Text
from deltafront.workers.model.calibrated.profile import ProfiledText

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ANSWER_TOKENS = 128
"""Tokens kept free for each question with its answer."""


class Documents:
    """Makes calibration documents from the user's texts, with hidden facts if there are questions."""

    def __init__(self, tokenizer: Tokenizer, contents: dict[str, str], questions: int) -> None:
        def encode_all(texts: Sequence[str]) -> list[list[int]]:
            return [done.ids for done in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

        self._tokenizer = tokenizer
        self._contents = contents
        self._texts = {file: Text(content, encode_all) for file, content in contents.items()}
        self._questions = questions

    def for_pages(self, budget: int, tokens: int | None) -> list[Document]:
        """Make documents from the texts, for choosing Δ-layers. Raises ValueError if a text is too short.

        With questions there are three more documents: facts alone, so that all pages look alike; several
        values for one key; and chains of variables.

        Args:
            budget: Page budget K.
            tokens: Tokens of a document, questions included; by default four times the budget, and room for
                the questions.
        """
        from deltafront.workers.calibration.delta_layers import shortest_text

        most = tokens or 4 * budget * PAGE_TOKENS + self._questions * ANSWER_TOKENS
        if not self._questions:
            least = shortest_text(budget)
            return [Document(self._encode(file, most, least), []) for file in self._contents]
        first = next(iter(self._texts.values()))
        room = most - self._questions * ANSWER_TOKENS
        few = -(-self._questions // probes.VALUES)
        more = [(probes.haystack, self._questions), (probes.values, few), (probes.chains, few)]
        return [*self.of_length(most), *(kind(random.Random(0), room, count, first) for kind, count in more)]

    def of_length(self, tokens: int) -> list[Document]:
        """Make one document per text, of about this many tokens including its questions."""
        room = tokens - self._questions * ANSWER_TOKENS
        return [
            probes.needles(random.Random(number), room, self._questions, text)
            for number, text in enumerate(self._texts.values())
        ]

    def profiled(self, tokens: int) -> tuple[ProfiledText, ...]:
        return tuple(ProfiledText.of(content, tokens) for content in self._contents.values())

    def _encode(self, file: str, most: int, least: int) -> list[int]:
        ids: list[int] = self._tokenizer.encode(self._contents[file]).ids[:most]
        if len(ids) < least:
            raise ValueError(f"{file}: {len(ids)} tokens are too few for this budget, which takes {least}")
        return ids
