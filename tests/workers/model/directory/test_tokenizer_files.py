"""Tests reading the files beside tokenizer.json, compared with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.utils.chat_template_utils import _compile_jinja_template

from deltafront.service.request.text.tokenizer import TextTokenizer
from deltafront.workers.model.directory import chat_template
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.tokenizer_files import TokenizerFiles

from .tokenizers_of_models import CHATML, write_json, write_tokenizer

USER = [{"role": "user", "content": "hi"}]
EVERYTHING = (
    "{% if not tools is defined or not documents is defined %}undefined{% endif %}"
    "{{ tools is none }}{{ documents is none }}{{ tools }}"
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ sep_token }}{{ think_token }}{{ image_token }}"
    "{{ ['é', {'b': 1, 'a': 2}] | tojson(indent=1, sort_keys=true, separators=(',', ':')) }}"
    "{% if enable_thinking is defined and enable_thinking is false %}no thoughts{% endif %}"
)


def ids_of(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]


def theirs(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def rendered(directory: Path, **variables: Any) -> str:
    files = TokenizerFiles.read(directory)
    assert files.template is not None
    return files.template.render(USER, True, files.special | variables)


NAMES: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}


@pytest.mark.parametrize(
    "config",
    [
        NAMES,
        NAMES | {"think_token": "<think>"},
        NAMES
        | {"extra_special_tokens": {"image_token": "<image>"}, "pad_token": "</s>", "sep_token": "<sep>"},
        NAMES | {"extra_special_tokens": ["<image>"], "add_bos_token": True, "unk_token": None},
    ],
    ids=["standard", "a name of its own", "extra, by name", "extra, as a list"],
)
def test_chat_templates_get_the_variables_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    write_tokenizer(tmp_path, ["<s>", "</s>"], chat_template=EVERYTHING, **config)
    for more in ({}, {"enable_thinking": False}):
        wanted = theirs(tmp_path).apply_chat_template(
            USER, tokenize=False, add_generation_prompt=True, **more
        )
        assert rendered(tmp_path, **more) == wanted
        assert wanted.startswith("TrueTrueNone<s></s>") and wanted.endswith("no thoughts") == bool(more)


def test_special_tokens_map_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """special_tokens_map.json overrides tokenizer_config.json, unless the latter has added_tokens_decoder.
    Then it only adds missing tokens."""
    write_tokenizer(tmp_path, ["<s>", "</s>", "<e>"], chat_template=EVERYTHING, eos_token="</s>")
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "<e>"})
    assert TokenizerFiles.read(tmp_path).special == theirs(tmp_path).special_tokens_map
    assert TokenizerFiles.read(tmp_path).special == {"bos_token": "<s>", "eos_token": "<e>"}
    listed = {"256": {"content": "<s>", "special": True}}
    write_tokenizer(tmp_path, ["<s>", "</s>", "<e>"], eos_token="</s>", added_tokens_decoder=listed)
    assert TokenizerFiles.read(tmp_path).special == {"bos_token": "<s>", "eos_token": "</s>"}


def test_chat_templates_have_the_jinja_extensions_of_transformers() -> None:
    """The test fails with a version of transformers whose templates have further extensions."""
    ours, theirs = chat_template._environment(), _compile_jinja_template("").environment
    assert type(ours) is type(theirs) and ours.undefined is theirs.undefined
    for names in ("filters", "globals", "tests"):
        assert vars(ours)[names].keys() == vars(theirs)[names].keys()
    tags = [{tag for one in made.extensions.values() for tag in one.tags} for made in (ours, theirs)]
    assert tags[0] == tags[1] and "generation" in tags[0]
    for option in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape"):
        assert getattr(ours, option) == getattr(theirs, option)


@pytest.mark.parametrize("file", ["added_tokens.json", "added_tokens_decoder"])
def test_adds_tokens_from_files_beside_tokenizer_json(tmp_path: Path, file: str) -> None:
    ids = {"<|im_end|>": 258, "<|im_start|>": 257}
    listed = {
        str(number): {"content": content, "special": True, "normalized": False}
        for content, number in ids.items()
    }
    more = {"added_tokens_decoder": listed} if file == "added_tokens_decoder" else {}
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write_tokenizer(tmp_path, ["<|endoftext|>"], chat_template=CHATML, **special, **more)
    if not more:
        write_json(tmp_path / file, ids)
    ours, wanted = TextTokenizer.load(tmp_path), theirs(tmp_path)
    found = ids_of(ours.encode_chat(USER))
    chat = wanted.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert found == wanted.encode(chat, add_special_tokens=False)
    assert found.count(257) == 2 and found.count(258) == 1
    assert ours.decode(found) == wanted.decode(found, skip_special_tokens=True) == "user\nhi\nassistant\n"


def test_refuses_an_added_token_whose_id_differs_from_tokenizer_json(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<|endoftext|>"])
    write_json(tmp_path / "added_tokens.json", {"<|im_end|>": 300})
    with pytest.raises(ModelError, match=r"would number '<\|im_end\|>' as 257, the files beside it say 300"):
        TextTokenizer.load(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9085657\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", POINTER, r"tokenizer\.json is a Git LFS pointer, .*`git lfs pull`"),
        ("tokenizer.json", "{}", r"tokenizer\.json cannot be read as a tokenizer"),
        ("tokenizer.json", '{"model":', r"tokenizer\.json cannot be read as a tokenizer"),
        (
            "tokenizer_config.json",
            "[1]",
            "does not contain a JSON object, but a list",
        ),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", POINTER, r"tokenizer_config\.json is a Git LFS pointer"),
        ("special_tokens_map.json", "[]", r"special_tokens_map\.json does not contain a JSON object"),
        ("added_tokens.json", '{"<x>": "many"}', r"added_tokens\.json or added_tokens_decoder is malformed"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"1": "<x>"}}',
            "added_tokens_decoder is malformed",
        ),
        ("tokenizer_config.json", '{"chat_template": [1]}', "must be text, or objects of name and template"),
        ("tokenizer_config.json", '{"chat_template": "\\n{{ x"}', "chat template is broken in its line 2"),
        (
            "chat_template.jinja",
            "{% for m in messages %}",
            "chat template is broken in its line 1",
        ),
        ("chat_template.jinja", "{{ x | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("chat_template.jinja", POINTER, r"chat_template\.jinja is a Git LFS pointer"),
    ],
)
def test_error_names_unusable_tokenizer_files_in_one_line(
    tmp_path: Path, file: str, content: str, message: str
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        TextTokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
