"""Tests that a model's digest depends only on what affects its logits, and not on its path."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafront.benchmarks.engine.model import SHAPES
from deltafront.tests.workers.in_process import InProcessReader
from deltafront.workers.decode.worker import load_engine
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.directory import digest as digests
from deltafront.workers.model.directory import store
from deltafront.workers.model.directory.digest import (
    _about,
    checked_model,
    content_digest,
    mark_complete,
    model_digest,
)
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.settings import DecodeConfig, ModelSpec

from ...tiny_model import LAYERS, make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def digest(directory: Path, **changes: Any) -> str:
    return model_digest(ModelSpec(path=str(directory), **changes))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sharded(directory: Path) -> None:
    """Split the weights into two files with an index. The first file has the names that sort last."""
    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    parts = {"b.safetensors": names[:20], "a.safetensors": names[20:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, directory / file, metadata={"made": file})
    index = {name: file for file, held in parts.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "model.safetensors").unlink()


SAME: dict[str, Callable[[Path], object]] = {
    "shards": sharded,
    "the longest prompt": lambda d: edit(d / "config.json", max_position_embeddings=512),
    "end tokens": lambda d: edit(d / "config.json", eos_token_id=3),
    "unread keys": lambda d: edit(d / "config.json", transformers_version="9"),
    "the tokenizer": lambda d: (d / "tokenizer.json").write_text('{"a": 1}'),
    "weights that are not read": lambda d: save_file({"x": torch.ones(3)}, d / "consolidated.safetensors"),
}


def altered(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = load_file(directory / "model.safetensors")
    weights[name] = change(weights[name])
    save_file(weights, directory / "model.safetensors")


OTHER: dict[str, Callable[[Path], object]] = {
    "rope": lambda d: edit(d / "config.json", rope_theta=5e5),
    "the norm's epsilon": lambda d: edit(d / "config.json", rms_norm_eps=1e-6),
    "a trained matrix": lambda d: altered(d, "model.layers.4.mlp.down_proj.weight", lambda w: w * 1.01),
    "a matrix in another type": lambda d: altered(d, "lm_head.weight", lambda w: w.bfloat16()),
    "two matrices of one shape": lambda d: altered(
        d, "model.layers.1.mlp.up_proj.weight", lambda w: w.flip(0)
    ),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_digest_ignores_changes_that_do_not_affect_logits(
    model: Path, change: Callable[[Path], object]
) -> None:
    before = digest(model)
    elsewhere = shutil.copytree(model, model.parent / "elsewhere")
    change(elsewhere)
    assert digest(elsewhere) == before == digest(model, dtype="float16", max_position_embeddings=1024)


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_digest_changes_with_anything_that_affects_logits(
    model: Path, change: Callable[[Path], object]
) -> None:
    before = digest(model)
    change(model)
    assert digest(model) != before


def adapter(directory: Path, scale: float = 1.0, **config: Any) -> str:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    directory.mkdir()
    tensors = {name.format(side): torch.full((4, 4), scale) for side in "AB"}
    save_file(tensors, directory / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "lora_alpha": 8, "base_model_name_or_path": str(directory), **config}
    (directory / "adapter_config.json").write_text(json.dumps(content))
    return str(directory)


def test_digest_covers_adapters_and_overrides(model: Path, tmp_path: Path) -> None:
    found = [
        digest(model),
        digest(model, rope_theta=8e6),
        digest(model, adapter=adapter(tmp_path / "one")),
        digest(model, adapter=adapter(tmp_path / "two", scale=2.0)),
        digest(model, adapter=adapter(tmp_path / "three", lora_alpha=16)),
        digest(model, adapter=adapter(tmp_path / "four", use_rslora=True)),
    ]
    assert len(set(found)) == len(found)
    same = adapter(tmp_path / "five", use_rslora=False)
    assert digest(model, adapter=same) == found[2], "where it lies, and what it was made from, are no numbers"


def test_digest_tells_gguf_files_apart_by_tensor_values(model: Path) -> None:
    (model / "model.safetensors").unlink()
    found = set()
    for value in (1.0, 2.0, 2.0):
        writer = gguf.GGUFWriter(str(model / "model.gguf"), "llama")
        writer.add_tensor("token_embd.weight", np.full((8, 32), value, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.add(digest(model))
    assert len(found) == 2


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", b"\x09" + bytes(7) + b'{"a": {}}']
)
def test_error_names_files_that_are_not_weights(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
        digest(model)
    (model / "model.safetensors").rename(model / "another.safetensors")
    with pytest.raises(ModelError, match=r"no weights in .*found 1 other \.safetensors files"):
        digest(model)


def test_digest_omits_mixture_fields_with_default_values() -> None:
    """Otherwise profiles made before these fields existed would not match their model."""
    assert _about(SHAPES["30b-a3b"])["mixture"] == {"experts": 128, "per_token": 8, "normed": True}
    assert _about(SHAPES["air-8"])["mixture"]["dense_layers"] == (0,)


# --- every byte


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which every file that is hashed completely is added."""
    read, original = [], digests._hashed

    def counted(path: Path) -> str:
        read.append(path)
        return original(path)

    monkeypatch.setattr(digests, "_hashed", counted)
    return read


def content(directory: Path, **changes: Any) -> str:
    return content_digest(ModelSpec(path=str(directory), **changes), directory.parent / "cache")


def settle(directory: Path, seconds: float = 100.0) -> None:
    """Set files' modification times to `seconds` ago, like those of a model that was not just written."""
    for path in directory.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def flip(path: Path, place: int) -> None:
    """Change a byte in place, without changing the modification time."""
    status, changed = path.stat(), bytearray(path.read_bytes())
    changed[place] ^= 1
    with path.open("r+b") as file:
        file.write(changed)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_byte_outside_the_sample_changes_only_the_content_digest(model: Path) -> None:
    """Such bytes change, for example, when only the last rows of an embedding are trained further."""
    settle(model)
    sampled, whole = digest(model), content(model)
    size = (model / "model.safetensors").stat().st_size
    for place in (size - 1, size - 20_000):
        flip(model / "model.safetensors", place)
        other = content(model)
        assert other != whole
        flip(model / "model.safetensors", place)
        assert content(model) == whole
    assert digest(model) == sampled


def test_a_digest_depends_on_pieces_hashed_by_all_threads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = content(model)
    monkeypatch.setattr(digests, "_PIECE_BYTES", 10_000)
    in_pieces = digests._hashed(model / "model.safetensors")
    for place in (5, 9_999, 10_000, 25_000):
        flip(model / "model.safetensors", place)
        assert digests._hashed(model / "model.safetensors") != in_pieces
        flip(model / "model.safetensors", place)
    assert digests._hashed(model / "model.safetensors") == in_pieces and whole


def test_hashes_a_file_once_until_it_changes(model: Path, hashed: list[Path]) -> None:
    sharded(model)
    settle(model)
    digests_found = [content(model) for _ in range(3)]
    assert len(set(digests_found)) == 1 and len(hashed) == 2
    threads = [threading.Thread(target=content, args=(model,)) for _ in range(4)]
    shutil.rmtree(model.parent / "cache")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hashed) == 4, "one reads, the others wait"
    flip(model / "a.safetensors", -1)
    assert content(model) != digests_found[0] and hashed[4:] == [model / "a.safetensors"]


def test_hashes_recently_written_files_again(model: Path, hashed: list[Path]) -> None:
    settle(model, seconds=-100.0)
    assert content(model) == content(model) and len(hashed) == 2


def test_hashes_files_again_if_the_digest_cache_is_not_writable(
    model: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(model)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    one, other = (content_digest(ModelSpec(path=str(model))) for _ in range(2))
    assert one == other and len(hashed) == 2


def test_digest_cache_writes_nothing_into_the_model_directory(model: Path) -> None:
    before = sorted(path.name for path in model.iterdir())
    content(model)
    assert sorted(path.name for path in model.iterdir()) == before


def test_digest_covers_every_byte_of_an_adapter(model: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    adapter = model.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(4000)}, adapter / "adapter_model.safetensors")
    settle(adapter)
    plain, adapted = content(model), content(model, adapter=str(adapter))
    flip(adapter / "adapter_model.safetensors", -1)
    assert len({plain, adapted, content(model, adapter=str(adapter))}) == 3


def listed(directory: Path) -> Path:
    """Write SHA256SUMS like `sha256sum *`. Return the directory."""
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in directory.iterdir()]
    (directory / "SHA256SUMS").write_text("".join(sums))
    return directory


def noted_by_the_hub(directory: Path) -> Path:
    """Write metadata like the hub's client: a sha256 of large files, git's digest of small ones."""
    notes = directory / ".cache" / "huggingface" / "download"
    files = [path for path in directory.iterdir() if path.is_file()]
    notes.mkdir(parents=True)
    for path in files:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if path.suffix == ".json":
            digest = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        (notes / f"{path.name}.metadata").write_text(f"{'c' * 40}\n{digest}\n1700000000.0\n")
    return directory


@pytest.mark.parametrize("having", [listed, noted_by_the_hub])
def test_accepts_files_that_match_their_published_digests(
    model: Path, having: Callable[[Path], Path]
) -> None:
    files = {path.name for path in having(model).iterdir() if path.suffix in (".json", ".safetensors")}
    assert mark_complete(model) == len(files) and (model / ".complete").exists()
    flip(model / "model.safetensors", -1)
    with pytest.raises(ModelError, match=r"model.safetensors has the digest .* fetch or copy"):
        mark_complete(model)
    assert not (model / ".complete").exists(), "the mark of what it was before"
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model.safetensors is missing"):
        mark_complete(model)


def test_error_names_a_file_without_a_digest_and_says_what_to_do(model: Path) -> None:
    (listed(model) / "more.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no digest of more.safetensors: .*sha256sum") as refused:
        mark_complete(model)
    subprocess.run(["bash", "-c", str(refused.value).partition("write it: ")[2]], check=True)
    assert mark_complete(model) == len([path for path in model.iterdir() if path.suffix]), (
        "not the list itself"
    )


async def test_looks_up_the_model_directory_once_per_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look-up hashes a GGUF file or asks the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent))
    asked: list[str] = []

    def found(name: str) -> Path:
        asked.append(name)
        return model

    spec = ModelSpec(path="owner/name", digest=digest(model))
    monkeypatch.setattr(store, "model_directory", found)
    assert load_model(spec, "cpu").config.layers == LAYERS
    assert asked.count(spec.path) == 1
    asked.clear()
    config = DecodeConfig(
        cache_tokens=256, host_cache_gib=0.01, store=str(model.parent), full_layers=(), delta_layers=()
    )
    engine = load_engine("decode:x", spec, config, reader=InProcessReader)
    await engine.close()
    assert asked.count(spec.path) == 1


def test_refuses_a_node_whose_model_files_differ(model: Path) -> None:
    spec = ModelSpec(path=str(model), digest=digest(model))
    assert checked_model(spec).path == str(model.resolve())
    edit(model / "config.json", rope_theta=1234.0)
    with pytest.raises(
        ModelError, match=r"this node's files have the digest .*: give every node the same files"
    ):
        checked_model(spec)
