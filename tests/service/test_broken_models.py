"""A model that cannot be used stops the start, before Ray, with one line that says why."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deltafront.service.cli.main import app
from deltafront.service.config import parse
from deltafront.service.wiring import check_start

from ..workers.tiny_model import write_weights
from .inprocess import write_model

CHOSEN = ("machine ", "context ")
"""The output of `serve` before it checks tokenizer and adapter."""
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 497\n"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    directory = write_model(tmp_path / "model")
    write_weights(directory)
    return directory


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("model.safetensors", POINTER, "model.safetensors is a Git LFS pointer, not the file itself"),
        ("model.safetensors", b"\x40" + bytes(7) + b"{", "cannot be read as safetensors"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "b"}}', "lacks 1 of its 1 files of weights"),
        ("model.safetensors.index.json", b"[]", "does not contain a JSON object, but a list"),
        ("tokenizer.json", POINTER, "tokenizer.json is a Git LFS pointer, not the file itself"),
        ("tokenizer.json", b"{}", "tokenizer.json cannot be read as a tokenizer"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json does not contain a JSON object, but a list"),
        ("chat_template.jinja", b"{% if %}", "the chat template is broken in its line 1"),
        (
            "quant_config.json",
            b'{"w_bit": 3}',
            "quant_config.json: weights quantised by awq in 3 bits are not",
        ),
        ("config.json", POINTER, "config.json is a Git LFS pointer, not the file itself"),
        ("generation_config.json", b'{"eos_token_id": true}', "something else than token ids: [True, 257]"),
        ("config.json", None, "lacks config.json"),
        ("tokenizer.json", None, "lacks tokenizer.json (or tekken.json)"),
        ("model.safetensors", None, "lacks *.safetensors (or one .gguf)"),
        ("config.json", {"num_hidden_layers": 9}, "the weights lack"),
        (
            "config.json",
            {"num_hidden_layers": 3},
            "the weights have a layer 3, but config.json says 3 layers",
        ),
        ("config.json", {"vocab_size": 7}, "model.embed_tokens.weight is"),
        ("config.json", {"num_key_value_heads": 3}, "heads must divide evenly"),
        ("config.json", {"head_dim": 80}, "config.json says"),
        ("config.json", {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ("config.json", {"attention_bias": True}, "the weights lack"),
        ("config.json", {"architectures": ["MiMoV2ForCausalLM"]}, "attention sinks"),
        ("config.json", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        (
            "config.json",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}},
            "mscale needs yarn",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "aqlm"}},
            "quantised by aqlm are not served",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "fp8"}},
            "the weights hold no quantised matrix",
        ),
        (
            "config.json",
            {"dual_chunk_attention_config": {"chunk_size": 16}},
            "attention by chunks, beyond 16",
        ),
        ("config.json", {"sliding_window": 64}, "sliding-window attention (64 of"),
    ],
)
def test_a_broken_file_stops_the_start_in_one_line(
    whole: Path, file: str, content: bytes | dict[str, Any] | None, says: str
) -> None:
    """content: the file's content, or changes of its keys; None: the file is missing."""
    if content is None:
        (whole / file).unlink()
    elif isinstance(content, dict):
        (whole / file).write_text(json.dumps(json.loads((whole / file).read_text()) | content))
    else:
        (whole / file).write_bytes(content)
    result = CliRunner().invoke(app, ["serve", "--model", str(whole)])
    assert result.exit_code == 1, "before Ray starts"
    said = " ".join(line for line in result.stderr.splitlines() if not line.startswith(CHOSEN))
    assert says in said and said.startswith("deltafront: ") and "Starting Ray" not in said


def test_start_warns_of_8_bit_weights_held_in_16_bits(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    stored = load_file(whole / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        stored[name.removesuffix("weight") + "weight_scale"] = torch.ones(1)
    save_file(stored, whole / "model.safetensors")
    settings = parse({"model": {"path": str(whole)}, "decode": {"page_selection": "full"}})
    with caplog.at_level(logging.WARNING):
        check_start(settings)
    assert "holds weights in FP8: they are dequantised and held in bfloat16" in caplog.text


def test_warns_of_a_model_without_end_tokens(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = parse({"model": {"path": str(whole)}, "decode": {"page_selection": "full"}})
    with caplog.at_level(logging.WARNING):
        check_start(settings)
    assert not caplog.records
    raw = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({key: raw[key] for key in raw if key != "eos_token_id"}))
    special = json.loads((whole / "tokenizer_config.json").read_text())
    (whole / "tokenizer_config.json").write_text(json.dumps(special | {"eos_token": None}))
    with caplog.at_level(logging.WARNING):
        check_start(settings)
    assert "names no end token" in caplog.text
