"""config.json in the shapes that real models have, what is refused, and layer splits against brute force."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deltafront.workers.model.config import ModelConfig, ModelError, RopeConfig, read_config

LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
MISTRAL = LLAMA31 | {"architectures": ["MistralForCausalLM"], "rope_scaling": None, "sliding_window": None}


def read(tmp_path: Path, raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config(tmp_path, overrides)


def test_llama31_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA31)
    assert config.head_dim == 128 and config.rope.theta == 500000.0 and config.rope.kind == "llama3"
    assert config.rope.scaling["original_max_position_embeddings"] == 8192
    assert config.eos_ids == (128001, 128008, 128009)


def test_old_and_new_rope_keys_read_the_same(tmp_path: Path) -> None:
    rope = LLAMA31["rope_scaling"] | {"rope_theta": 500000.0}
    new = {key: value for key, value in LLAMA31.items() if key not in ("rope_theta", "rope_scaling")}
    assert read(tmp_path, LLAMA31) == read(tmp_path, new | {"rope_parameters": rope})
    oldest = {"type": "linear", "factor": 2.0}
    linear = read(tmp_path, LLAMA31 | {"rope_scaling": oldest}).rope
    assert linear == RopeConfig(500000.0, {"rope_type": "linear", "factor": 2.0})


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128009, 7]}')
    assert read(tmp_path, LLAMA31).eos_ids == (128009, 7, 128001, 128008)


def test_overrides_replace_theta_and_positions(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA31, {"rope_theta": 8e6, "max_position_embeddings": 262144})
    assert config.rope.theta == 8e6 and config.positions == 262144
    assert config.rope.scaling["original_max_position_embeddings"] == 8192
    with pytest.raises(ModelError, match="rope_thetta"):
        read(tmp_path, LLAMA31, {"rope_thetta": 1.0})


def test_the_families_differ_where_they_should(tmp_path: Path) -> None:
    qwen2 = read(
        tmp_path,
        MISTRAL
        | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False},
    )
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.sliding_window) == (True, False, None)
    qwen3 = read(tmp_path, MISTRAL | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    mistral = read(tmp_path, MISTRAL)
    assert (mistral.qkv_bias, mistral.qk_norm, mistral.rope.kind) == (False, False, "default")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0 is not a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": "4x"}}, "factor = '4x' is not a number above 0"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0, -1.0]}}, "is not a number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 5}, "divide"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM' is not a list"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None is not a number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4' is not a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan is not a number above 0"),
        ({"eos_token_id": {"id": 2}}, "eos_token_id holds something else than token ids"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, LLAMA31 | change)


def test_sliding_windows_are_refused_unless_nothing_slides(tmp_path: Path) -> None:
    windowed = MISTRAL | {"sliding_window": 4096, "max_position_embeddings": 32768}
    with pytest.raises(ModelError, match="sliding-window"):
        read(tmp_path, windowed)
    assert read(tmp_path, windowed, {"max_position_embeddings": 4096}).positions == 4096
    with pytest.raises(ModelError, match="sliding-window"):
        read(tmp_path, {key: value for key, value in MISTRAL.items() if key != "sliding_window"})
    with pytest.raises(ModelError, match="sliding-window"):
        read(tmp_path, windowed | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True})


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)


def shape(layers: int, hidden: int, intermediate: int, vocab: int) -> ModelConfig:
    rope = RopeConfig(1e4)
    return ModelConfig("LlamaForCausalLM", layers, hidden, intermediate, 4, 2, 16, vocab, 512, 1e-5, rope)


def slowest(config: ModelConfig, counts: tuple[int, ...]) -> float:
    """Multiplications per token of the slowest stage, written out: q, k, v, then output, gate, up, down,
    which the last layer leaves out."""
    qkv = config.hidden * 64 + 2 * config.hidden * 32
    rest = config.hidden * 64 + 3 * config.hidden * config.intermediate
    layer = qkv + rest
    ends = [0.0] * len(counts)
    ends[0] += config.hidden
    ends[-1] += config.vocab * config.hidden / 512 - rest
    return max(count * layer + end for count, end in zip(counts, ends, strict=True))


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
@pytest.mark.parametrize("vocab", [100, 49_152, 4_000_000])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_split_is_the_best_of_all(layers: int, vocab: int, stages: int) -> None:
    config = shape(layers, 64, 128, vocab)
    if stages > layers:
        with pytest.raises(ModelError, match="stages"):
            config.split(stages)
        return
    parts = config.split(stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    every = [
        counts for counts in itertools.product(range(1, layers + 1), repeat=stages) if sum(counts) == layers
    ]
    best = min(slowest(config, counts) for counts in every)
    assert slowest(config, tuple(len(part) for part in parts)) == best


def test_the_last_stage_takes_a_layer_that_is_left_over() -> None:
    """Its own last one is the lightest."""
    assert [len(part) for part in shape(28, 64, 128, 1000).split(3)] == [9, 9, 10]
    assert [len(part) for part in shape(32, 64, 128, 1000).split(4)] == [8, 8, 8, 8]


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    light, heavy = shape(12, 64, 128, 1000).split(3), shape(12, 64, 128, 1_000_000).split(3)
    assert [len(part) for part in light] == [4, 4, 4]
    assert len(heavy[-1]) < len(heavy[0])


def test_reading_a_config_needs_no_torch() -> None:
    modules = "deltafront.workers.model.config, deltafront.workers.model.store"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
