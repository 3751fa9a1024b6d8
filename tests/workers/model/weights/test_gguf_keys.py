"""Tests that keys of a GGUF file which change the logits are read or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from deltafront.workers.model.decoder.rope_angles import inverse_frequencies
from deltafront.workers.model.directory import store
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights.gguf import convert as gguf_convert
from deltafront.workers.model.weights.gguf.source import GgufSource

HEADS, DIM, VOCAB = 2, 16, 8


def write(
    path: Path, architecture: str = "llama", *, factors: bool = False, layers: int = 1, **keys: Any
) -> Path:
    """Write a GGUF file with an embedding and `keys`. A double underscore stands for a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HEADS * DIM)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        name = key.replace("__", ".")
        name = name if name.startswith(("tokenizer.", "split.")) else f"{architecture}.{name}"
        adders[type(value)](name, value)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HEADS * DIM), dtype=np.float32))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.ones(DIM // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config(folder: Path, architecture: str = "llama", **keys: Any) -> ModelConfig:
    source = GgufSource(write(folder / "some.gguf", architecture, **keys))
    (folder / "config.json").write_text(json.dumps(source.config()))
    return read_config(folder)


YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}
LINEAR = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}


@pytest.mark.parametrize(
    ("architecture", "keys", "name"),
    [
        ("llama", {"logit_scale": 0.25}, "llama.logit_scale = 0.25"),
        ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func = 2"),
        ("glm4moe", {"expert_gating_func": 1}, "glm4moe.expert_gating_func = 1"),
        ("llama", {"embedding_scale": 12.0}, "llama.embedding_scale = 12.0"),
        ("llama", {"residual_scale": 0.5}, "llama.residual_scale"),
        ("llama", {"attention__scale": 0.1}, "llama.attention.scale"),
        ("llama", {"attention__sliding_window": 128}, "llama.attention.sliding_window = 128"),
        ("qwen2", {"attention__sliding_window": 128}, "qwen2.attention.sliding_window = 128"),
        ("llama", {"attention__causal": False}, "llama.attention.causal = False"),
        ("llama", {"attention__value_length": 8}, "llama.attention.value_length = 8"),
        ("llama", {"attention__temperature_scale": 0.1}, "llama.attention.temperature_scale"),
        ("llama", {"attention__made_up": 3}, "llama.attention.made_up = 3"),
        ("qwen3", {"rope__made_up": "twice"}, "qwen3.rope.made_up = 'twice'"),
        ("llama", {"rope__scaling__alpha": 2.0}, "llama.rope.scaling.alpha"),
        ("llama", {**YARN, "rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("llama", {**YARN, "rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ("llama", {**YARN, "rope__scaling__yarn_attn_factor": 1.0}, "yarn_attn_factor = 1.0"),
        ("llama", {**LINEAR, "rope__scaling__attn_factor": 1.5}, "rope.scaling.attn_factor = 1.5"),
        ("llama", {**LINEAR, "factors": True}, "rope.scaling.factor = 4.0"),
        ("llama", {"rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        (
            "granite",
            {"expert_count": 8, "expert_used_count": 2},
            "is a mixture of 8 experts of architecture 'granite', and Granite 3.x, dense is served",
        ),
        ("qwen35", {"ssm__inner_size": 64, "ssm__time_step_rank": 0}, "= 64 is no multiple of 0 heads"),
        ("qwen35", {"ssm__inner_size": 64, "ssm__time_step_rank": 5}, "= 64 is no multiple of 5 heads"),
        (
            "qwen3next",
            {"ssm__inner_size": 64, "ssm__time_step_rank": 4, "attention__recurrent_layers": True},
            "recurrent_layers = True is no list",
        ),
        ("llama", {"split__count": 3}, "some.gguf is part 1 of 3: the parts must be called"),
        ("llama", {"tokenizer__ggml__tokens": list("abcdefghi")}, "9 tokens, but only 8 embeddings"),
    ],
)
def test_refuses_and_names_unsupported_gguf_keys(
    tmp_path: Path, architecture: str, keys: dict[str, Any], name: str
) -> None:
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        config(tmp_path, architecture, **keys)


def test_refuses_bad_gguf_keys_before_converting_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    keys: dict[str, Any] = {f"tokenizer__ggml__{key}": value for key, value in tokenizer.items()}
    path = write(tmp_path / "some.gguf", rope__scaling__type="longrope", **keys)
    monkeypatch.setattr(gguf_convert, "_write_weights", None)
    with pytest.raises(ModelError, match="rope scaling 'longrope'"):
        store.model_directory(str(path), tmp_path / "cache")


def test_accepts_gguf_keys_that_change_nothing(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        vocab_size=VOCAB,
        tensor_data_layout="Meta AI original pth",
        expert_count=0,
        logit_scale=1.0,
        embedding_scale=0.0,
        attention__scale=DIM**-0.5,
        attention__causal=True,
        attention__key_length=DIM,
        attention__value_length=DIM,
        attention__sliding_window=256,
        attention__clamp_kqv=0.0,
        rope__dimension_count=DIM,
        rope__scaling__type="linear",
        rope__scaling__finetuned=True,
    )
    assert found.rope.kind == "default" and found.positions == 256


@pytest.mark.parametrize(
    "keys", [LINEAR, {"rope__scale_linear": 4.0}, {"rope__scaling__factor": 4.0, "rope__scale_linear": 2.0}]
)
def test_reads_linear_rope_scaling_by_its_old_key(tmp_path: Path, keys: dict[str, Any]) -> None:
    found = config(tmp_path, **keys)
    assert found.rope.kind == "linear" and found.rope.scaling["factor"] == 4.0


def test_rope_scaling_of_type_none_is_ignored(tmp_path: Path) -> None:
    assert config(tmp_path, rope__scaling__type="none", rope__scaling__factor=4.0).rope.kind == "default"


def test_reads_yarns_ramp_and_temperature_from_gguf(tmp_path: Path) -> None:
    temperature = 0.1 * math.log(4.0) + 1.0
    options = {
        "yarn_beta_fast": 16.0,
        "yarn_beta_slow": 2.0,
        "attn_factor": 1.5,
        "yarn_attn_factor": temperature,
    }
    keys = YARN | {f"rope__scaling__{key}": value for key, value in options.items()}
    found, plain = config(tmp_path, **keys), config(tmp_path, **YARN)
    assert found.rope.scaling["original_max_position_embeddings"] == 64
    assert (found.rope.scaling["beta_fast"], found.rope.scaling["beta_slow"]) == (16.0, 2.0)
    (with_options, magnitude), (without, usual) = (
        inverse_frequencies(one.rope, DIM) for one in (found, plain)
    )
    assert usual == pytest.approx(temperature) and magnitude == pytest.approx(1.5 * temperature)
    assert not torch.equal(with_options, without)


def test_reads_all_end_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    keys = {f"tokenizer__ggml__{kind}_token_id": id_ for id_, kind in enumerate(("eos", "eot", "eom"), 3)}
    assert config(tmp_path, **keys).eos_ids == (3, 4, 5)
    named = config(tmp_path, tokenizer__ggml__tokens=["a", "<|im_end|>"], tokenizer__ggml__eos_token_id=0)
    assert named.eos_ids == (0, 1)


def test_reads_gemma_3_gguf_keys(tmp_path: Path) -> None:
    """The file lacks RoPE of windowed layers and the 27B's attention scale. llama.cpp's code has them."""
    window = {"attention__sliding_window": 64, "rope__freq_base": 1e6, **LINEAR}
    found = config(tmp_path, "gemma3", **window)
    assert (found.sliding_window, found.window_layers, found.attention_scale) == (64, (0,), 1.0)
    assert found.rope.theta == 1e6 and found.rope.kind == "linear"
    assert found.window_rope is not None and found.window_rope.theta == 1e4
    named = config(tmp_path, "gemma3", rope__freq_base_swa=5e3, **window)
    assert named.window_rope is not None and named.window_rope.theta == 5e3
    raw = GgufSource(write(tmp_path / "27b.gguf", "gemma3", layers=62, **window)).config()
    assert raw["query_pre_attn_scalar"] == 168


def test_names_a_tensor_of_linear_attention_that_does_not_fit(tmp_path: Path) -> None:
    sizes = {"conv_kernel": 4, "state_size": 8, "group_count": 2, "time_step_rank": 6, "inner_size": 48}
    keys = {f"ssm__{key}": value for key, value in sizes.items()}
    recurrent = [True, False]
    source = GgufSource(
        write(tmp_path / "some.gguf", "qwen35", layers=2, attention__recurrent_layers=recurrent, **keys)
    )
    name = "model.layers.0.linear_attn.in_proj_a.weight"
    source._names[name] = ("token_embd.weight", None)  # of 8 rows, not 6
    with pytest.raises(ModelError, match=r"tensors of .*in_proj_a.weight do not fit the metadata ssm"):
        source.read(name)
