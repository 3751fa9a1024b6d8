"""Tests models with only a tekken.json: token ids and chats equal those of Mistral's tokenizer."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import model_directory
from deltafront.workers.model.directory.tokenizer_files import end_tokens, tokenizer_json

from ...vocabularies import FAMILIES, _file
from ..directory.tokenizers_of_models import write_tokenizer
from .test_gguf_tokenizer import code, prose, unicode

NAMES = "<unk> <s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]".split()
SPECIAL = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(NAMES)]
BEFORE = 10
"""Number of control tokens before the vocabulary. The last ones have no name."""


def content(**change: Any) -> dict[str, Any]:
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc", b"bc", b" abc"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {"pattern": r" ?\p{L}+|.", "default_num_special_tokens": BEFORE, "version": "v7"}
    config["default_vocab_size"] = BEFORE + len(tokens) - 1  # one token of the file is not used
    return {"config": config, "vocab": vocab, "special_tokens": SPECIAL} | change


def write(directory: Path, **change: Any) -> Path:
    (directory / "tekken.json").write_text(json.dumps(content(**change)))
    return directory


def test_tekken_merges_by_rank_and_numbers_tokens_after_control_ones(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(write(tmp_path)))
    ab, abc, byte = BEFORE + 256, BEFORE + 257, BEFORE
    assert tokenizer.encode("abc abé").ids == [1, abc, byte + 32, ab, byte + 0xC3, byte + 0xA9]
    assert tokenizer.encode("[INST]abc", add_special_tokens=False).ids == [3, abc]
    assert tokenizer.decode([1, 3, abc, byte + 32, 7], skip_special_tokens=True) == "abc "
    assert tokenizer.id_to_token(BEFORE - 1) == "<SPECIAL_9>" and tokenizer.get_vocab_size() == BEFORE + 259


def test_tokenises_and_chats_with_only_tekken_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"or tekken\.json"):
        model_directory(str(tmp_path))
    assert model_directory(str(write(tmp_path))) == tmp_path
    assert end_tokens(tmp_path) == (2,)
    tokenizer = TextTokenizer.load(tmp_path)
    asked = [{"role": "system", "content": "abc"}, {"role": "user", "content": "ab"}]
    packed = tokenizer.encode_chat([*asked, {"role": "assistant", "content": "bc"}, asked[1]])
    ids = [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]
    ab, abc, bc = (BEFORE + 256 + n for n in range(3))
    assert ids == [1, 5, abc, 6, 3, ab, 4, bc, 2, 3, ab, 4]


def test_tokenizer_json_takes_precedence_over_tekken(tmp_path: Path) -> None:
    write(write_tokenizer(tmp_path))
    assert json.loads(tokenizer_json(tmp_path))["model"]["merges"] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"special_tokens": None}, "lists no control tokens: take the model with its tokenizer.json"),
        ({"special_tokens": SPECIAL[1:]}, "not numbered from 0 without a gap"),
        ({"vocab": content()["vocab"][1:]}, "not numbered from 0 without a gap"),
        ({"vocab": [{"rank": 0}]}, "cannot be read as a tokenizer: KeyError"),
        ({"config": {}}, "cannot be read as a tokenizer: KeyError"),
        (
            {"special_tokens": [*SPECIAL, SPECIAL[0] | {"rank": 7, "token_str": "ab"}]},
            "as another token, too",
        ),
    ],
)
def test_refuses_an_ambiguous_tekken_json(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    write(tmp_path, **change)
    with pytest.raises(ModelError, match=says):
        tokenizer_json(tmp_path)


def test_tekken_ids_equal_mistral_commons(tmp_path: Path) -> None:
    raw = json.loads(_file("mistral_common/data/tekken_240911.json").read_text(encoding="utf-8"))
    (tmp_path / "tekken.json").write_text(json.dumps(raw | {"special_tokens": SPECIAL}))
    tokenizer = Tokenizer.from_str(tokenizer_json(tmp_path))
    own = FAMILIES["tekken"]().encode
    for text in (prose()[:100_000], code(), unicode()):
        assert tokenizer.encode(text, add_special_tokens=False).ids == own(text)
