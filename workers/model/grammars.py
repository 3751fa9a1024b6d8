"""Grammars that an answer must match (structured output), by llguidance.

API servers check grammars, and decode workers apply them. A grammar is a text in llguidance's format: Lark,
or JSON with a schema. This module imports no torch.
"""

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from deltafront.workers.model.directory.tokenizer_files import tokenizer_json

Mask = npt.NDArray[np.int32]
"""A bit mask of the tokens that may come next. Token id 0 is the lowest bit of the first word."""
LONGEST_GRAMMAR = 1 << 18
"""Maximum number of characters. Schemas of this length compile in less than a second."""
_WORD = 32
_LIMITS = LLParserLimits(verbose_errors=False)  # its defaults bound the work of a grammar and of each mask


class GrammarError(ValueError):
    """A grammar cannot be used, or an answer does not match it. str() is one line."""


class GrammarState:
    """The state of one answer's grammar after the tokens so far.

    Attributes:
        trouble: The reason why the grammar has failed; empty if it has not.
    """

    def __init__(self, matcher: LLMatcher, words: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._eos_ids = eos_ids
        self.trouble = ""

    @property
    def ended(self) -> bool:
        """True if only an end-of-sequence token may come next."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> Mask | None:
        """Return the mask of tokens that may come next; None if the answer has ended or the grammar has
        failed."""
        if self.trouble or (self.ended and not self._eos_ids):
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype="<i4")[: self._words].copy()
        self._note_trouble()
        if self._eos_ids and _bit(mask, self._eos_ids[0]):
            for token in self._eos_ids:
                mask.view(np.uint32)[token // _WORD] |= np.uint32(1 << token % _WORD)
        return None if self.trouble else mask

    def take(self, token: int) -> None:
        """Advance the grammar by a sampled token, which the mask must allow."""
        if self.trouble or self.ended:
            return
        self._matcher.consume_token(self._eos_ids[0] if token in self._eos_ids else token)
        self._note_trouble()

    def _note_trouble(self) -> None:
        if self._matcher.is_error():
            self.trouble = f"its grammar cannot be followed further: {_line(self._matcher.get_error())}"


class Grammars:
    """Makes the `GrammarState` of each answer. The tokenizer is loaded once, by `load_soon` or at first use.

    Args:
        vocab: The size of the model's vocabulary. The tokenizer may have fewer tokens.
        eos_ids: The model's end-of-sequence tokens. Ids beyond the vocabulary are ignored.
    """

    def __init__(self, directory: Path, vocab: int, eos_ids: Sequence[int]) -> None:
        self._directory = directory
        self._vocab = vocab
        self._eos_ids = tuple(token for token in eos_ids if token < vocab)
        self._loading = threading.Lock()

    def load_soon(self) -> None:
        threading.Thread(target=self._load, name="grammars", daemon=True).start()

    def begin(self, grammar: str, answered: Sequence[int] = ()) -> GrammarState:
        """Compile a grammar, which takes milliseconds, and advance it over the tokens of a resumed answer.

        Raises:
            GrammarError: The grammar is wrong or too large, or these tokens do not match it.
        """
        tokenizer = self._load()
        if isinstance(tokenizer, str):
            raise GrammarError(f"the model's tokenizer can follow no grammar: {tokenizer}")
        if len(grammar) > LONGEST_GRAMMAR:
            raise GrammarError(f"has {len(grammar)} characters: at most {LONGEST_GRAMMAR}")
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_line(matcher.get_error()))
        state = GrammarState(matcher, -(-self._vocab // _WORD), self._eos_ids)
        for token in answered:
            state.take(token)
        if state.trouble:
            raise GrammarError("the tokens that were answered before do not follow it")
        return state

    def _load(self) -> LLTokenizer | str:
        with self._loading:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer | str:
        """llguidance's tokenizer, or the reason why it cannot be made."""
        eos = self._eos_ids[0] if self._eos_ids else None
        try:
            text = tokenizer_json(self._directory)
            try:
                return LLTokenizer(text, n_vocab=self._vocab, eos_token=eos)
            except ValueError:  # the tokenizer has more tokens than the model has embeddings
                return LLTokenizer(text, eos_token=eos)
        except (OSError, ValueError) as error:
            return _line(str(error))


def grammar_of(form: str, rule: str) -> str:
    """Make a grammar in llguidance's format.

    Args:
        form: The kind of `rule`: `json_schema`, `regex`, or `grammar` for Lark and GBNF.

    Raises:
        GrammarError: The rule is too long, or is not of this kind.
    """
    if len(rule) > LONGEST_GRAMMAR:
        raise GrammarError(f"has {len(rule)} characters: at most {LONGEST_GRAMMAR}")
    if form == "json_schema":
        return json_grammar(rule)
    try:
        return str(grammar_from(form, rule))  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError(_line(str(error))) from None


def json_grammar(schema: str) -> str:
    """Make the grammar of a JSON schema. Raises GrammarError if it is not a JSON object.

    White space is limited to one space after `,` and `:`, since a model may otherwise produce it endlessly.
    """
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, defaults=_COMPACT))
    except ValueError as error:
        raise GrammarError(_line(str(error))) from None


_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def _bit(mask: Mask, token: int) -> bool:
    return bool(mask[token // _WORD] >> token % _WORD & 1)


def _line(text: str) -> str:
    """Return a message of several lines as one line of at most 300 characters."""
    lines = [line.strip() for line in text.splitlines()]
    said = " ".join(line for line in lines if line and set(line) != {"^"})
    return said if len(said) <= 300 else f"{said[:300]}…"
