"""Equal models share a digest wherever they lie; whatever changes a model's numbers changes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafront.benchmarks.engine.model import SHAPES
from deltafront.workers.model.directory.digest import _about, model_digest
from deltafront.workers.model.directory.json_files import ModelError
from deltafront.workers.settings import ModelSpec

from ...tiny_model import make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def digest(directory: Path, **changes: Any) -> str:
    return model_digest(ModelSpec(path=str(directory), **changes))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sharded(directory: Path) -> None:
    """The same tensors in two files with an index, the last names in the first."""
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
    "keys that nobody reads": lambda d: edit(d / "config.json", transformers_version="9"),
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
def test_what_changes_no_number_leaves_it(model: Path, change: Callable[[Path], object]) -> None:
    before = digest(model)
    elsewhere = shutil.copytree(model, model.parent / "elsewhere")
    change(elsewhere)
    assert digest(elsewhere) == before == digest(model, dtype="float16", max_position_embeddings=1024)


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_changes_numbers_changes_it(model: Path, change: Callable[[Path], object]) -> None:
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


def test_adapters_and_overrides_count(model: Path, tmp_path: Path) -> None:
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


def test_a_directory_with_a_gguf(model: Path) -> None:
    """Told apart by a tensor's values alone."""
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
def test_files_that_are_no_weights_are_named(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
        digest(model)
    (model / "model.safetensors").rename(model / "another.safetensors")
    with pytest.raises(ModelError, match=r"no weights in .*found 1 other \.safetensors files"):
        digest(model)


def test_a_mixture_s_fields_at_their_default_are_left_out() -> None:
    """Profiles of mixtures that were served before these fields go on to fit."""
    assert _about(SHAPES["30b-a3b"])["mixture"] == {"experts": 128, "per_token": 8, "normed": True}
    assert _about(SHAPES["air-8"])["mixture"]["dense_layers"] == (0,)
