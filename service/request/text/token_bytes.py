"""The bytes that each token stands for. A character may need the bytes of several tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from deltafront.service.request.text.pieces import components

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    """A tokenizer's tokens as bytes.

    Args:
        state: The content of tokenizer.json.
    """

    def __init__(self, tokenizer: Tokenizer, state: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        kinds = {part["type"] for part in components(state["decoder"], "decoders")}
        self._byte_level = "ByteLevel" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content.encode() for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}

    def __call__(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            found = [_bytes_by_character().get(character) for character in token]
            return token.encode() if None in found else bytes(found)  # type: ignore[arg-type]
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()

    def shown(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to an answer's text: none for a special token."""
        return b"" if token_id in self._special else self(token_id)


@functools.cache
def _bytes_by_character() -> Mapping[str, int]:
    """Return the byte of each character by which GPT-2 writes bytes: a printable one stands for itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
