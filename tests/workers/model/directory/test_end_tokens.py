"""Tests which tokens end an answer, according to tokenizer files and chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.tokenizer_files import end_tokens

from .tokenizers_of_models import CHATML, write_json, write_tokenizer

ENDOFTEXT, IM_END = 256, 258

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
CHANNELS = "{{% for m in messages %}}<|channel|>final<|message|>{{{{ m.content }}}}{}{{% endfor %}}"
OPEN_AT_THE_END = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


def test_the_tokenizers_eos_is_an_end_token(tmp_path: Path) -> None:
    assert end_tokens(write_tokenizer(tmp_path, eos_token="<|im_end|>")) == (IM_END,)
    as_object = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    assert end_tokens(write_tokenizer(tmp_path, eos_token=as_object)) == (ENDOFTEXT,)
    assert end_tokens(write_tokenizer(tmp_path, eos_token="<nowhere>")) == ()
    assert end_tokens(write_tokenizer(tmp_path, eos_token=None)) == ()


def test_reads_eos_from_special_tokens_map(tmp_path: Path) -> None:
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}})
    assert end_tokens(write_tokenizer(tmp_path)) == (IM_END,)


def test_the_templates_token_after_an_answer_is_an_end_token(tmp_path: Path) -> None:
    """Some ChatML models keep the base model's EOS in their files."""
    both = write_tokenizer(tmp_path, eos_token="<|endoftext|>", chat_template=CHATML)
    assert end_tokens(both) == (ENDOFTEXT, IM_END)
    write_tokenizer(tmp_path, chat_template=THINKING)
    assert end_tokens(tmp_path) == (IM_END,)
    (tmp_path / "chat_template.jinja").write_text(OPEN_AT_THE_END)
    assert end_tokens(tmp_path) == ()


@pytest.mark.parametrize(
    ("template", "tokens", "end"),
    [
        (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], 258),
        (MISTRAL, ["<s>", "</s>"], 257),
        (MISTRAL, ["[INST]", "[/INST]", "</s>"], 258),
        (
            "{% for m in messages %}{{ m.content }}<end><end_of_turn>{% endfor %}",
            ["<end>", "<end_of_turn>"],
            256,
        ),
        ("{% for m in messages %}{{ m.content }}<end>>{% endfor %}", ["<end>", "<end>>"], 257),
        ("{% for m in messages %}### {{ m.role }}: {{ m.content }}\n\n{% endfor %}", ["<end>"], None),
        (CHANNELS.format("<|end|>"), ["<|channel|>", "<|end|>", "<|return|>"], None),
        (CHANNELS.format("<|return|>"), ["<|channel|>", "<|end|>", "<|return|>"], 258),
        ("{{ raise_exception('never') }}", ["<end>"], None),
        ("{{ messages[0].content }}", ["<end>"], None),
        ("{{ 1 + messages }}", ["<end>"], None),
    ],
)
def test_finds_the_end_token_in_templates_of_other_families(
    tmp_path: Path, template: str, tokens: list[str], end: int | None
) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"} if template == MISTRAL else {}
    write_tokenizer(tmp_path, tokens, chat_template=template, **special)
    assert end_tokens(tmp_path) == (() if end is None else (end,))


def test_reads_end_tokens_from_added_tokens_json(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<|endoftext|>"], chat_template=CHATML)
    assert end_tokens(tmp_path) == ()
    write_json(tmp_path / "added_tokens.json", {"<|im_start|>": 257, "<|im_end|>": 258})
    assert end_tokens(tmp_path) == (258,)


def test_accepts_ordinary_vocabulary_tokens_as_end_tokens(tmp_path: Path) -> None:
    Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], unk_id=0)).save(
        str(tmp_path / "tokenizer.json")
    )
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>"})
    assert end_tokens(tmp_path) == (2,)


def test_finds_no_end_tokens_without_a_tokenizer(tmp_path: Path) -> None:
    assert end_tokens(tmp_path) == ()
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [1]}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        end_tokens(tmp_path)
