"""The bytes of tokens, for byte-level and sentencepiece tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.tests.service.inprocess import write_tokenizer


def test_byte_level_tokens_are_their_bytes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    token_bytes = TokenBytes(tokenizer, json.loads(tokenizer.to_str()))
    assert [token_bytes(number) for number in range(256)] == [bytes([number]) for number in range(256)]
    assert (token_bytes(256), token_bytes.shown(256), token_bytes.shown(97)) == (b"<bos>", b"", b"a")

    @settings(max_examples=30, deadline=None, database=None)
    @given(st.text())
    def joined(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(token_bytes, ids)) == text.encode()

    joined()


def test_sentencepiece_tokens_have_spaces_and_byte_fallback() -> None:
    tokenizer = Tokenizer(
        models.BPE(vocab={"\N{LOWER ONE EIGHTH BLOCK}the": 0, "<0xE2>": 1, "é": 2}, merges=[])
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback()]
    )
    token_bytes = TokenBytes(tokenizer, json.loads(tokenizer.to_str()))
    assert [token_bytes(number) for number in range(3)] == [b" the", b"\xe2", "é".encode()]
