"""Long texts are tokenised in pieces by several threads, if the ids are the same as of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from deltafront.service.request.calls import SpecialTokens
from deltafront.service.request.text import pieces as module
from deltafront.service.request.text.tokenizer import TextTokenizer

PARSE = SpecialTokens.PARSE
NOVEL = (Path(__file__).resolve().parents[4] / "deploy" / "demo" / "moby-dick.txt").read_text()[:60_000]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(splitter: pre.PreTokenizer | None, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<s>", "</s>"], initial_alphabet=pre.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([NOVEL], trainer)
    return tokenizer


def byte_level() -> pre.PreTokenizer:
    return pre.ByteLevel(add_prefix_space=False)


def llama_3() -> pre.PreTokenizer:
    split = pre.Split(Regex(LLAMA_3), "isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def with_bos(tokenizer: Tokenizer, template: str = "<s> $A") -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


DIVISIBLE: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: trained(byte_level()),
    "smollm2": lambda: trained(pre.Sequence([pre.Digits(individual_digits=True), byte_level()])),
    "llama-3": lambda: with_bos(trained(llama_3())),
    "qwen": lambda: trained(llama_3(), normalizers.NFC()),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Tokenizer]:
    return {name: make() for name, make in DIVISIBLE.items()}


def whole(tokenizer: Tokenizer, text: str, add_bos: bool) -> bytes:
    return np.asarray(tokenizer.encode(text, add_special_tokens=add_bos).ids, dtype="<u4").tobytes()


@pytest.mark.parametrize("name", DIVISIBLE)
@pytest.mark.parametrize("add_bos", [True, False])
def test_tokenising_in_pieces_gives_the_ids_of_the_whole(
    name: str, add_bos: bool, made: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 300)
    tokenizer = made[name]
    pieces = list(module._pieces(NOVEL))
    assert len(pieces) > 100 and "".join(pieces) == NOVEL
    assert TextTokenizer(tokenizer, None, {}).encode(NOVEL, add_bos=add_bos) == whole(
        tokenizer, NOVEL, add_bos
    )


PARTS = st.sampled_from(["ab", " cd", " ", "  ", "\n", "'s", " It's", "12", " 3", ".", "é", "́", " Ω", "<s>"])


@pytest.mark.parametrize("name", DIVISIBLE)
@settings(deadline=None, max_examples=60)
@given(parts=st.lists(PARTS, max_size=40))
def test_tokenising_any_text_in_pieces_gives_the_same_ids(
    name: str, made: dict[str, Tokenizer], parts: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", 3)
        text = "".join(parts)
        found = TextTokenizer(made[name], None, {}).encode(text, add_bos=True, special_tokens=PARSE)
        assert found == whole(made[name], text, True)


def spaced() -> Tokenizer:
    tokenizer = trained(byte_level())
    tokenizer.add_special_tokens([AddedToken("two words")])
    return tokenizer


def greedy_left() -> Tokenizer:
    tokenizer = trained(byte_level())
    tokenizer.add_special_tokens([AddedToken("<left>", lstrip=True)])
    return tokenizer


INDIVISIBLE: dict[str, Callable[[], Tokenizer]] = {
    "sentencepiece": lambda: trained(pre.Metaspace()),
    "a prefix before the text": lambda: trained(byte_level(), normalizers.Prepend("_")),
    "no words": lambda: trained(None),
    "a space before the text": lambda: trained(pre.ByteLevel(add_prefix_space=True)),
    "words that span spaces": lambda: trained(
        pre.Sequence([pre.Split(Regex(r"[^.]+|\."), "isolated"), pre.ByteLevel(False, use_regex=False)])
    ),
    "a token with a space": spaced,
    "a token that takes spaces": greedy_left,
    "an end after the text": lambda: with_bos(trained(byte_level()), "<s> $A </s>"),
}


@pytest.mark.parametrize("name", INDIVISIBLE)
def test_tokenizers_that_cannot_be_split_get_the_whole_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 100)
    tokenizer = INDIVISIBLE[name]()
    found = TextTokenizer(tokenizer, None, {})
    assert not found._divisible
    text = NOVEL[:5000]
    assert found.encode(text, add_bos=True) == whole(tokenizer, text, True)


def test_text_without_spaces_is_tokenised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    for text in ("", "a" * 100, "1 2 " * 30, "ab cd"):
        assert list(module._pieces(text)) == [text]
