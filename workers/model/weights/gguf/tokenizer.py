"""Makes tokenizer.json and end-of-sequence tokens from a GGUF file's metadata, as llama.cpp reads it.

The model `gpt2` is byte-level BPE: the file lists merges and names the rule that splits text into words. The
model `llama` is sentencepiece's BPE: the pair whose merged piece has the best score merges first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gguf import TokenType

from deltafront.workers.model.directory.model_files import ModelError

_SPACE = "▁"


class Metadata(Protocol):
    def field(self, key: str, default: Any = None) -> Any: ...

    def has_field(self, key: str) -> bool: ...


@dataclass(frozen=True)
class PreTokenizer:
    """Splits text into words. Each regex in `splits` splits the pieces that earlier ones have left.

    `add_bos` is the default for files without a key for it.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN_2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN_35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_TEKKEN = rf"{_CASED}*{_LOWER}+|{_CASED}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT_4O = (
    rf"{_CASED}*{_LOWER}+{_CONTRACTION}?|{_CASED}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: pre
    for pre, names in (
        (
            PreTokenizer((_LLAMA_3,), ignore_merges=True, add_bos=True),
            "llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0",
        ),
        (PreTokenizer((_LLAMA_3,)), "smaug-bpe dbrx glm4 chatglm-bpe"),
        (PreTokenizer((_QWEN_2,), nfc=True), "qwen2"),
        (PreTokenizer((_QWEN_2,)), "deepseek-r1-qwen megrez"),
        (PreTokenizer((_QWEN_35,), nfc=True), "qwen35"),
        (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
        (PreTokenizer((_GPT_4O,)), "gpt-4o llama4"),
        (PreTokenizer(_DEEPSEEK_3), "deepseek-v3"),
        (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
        (PreTokenizer((_SEED,)), "seed-coder"),
        (PreTokenizer((_GPT_2,)), "gpt-2 trillion a.x-4.0 mellum exaone4"),
        (PreTokenizer((r"\p{N}", _GPT_2)), "smollm starcoder refact minerva-7b exaone"),
    )
    for name in names.split()
}
"""llama.cpp's rules for splitting text, by `tokenizer.ggml.pre` (from its src/llama-vocab.cpp, except `nfc`).
The regexes are those of the original models."""

_ENDS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|end_of_turn|> <end_of_turn> <|endoftext|> <|end_of_text|> "
    "<EOT> [EOT] <｜end▁of▁sentence｜>".split()
)
"""Tokens that end a turn or a text. Few GGUF files name more than one of them in their metadata."""

_DEFAULTS: Mapping[str, Mapping[str, int]] = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {}}


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """Make tokenizer.json. Raises ModelError if the tokenizer cannot be rebuilt exactly."""
    kind, tokens = _kind(metadata), _tokens(metadata)
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata, tokens),
        "post_processor": _post_processor(metadata, tokens),
        **_PARTS[kind](metadata, tokens),
    }


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    tokens = _tokens(metadata)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (token := _special_id(metadata, key)) is not None:
            config[f"{name}_token"] = tokens[token]
    if metadata.has_field("tokenizer.chat_template"):
        config["chat_template"] = metadata.field("tokenizer.chat_template")
    return config


def end_ids(metadata: Metadata) -> list[int]:
    keyed = [_special_id(metadata, key) for key in ("eos", "eot", "eom")]
    tokens = metadata.field("tokenizer.ggml.tokens", [])
    named = [token for token, text in enumerate(tokens) if text in _ENDS]
    return list(dict.fromkeys([token for token in keyed if token is not None] + named))


def _kind(metadata: Metadata) -> str:
    kind = str(metadata.field("tokenizer.ggml.model"))
    if kind not in _PARTS:
        raise ModelError(
            f"GGUF tokenizer.ggml.model = {kind!r} is not supported, only {' and '.join(_PARTS)}: "
            "use the model's safetensors directory, which has its tokenizer.json"
        )
    return kind


def _tokens(metadata: Metadata) -> list[str]:
    tokens = [text or f"[EMPTY_{id_}]" for id_, text in enumerate(metadata.field("tokenizer.ggml.tokens"))]
    if len(set(tokens)) != len(tokens):
        twice = next(text for id_, text in enumerate(tokens) if tokens.index(text) != id_)
        raise ModelError(f"GGUF tokenizer.ggml.tokens has {twice!r} twice: convert the model again")
    return tokens


def _types(metadata: Metadata, tokens: Sequence[str]) -> list[int]:
    types = list(metadata.field("tokenizer.ggml.token_type", [int(TokenType.NORMAL)] * len(tokens)))
    if len(types) != len(tokens):
        raise ModelError(f"GGUF tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return types


def _special_id(metadata: Metadata, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    if not metadata.has_field(name):
        return _DEFAULTS.get(str(metadata.field("tokenizer.ggml.model", "")), {}).get(key)
    token, count = int(metadata.field(name)), len(metadata.field("tokenizer.ggml.tokens", []))
    if count and token >= count:
        raise ModelError(f"GGUF {name} = {token}, but there are {count} tokens")
    return token


def _added_tokens(metadata: Metadata, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Return the added tokens, at which text is split first. Special tokens are not shown in answers."""
    types = list(enumerate(_types(metadata, tokens)))
    special = {id_ for id_, kind in types if kind in (TokenType.CONTROL, TokenType.UNKNOWN)}
    special |= {id_ for id_ in (*end_ids(metadata), _special_id(metadata, "bos")) if id_ is not None}
    added = sorted(special | {id_ for id_, kind in types if kind == TokenType.USER_DEFINED})
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": id_, "content": tokens[id_], **flags, "special": id_ in special} for id_ in added]


def _post_processor(metadata: Metadata, tokens: Sequence[str]) -> dict[str, Any] | None:
    add_bos = _pre_tokenizer(metadata).add_bos if _kind(metadata) == "gpt2" else True
    around = {
        key: _required_id(metadata, key)
        for key, default in (("bos", add_bos), ("eos", False))
        if metadata.field(f"tokenizer.ggml.add_{key}_token", default)
    }
    if not around:
        return None

    def closed(sequence: str, kind: int) -> list[dict[str, Any]]:
        parts = {key: {"SpecialToken": {"id": tokens[id_], "type_id": kind}} for key, id_ in around.items()}
        text = {"Sequence": {"id": sequence, "type_id": kind}}
        return [part for part in (parts.get("bos"), text, parts.get("eos")) if part is not None]

    return {
        "type": "TemplateProcessing",
        "single": closed("A", 0),
        "pair": closed("A", 0) + closed("B", 1),
        "special_tokens": {
            tokens[id_]: {"id": tokens[id_], "ids": [id_], "tokens": [tokens[id_]]} for id_ in around.values()
        },
    }


def _required_id(metadata: Metadata, key: str) -> int:
    token = _special_id(metadata, key)
    if token is None:
        raise ModelError(f"GGUF tokenizer.ggml.add_{key}_token is true, but there is no {key}_token_id")
    return token


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = str(metadata.field("tokenizer.ggml.pre", ""))
    if name not in PRE_TOKENIZERS:
        stated = f"tokenizer.ggml.pre = {name!r}, which is not known" if name else "no tokenizer.ggml.pre"
        raise ModelError(
            f"the GGUF file has {stated}, so how text is cut into tokens would be guessed: convert the model "
            "again with a recent llama.cpp, or use its safetensors directory, which has its tokenizer.json. "
            f"Known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> dict[str, Any]:
    pre = _pre_tokenizer(metadata)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in pre.splits
    ]
    merges = [merge.split(" ") for merge in metadata.field("tokenizer.ggml.merges")]
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": _bpe(tokens, merges) | {"ignore_merges": pre.ignore_merges},
    }


def _sentencepiece(metadata: Metadata, tokens: Sequence[str]) -> dict[str, Any]:
    if metadata.field("tokenizer.ggml.remove_extra_whitespaces", False):
        raise ModelError("GGUF tokenizer.ggml.remove_extra_whitespaces is not supported")
    types, scores = _types(metadata, tokens), metadata.field("tokenizer.ggml.scores")
    pieces = {tokens[id_]: float(scores[id_]) for id_, kind in enumerate(types) if kind == TokenType.NORMAL}
    prefix = bool(metadata.field("tokenizer.ggml.add_space_prefix", True))
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    fallback = {"type": "ByteFallback"}, {"type": "Fuse"}
    unknown = {"unk_token": tokens[_special_id(metadata, "unknown") or 0], "fuse_unk": True}
    unknown["byte_fallback"] = TokenType.BYTE in types
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": _sequence("normalizers", *before, _replace(" ", _SPACE)),
        "pre_tokenizer": None,
        "decoder": _sequence("decoders", _replace(_SPACE, " "), *fallback, *after),
        "model": _bpe(tokens, _merges(pieces)) | unknown,
    }


_PARTS: Mapping[str, Callable[[Metadata, Sequence[str]], dict[str, Any]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"type": "BPE", "vocab": {text: id_ for id_, text in enumerate(tokens)}, "merges": merges}


def _merges(scores: Mapping[str, float]) -> list[list[str]]:
    """List all pairs that merge into a piece, best score first, then longest left part first."""
    if len(scores) > 1 and len(set(scores.values())) == 1:
        raise ModelError(
            "GGUF tokenizer.ggml.scores are all equal, so which pieces merge first is not known: "
            "convert the model again from its tokenizer.model"
        )
    made = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    made.sort(key=lambda merge: -merge[0])
    return [[left, right] for _, left, right in made]


def _sequence(parts: str, *members: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", parts: list(members)}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}
