"""Tests that a GGUF file's tokenizer gives the token ids of the original tokenizer, or is refused."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights.gguf.tokenizer import (
    PRE_TOKENIZERS,
    PreTokenizer,
    end_ids,
    tokenizer_config,
    tokenizer_json,
)

from ...vocabularies import FAMILIES, Metadata

ROOT = Path(__file__).resolve().parents[4]
PARTS = """ab cd It's 'LL 12 12345 . (x (y) é e\u0301 Ω 🙂 👩\u200d👩\u200d👧 漢字 日本語の 한국어 ไทย
العربية हिन्दी ½ Ⅷ ² _ camelCase HTTPServer // /* <| |> ſ ß İ !!!!! -- ... … “q” x=1; 𝔘 ǅ""".split()
PARTS += [" ", "  ", "     ", "\n", "\n\n", ".\n\n", "\t", "\r\n", " cd", " 3"]
PARTS += ["\u00a0", "\u3000", "\u200b", "\ufeff", "\x00"]


def prose() -> str:
    return (ROOT / "deploy" / "demo" / "moby-dick.txt").read_text(encoding="utf-8")


def code() -> str:
    files = sorted((ROOT / "kernels" / "selectors").rglob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in files)[:30_000]


def unicode() -> str:
    """Make a text of several scripts, emoji, marks, digits and whitespace in random order."""
    return "".join(random.Random(5).choices(PARTS, k=4000))


LARGE = ("llama_4", "qwen_35")
"""Vocabularies with up to 250,000 tokens, of families that the service refuses."""
NAMES = [pytest.param(name, marks=[pytest.mark.long] if name in LARGE else []) for name in FAMILIES]
TEXTS = {make.__name__: make for make in (prose, code, unicode)}


@functools.cache
def ours(name: str) -> Tokenizer:
    return made(FAMILIES[name]().metadata)


@functools.cache
def encoder(name: str) -> TextTokenizer:
    return TextTokenizer(ours(name), None, {})


def made(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(Metadata(metadata))))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_gguf_token_ids_equal_the_original_tokenizers(name: str, text: str) -> None:
    said = TEXTS[text]()
    wanted = list(FAMILIES[name]().encode(said))
    found = np.frombuffer(encoder(name).encode(said, add_bos=False), dtype="<u4")
    assert len(wanted) > 3000 and found.tolist() == wanted


@pytest.mark.parametrize("name", NAMES)
def test_decoding_ids_restores_the_text(name: str) -> None:
    for said in (prose()[:5000], code()[:5000], "  two before, and a tab\t🙂\n\n"):
        assert ours(name).decode(ids(ours(name), said), skip_special_tokens=True) == said


BY_LIBRARY = {
    "exaone": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), ByteLevel(False)]),
    "exaone4": ByteLevel(add_prefix_space=False),
}
"""For families whose vocabularies are in no package: the pre-tokenizer of their tokenizer.json."""


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", BY_LIBRARY)
def test_pre_tokenizer_splits_words_as_tokenizer_json_does(pre: str, text: str) -> None:
    found = made(byte_level(pre)).pre_tokenizer.pre_tokenize_str(TEXTS[text]())
    assert len(found) > 3000 and found == BY_LIBRARY[pre].pre_tokenize_str(TEXTS[text]())


@pytest.mark.parametrize("pre", ["glm4", "chatglm-bpe", "dbrx", "smaug-bpe"])
def test_pre_tokenizers_like_llama_3s_split_the_same_way(pre: str) -> None:
    assert PRE_TOKENIZERS[pre] == PreTokenizer(PRE_TOKENIZERS["llama-bpe"].splits)


R1 = (
    ("<｜begin▁of▁sentence｜>", 3),
    ("<｜end▁of▁sentence｜>", 3),
    ("<｜User｜>", 4),
    ("<｜Assistant｜>", 4),
    ("<think>", 4),
    ("</think>", 4),
    ("<｜tool▁calls▁begin｜>", 4),
)
R1_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}{% else %}"
    "<｜Assistant｜>{{ m['content'] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)


def test_deepseek_distill_template_markers_are_single_tokens(tmp_path: Path) -> None:
    """DeepSeek-R1-Distill-Llama has Llama 3's vocabulary with DeepSeek's, mostly user-defined, markers."""
    llama = FAMILIES["llama_3"]().metadata
    first = llama["token_type"].index(3)
    tokens, types = list(llama["tokens"]), list(llama["token_type"])
    for at, (text, kind) in enumerate(R1, first):
        tokens[at], types[at] = text, kind
    metadata = {**llama, "tokens": tokens, "token_type": types, "chat_template": R1_TEMPLATE}
    metadata |= {"bos_token_id": first, "eos_token_id": first + 1, "tokenizer.chat_template": R1_TEMPLATE}
    write(tmp_path, metadata)
    chat = TextTokenizer.load(tmp_path)
    found = np.frombuffer(chat.encode_chat([{"role": "user", "content": "Hi"}]), dtype="<u4")
    bos, user, assistant, think = (first + at for at in (0, 2, 3, 4))
    newline = tokens.index("Ċ")
    assert found.tolist() == [bos, user, tokens.index("Hi"), assistant, think, newline]
    assert chat.decode(found.tolist()) == "<｜User｜>Hi<｜Assistant｜><think>\n", "only control tokens go"


def write(folder: Path, metadata: dict[str, Any]) -> None:
    for name, content in (("tokenizer", tokenizer_json), ("tokenizer_config", tokenizer_config)):
        text = json.dumps(content(Metadata(metadata)))
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


# --- Small vocabularies

BYTES = sorted(ByteLevel.alphabet())


def byte_level(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    tokens = ["<s>", "</s>", "<think>", *BYTES, "ab", "abc"]
    types = [3, 3, 4] + [1] * (len(tokens) - 3)
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": ["a b"]}
    return metadata | {"bos_token_id": 0, "eos_token_id": 1} | more


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "ab", "▁", "a", "b"]


def sentencepiece(**more: Any) -> dict[str, Any]:
    types = [2, 3, 3] + [6] * 256 + [1] * 5
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    return {"model": "llama", "tokens": PIECES, "token_type": types, "scores": scores} | more


def tokens_of(metadata: dict[str, Any], text: str, *, opening: bool = False) -> list[str]:
    return list(made(metadata).encode(text, add_special_tokens=opening).tokens)


def test_decoding_drops_control_tokens_but_not_user_defined_ones() -> None:
    tokenizer = made(byte_level())
    assert tokens_of(byte_level(), "x<think></s>") == ["x", "<think>", "</s>"]
    assert tokenizer.decode(ids(tokenizer, "<s>x<think></s>"), skip_special_tokens=True) == "x<think>"


@pytest.mark.parametrize(
    ("pre", "said", "wanted"),
    [
        ("gpt-2", {}, ["x"]),
        ("llama-bpe", {}, ["<s>", "x"]),
        ("tekken", {}, ["<s>", "x"]),
        ("llama-bpe", {"add_bos_token": False}, ["x"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "x", "</s>"]),
    ],
)
def test_adds_bos_and_eos_as_the_file_says(pre: str, said: dict[str, bool], wanted: list[str]) -> None:
    assert tokens_of(byte_level(pre, **said), "x", opening=True) == wanted
    assert tokens_of(byte_level(pre, **said), "x") == ["x"]


def test_refuses_a_bos_without_an_id() -> None:
    metadata = byte_level("llama-bpe")
    del metadata["bos_token_id"]
    with pytest.raises(ModelError, match="add_bos_token is true, but there is no bos_token_id"):
        tokenizer_json(Metadata(metadata))


def test_ignore_merges_keeps_a_word_that_is_a_token_whole() -> None:
    assert tokens_of(byte_level("llama-bpe"), "abc") == ["abc"]
    assert tokens_of(byte_level("gpt-2"), "abc") == ["ab", "c"]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    assert tokens_of(sentencepiece(), "ab a") == ["▁a", "b", "▁a"], "▁a has a better score than ab"
    assert tokens_of(sentencepiece(), "é<s>b") == ["▁", "<0xC3>", "<0xA9>", "<s>", "▁", "b"]
    assert tokens_of(sentencepiece(), "a", opening=True) == ["<s>", "▁a"], "BOS unless told otherwise"
    assert made(sentencepiece()).decode(ids(made(sentencepiece()), " é a")) == " é a"


def test_adds_no_leading_space_if_the_file_says_so() -> None:
    metadata = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert tokens_of(metadata, "ab a", opening=True) == ["ab", "▁a"]
    assert made(metadata).decode(ids(made(metadata), " a")) == " a"


@pytest.mark.parametrize("pre", ["viking", "default", None])
def test_refuses_an_unknown_pre_tokenizer_and_names_known_ones(pre: str | None) -> None:
    metadata = byte_level() | {"pre": pre}
    if pre is None:
        del metadata["pre"]
    said = f"tokenizer.ggml.pre = {pre!r}, which is not known" if pre else "no tokenizer.ggml.pre"
    with pytest.raises(ModelError, match=f"has {said}.*convert the model again.*Known: .*qwen2"):
        tokenizer_json(Metadata(metadata))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level() | {"model": "t5"}, "tokenizer.ggml.model = 't5' is not supported, only gpt2 and llama"),
        (byte_level() | {"tokens": ["a", "a"], "token_type": [1, 1]}, "has 'a' twice"),
        (byte_level() | {"token_type": [1]}, "token_type has 1 entries"),
        (byte_level() | {"eos_token_id": 9999}, "eos_token_id = 9999, but there are"),
        (sentencepiece(scores=[-1000.0] * len(PIECES)), "scores are all equal"),
        (sentencepiece(remove_extra_whitespaces=True), "remove_extra_whitespaces is not supported"),
    ],
)
def test_refuses_vocabularies_that_cannot_be_converted(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_json(Metadata(metadata))


def test_reads_eos_eot_and_eom_as_end_tokens() -> None:
    metadata = byte_level(eot_token_id=3, eom_token_id=4)
    assert end_ids(Metadata(metadata)) == [1, 3, 4]
    assert end_ids(Metadata(sentencepiece())) == [2], "sentencepiece's own, which files may leave out"
    assert end_ids(Metadata({})) == []


def test_finds_end_tokens_by_name_if_gguf_keys_are_missing() -> None:
    chat = byte_level(tokens=["<|endoftext|>", "</s>", "<|im_end|>", *byte_level()["tokens"][3:]])
    assert end_ids(Metadata(chat)) == [1, 0, 2]
    special = {
        token["content"] for token in tokenizer_json(Metadata(chat))["added_tokens"] if token["special"]
    }
    assert special == {"<|endoftext|>", "</s>", "<|im_end|>"}


def test_tokenizer_config_names_bos_eos_and_padding_tokens() -> None:
    assert tokenizer_config(Metadata(byte_level(padding_token_id=1))) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
