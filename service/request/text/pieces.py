"""Tokenises a long text in pieces, and stops once the text has too many tokens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from deltafront.service.request.calls import pack_ids
from deltafront.workers.messages.requests import ID_BYTES

_PIECE = 16_384
"""Characters in a piece of a long text. One thread tokenises a piece."""
_BATCH = 16
"""Pieces that are tokenised between two checks of the limit. Each takes 2 MB."""
_LONGEST_PIECE = 1 << 22
"""The most characters that are tokenised in one call, which takes 400 MB."""
_PROBE = 4
"""A long piece is first tokenised up to this many characters per permitted token."""
_PROBE_SLACK = 64
"""Tokens that a cut may add, with a margin."""
_SEAM = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")
"""Long texts are cut before a space between two letters."""
_PROBES = ("ab cd ef", "It's a b", "3d Print x", "ends. Then we", "TWO words Of a")


class TextTooLong(ValueError): ...


class TokenizationStopped(Exception): ...


@dataclass(frozen=True)
class TokenLimit:
    """Tokenising stops above `tokens` tokens, or when `stopped` returns True."""

    tokens: int = 1 << 62
    stopped: Callable[[], bool] = bool


def tokenised(tokenizer: Tokenizer, text: str, limit: TokenLimit, *, add_bos: bool, divisible: bool) -> bytes:
    """Tokenise a text as little-endian uint32.

    Args:
        divisible: The result of `splits_at_spaces` for this tokenizer.

    Raises:
        TextTooLong, TokenizationStopped: The limit was reached.
    """
    pieces, ids = _pieces(text) if divisible else iter([text]), bytearray()
    while batch := list(itertools.islice(pieces, _BATCH)):
        if limit.stopped():
            raise TokenizationStopped
        if len(ids) // ID_BYTES > limit.tokens:
            raise TextTooLong(f"is more than {limit.tokens} tokens: shorten it")
        for piece in batch:
            _check_piece(tokenizer, piece, limit.tokens)
        # encode_batch_fast takes half of encode_batch's time, but one core per piece.
        head = 1 if add_bos and not ids else 0
        first = tokenizer.encode_batch_fast(batch[:head], add_special_tokens=True)
        rest = tokenizer.encode_batch_fast(batch[head:], add_special_tokens=False)
        for encoding in (*first, *rest):
            ids += pack_ids(encoding.ids)
    return bytes(ids)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > 2 * _PIECE and (seam := _SEAM.search(text, start + _PIECE)):
        yield text[start : seam.start()]
        start = seam.start()
    yield text[start:]


def _check_piece(tokenizer: Tokenizer, piece: str, tokens: int) -> None:
    """Raise TextTooLong for a piece that surely has more tokens, or is too long to tokenise at once."""
    if len(piece) <= _BATCH * _PIECE:
        return
    if len(piece) > _LONGEST_PIECE:
        raise TextTooLong(
            f"has {len(piece)} characters without a place to cut, and at most {_LONGEST_PIECE} can be "
            "tokenised in one: put single spaces between words"
        )
    beginning = piece[: _PROBE * tokens]
    if len(beginning) < len(piece):
        (probe,) = tokenizer.encode_batch_fast([beginning], add_special_tokens=False)
        if len(probe.ids) > tokens + _PROBE_SLACK:
            raise TextTooLong(f"is more than {tokens} tokens: shorten it")


def longest_token(tokenizer: Tokenizer, state: Mapping[str, Any]) -> int:
    """Return the most bytes of text that one token can stand for. A normaliser may turn four bytes into one
    byte."""
    kinds = {part["type"] for part in components(state["pre_tokenizer"], "pretokenizers")}
    size = len if "ByteLevel" in kinds else lambda token: len(token.encode())
    longest = max(map(size, tokenizer.get_vocab()), default=1)
    return longest * (4 if components(state["normalizer"], "normalizers") else 1)


def splits_at_spaces(tokenizer: Tokenizer, state: Mapping[str, Any]) -> bool:
    """Return whether a text may be cut before a space between two letters (a seam) without changing its token
    ids. `state`: the content of tokenizer.json.

    True for byte-level BPE, whose words begin with their space, if neither normaliser, added tokens nor BOS
    reach across a seam. False if the tokenizer has unknown parts.
    """
    normalizers = {part["type"] for part in components(state["normalizer"], "normalizers")}
    splitters = components(state["pre_tokenizer"], "pretokenizers")
    kinds = {part["type"] for part in splitters}
    tokens = state["added_tokens"]
    bare, framed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    return (
        normalizers <= {"NFC", "NFD", "NFKC", "NFKD"}
        and "ByteLevel" in kinds
        and kinds <= {"ByteLevel", "Digits", "Split"}
        and not any(part.get("add_prefix_space") for part in splitters)
        and not any(" " in token["content"] for token in tokens)
        and not any(token[reach] for token in tokens for reach in ("lstrip", "rstrip", "single_word"))
        and framed[-len(bare) :] == bare  # nothing follows the text
        and all(_words_keep_their_space(tokenizer, probe) for probe in _PROBES)
    )


def _words_keep_their_space(tokenizer: Tokenizer, text: str) -> bool:
    starts = {start for _, (start, _) in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
    return all(seam.start() in starts for seam in _SEAM.finditer(text))


def components(state: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for inner in state[parts] for part in components(inner, parts)]
