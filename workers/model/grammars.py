"""Grammars that an answer must follow, by llguidance. Doors check them, and decode workers follow them.

A grammar is a text in llguidance's form: Lark, or JSON that holds a schema. It needs no torch.
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
"""A bit for each token id that may come next, from the lowest bit of the first word on."""
LONGEST_GRAMMAR = 1 << 18
"""Characters. Schemas of this length compile in less than a second."""
_WORD = 32
_LIMITS = LLParserLimits(verbose_errors=False)  # its defaults bound the work of a grammar and of each mask


class GrammarError(ValueError):
    """A grammar cannot be followed, or an answer does not follow it. str() is one line."""


class GrammarState:
    """The place of one answer in its grammar.

    Attributes:
        trouble: Why the grammar cannot be followed any further; empty while it can.
    """

    def __init__(self, matcher: LLMatcher, words: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._eos_ids = eos_ids
        self.trouble = ""

    @property
    def ended(self) -> bool:
        """True if nothing but an end token may come next."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> Mask | None:
        """Return the tokens that may come next; None if any may, since the answer is over."""
        if self.trouble or (self.ended and not self._eos_ids):
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype="<i4")[: self._words].copy()
        self._note_trouble()
        if self._eos_ids and _bit(mask, self._eos_ids[0]):
            for token in self._eos_ids:
                mask.view(np.uint32)[token // _WORD] |= np.uint32(1 << token % _WORD)
        return None if self.trouble else mask

    def take(self, token: int) -> None:
        """Go on with a token that the mask allows."""
        if self.trouble or self.ended:
            return
        self._matcher.consume_token(self._eos_ids[0] if token in self._eos_ids else token)
        self._note_trouble()

    def _note_trouble(self) -> None:
        if self._matcher.is_error():
            self.trouble = f"its grammar cannot be followed further: {_line(self._matcher.get_error())}"


class Grammars:
    """Makes the states of answers. The tokenizer is loaded once, in a thread of its own or at first use.

    Args:
        vocab: The model's. The tokenizer may have fewer tokens.
        eos_ids: The model's end tokens. Those without a logit are ignored.
    """

    def __init__(self, directory: Path, vocab: int, eos_ids: Sequence[int]) -> None:
        self._directory = directory
        self._vocab = vocab
        self._eos_ids = tuple(token for token in eos_ids if token < vocab)
        self._loading = threading.Lock()

    def load_soon(self) -> None:
        threading.Thread(target=self._load, name="grammars", daemon=True).start()

    def begin(self, grammar: str, answered: Sequence[int] = ()) -> GrammarState:
        """Compile a grammar, which takes milliseconds, and go on to where an answer's first tokens lead.

        Raises:
            GrammarError: It is wrong, too large, or not one that these tokens follow.
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
        """llguidance's tokenizer, or why there is none."""
        eos = self._eos_ids[0] if self._eos_ids else None
        try:
            text = tokenizer_json(self._directory)
            try:
                return LLTokenizer(text, n_vocab=self._vocab, eos_token=eos)
            except ValueError:  # the model has no embedding of the tokenizer's last tokens
                return LLTokenizer(text, eos_token=eos)
        except (OSError, ValueError) as error:
            return _line(str(error))


def grammar_of(form: str, rule: str) -> str:
    """Make a grammar.

    Args:
        form: `json_schema`, `regex`, or `grammar` for Lark and GBNF.

    Raises:
        GrammarError: It is too long, no JSON object, or no GBNF.
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
    """Make the grammar of a JSON schema's text. White space is at most one space after `,` and `:`, since a
    model may go on with white space without an end.

    Raises GrammarError if it is not a JSON object.
    """
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, defaults=_COMPACT))
    except ValueError as error:
        raise GrammarError(_line(str(error))) from None


_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def _bit(mask: Mask, token: int) -> bool:
    return bool(mask[token // _WORD] >> token % _WORD & 1)


def _line(text: str) -> str:
    """Return the first words of a message that may have many lines."""
    lines = [line.strip() for line in text.splitlines()]
    said = " ".join(line for line in lines if line and set(line) != {"^"})
    return said if len(said) <= 300 else f"{said[:300]}…"
