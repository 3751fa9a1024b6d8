"""Malicious model files (false sizes, deep nesting, pipes) stop the start before Ray, with one line and
without a hang."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from deltafront.service.cli.main import app
from deltafront.service.config import parse
from deltafront.service.wiring import check_start

from ..workers.tiny_model import write_weights
from .inprocess import write_model

CHOSEN = ("machine ", "context ")
"""The output of `serve` before it checks tokenizer and adapter."""
DEEP = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    directory = write_model(tmp_path / "model")
    write_weights(directory)
    return directory


def refusal(model: Path, *options: str) -> str:
    """Return the line with which `serve` refuses a model."""
    result = CliRunner().invoke(app, ["serve", "--model", str(model), *options])
    assert result.exit_code == 1 and (result.exception is None or isinstance(result.exception, SystemExit))
    said = " ".join(line for line in result.stderr.splitlines() if not line.startswith(CHOSEN))
    assert said.startswith("deltafront: ") and said.count("deltafront: ") == 1 and "Starting Ray" not in said
    return said


def header(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize(
    "file",
    """config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
    added_tokens.json model.safetensors.index.json""".split(),
)
def test_refuses_json_nested_200_000_deep(whole: Path, file: str) -> None:
    (whole / file).write_bytes(DEEP)
    assert f"{file} cannot be read: it nests too deeply" in refusal(whole)


def test_refuses_a_deeply_nested_weights_header(whole: Path) -> None:
    (whole / "model.safetensors").write_bytes(header(DEEP))
    assert "model.safetensors cannot be read as safetensors: it nests too deeply" in refusal(whole)


@pytest.mark.parametrize(
    ("offsets", "held", "says"),
    [
        ([0, 2**62], 32, "model.safetensors has"),
        ([-8, 24], 24, "model.safetensors cannot be read as safetensors"),
        ([0, 31], 31, "model.safetensors cannot be read as safetensors"),
        ([8, 40], 40, "model.safetensors cannot be read as safetensors"),
    ],
)
def test_refuses_false_tensor_offsets_before_a_worker_reads_them(
    whole: Path, offsets: list[int], held: int, says: str
) -> None:
    about = {"x": {"dtype": "F32", "shape": [8], "data_offsets": offsets}}
    (whole / "model.safetensors").write_bytes(header(json.dumps(about).encode()) + bytes(held))
    assert says in refusal(whole)


def test_a_header_that_is_longer_than_memory_is_not_read(whole: Path) -> None:
    (whole / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "its header has 9223372036854775808 bytes" in refusal(whole)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model.safetensors", "model.safetensors is a folder, pipe or device"),
        ("model.safetensors.index.json", "model.safetensors.index.json is a folder, pipe or device"),
        ("config.json", "it lacks config.json"),
        ("tokenizer.json", "it lacks tokenizer.json"),
    ],
)
def test_refuses_a_pipe_in_place_of_a_file(whole: Path, file: str, says: str) -> None:
    (whole / file).unlink(missing_ok=True)
    os.mkfifo(whole / file)
    assert says in refusal(whole)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is more than any model has"),
        ({"num_hidden_layers": 9_999}, "config.json says 9999 layers, but the weights hold"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**9, "num_experts_per_tok": 1},
            "num_experts = 1000000000 is more than any model has",
        ),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 9_999,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 8,
                "norm_topk_prob": True,
            },
            "4 layers with 9999 experts, but the weights hold",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 0},
            "config.json is broken (ZeroDivisionError",
        ),
        ({"hidden_size": 64, "rms_norm_eps": "small"}, "rms_norm_eps = 'small' is not a number above 0"),
        ({"rope_scaling": [1, 2]}, "config.json"),
    ],
)
def test_refuses_absurd_sizes_before_looping_over_them(whole: Path, keys: dict[str, Any], says: str) -> None:
    raw = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(raw | keys))
    assert says in refusal(whole)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "it nests too deeply"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "it nests too deeply"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "it nests too deeply"),
        ("{{ 'a' * 10**10 }}", "more than 256 MiB of memory"),
        (
            "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "more than 256 MiB of memory",
        ),
        (
            "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
            "more than 5 s to render",
        ),
    ],
)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_refuses_a_template_that_takes_too_much_memory(
    whole: Path, template: str, says: str, file: str
) -> None:
    if file.endswith(".json"):
        config = json.loads((whole / file).read_text())
        template = json.dumps(config | {"chat_template": template})
    (whole / file).write_text(template)
    said = refusal(whole)
    assert f"{file}: the chat template cannot be used: " in said and says in said


# --- GGUF


def gguf_file(path: Path, **metadata: Any) -> Path:
    """Write a GGUF file of a tiny Llama, without most of its tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(metadata.get("blocks", 2))
    writer.add_feed_forward_length(128)
    writer.add_head_count(metadata.get("heads", 4))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([b"a", b"b", b"ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    if "template" in metadata:
        writer.add_chat_template(metadata["template"])
    writer.add_tensor("token_embd.weight", np.zeros((3, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return header(name) + struct.pack("<I", kind) + value


def lying(*keys: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    start = struct.pack("<4sIQQ", b"GGUF", 3, tensors, len(keys) if count is None else count)
    return start + b"".join(keys)


ARRAY, BYTE = 9, 0
NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(100_000))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        lying(key(b"a", ARRAY, struct.pack("<IQ", BYTE, 2**40))),
        lying(key(b"a", ARRAY, struct.pack("<IQ", BYTE, 2**63))),
        lying(key(b"a", ARRAY, NESTED)),
        lying(key(b"a", BYTE, b"1"), key(b"a", BYTE, b"1")),
        lying(key(b"a", 99, b"")),
        lying(count=2**63),
        lying(tensors=2**63),
        lying(header(b"t") + struct.pack("<I", 2**31), tensors=1, count=0),
        lying(header(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), tensors=1, count=0),
        lying(header(b"t") + struct.pack("<IQIQ", 1, 8, 12345, 0), tensors=1, count=0),
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62),
    ],
    ids=str,
)
def test_refuses_a_gguf_with_a_false_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert f"{path} cannot be read as GGUF: " in refusal(path)


def test_refuses_a_gguf_truncated_anywhere(tmp_path: Path) -> None:
    whole = gguf_file(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 200, 7), *range(200, len(whole), 97)]:
        cut.write_bytes(whole[:size])
        assert "cut.gguf" in refusal(cut)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"blocks": 10**6}, "num_hidden_layers = 1000000 is more than any model has"),
        ({"heads": 0}, "is broken (ZeroDivisionError"),
        ({"template": "{{ 'a' * 10**10 }}"}, "the chat template cannot be used: "),
    ],
)
def test_refuses_a_gguf_with_inconsistent_values(tmp_path: Path, metadata: dict[str, Any], says: str) -> None:
    assert says in refusal(gguf_file(tmp_path / "model.gguf", **metadata))


def test_refuses_a_pipe_in_place_of_a_gguf(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    assert "model.gguf is a folder, pipe or device" in refusal(tmp_path)


# --- adapters


def write_adapter(directory: Path, tensors: dict[str, tuple[int, int]], **config: Any) -> Path:
    directory.mkdir()
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"} | config
    (directory / "adapter_config.json").write_text(json.dumps(content))
    save_file(
        {name: torch.zeros(shape) for name, shape in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    return directory


FITS = {f"{QUERY}.lora_A.weight": (4, 64), f"{QUERY}.lora_B.weight": (64, 4)}


def cut(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def nests(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_bytes(DEEP)


def piped(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("config", "tensors", "change", "says"),
    [
        ({"use_dora": True}, FITS, None, "use_dora is set"),
        ({"alpha_pattern": {"q_proj": 2}}, FITS, None, "alpha_pattern is set"),
        ({"modules_to_save": ["lm_head"]}, FITS, None, "modules_to_save is set"),
        ({"bias": "lora_only"}, FITS, None, "bias 'lora_only' is not supported"),
        ({"peft_type": "IA3"}, FITS, None, "peft_type 'IA3' is not supported"),
        ({"lora_alpha": None}, FITS, None, "lora_alpha is missing"),
        *(
            ({"init_lora_weights": init}, FITS, None, f"init_lora_weights '{init}' is for other base weights")
            for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "LoRA_GA", "unheard")
        ),
        ({}, {f"{QUERY}.lora_A.weight": (4, 64)}, None, "has only one of lora_A and lora_B"),
        ({}, {**FITS, f"{QUERY}.lora_B.weight": (65, 4)}, None, "made for another model"),
        ({}, {"base_model.model.lm_head.lora_A.weight": (4, 64)}, None, "does not belong to a linear layer"),
        (
            {},
            {name.replace("layers.0", "layers.4"): shape for name, shape in FITS.items()},
            None,
            "the model has no linear layer model.layers.4.self_attn.q_proj",
        ),
        ({}, FITS, cut, "adapter_model.safetensors has"),
        ({}, FITS, nests, "adapter_config.json cannot be read: it nests too deeply"),
        ({}, FITS, piped, "adapter_model.safetensors is a folder, pipe or device"),
    ],
)
def test_an_adapter_that_a_stage_would_refuse_is_refused_at_the_start(
    whole: Path,
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, tuple[int, int]],
    change: Callable[[Path], None] | None,
    says: str,
) -> None:
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    if change is not None:
        change(adapter)
    assert says in refusal(whole, "--adapter", str(adapter))


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_accepts_an_adapter_that_changes_nothing(whole: Path, tmp_path: Path, init: Any) -> None:
    adapter = write_adapter(tmp_path / "adapter", FITS, init_lora_weights=init)
    model = {"path": str(whole), "adapter": str(adapter)}
    check_start(parse({"model": model, "decode": {"page_selection": "full"}}))
