"""Tests which layers have windows, compared with transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import RopeConfig

from .test_model_config import EXPERTS, LLAMA31, MISTRAL, read

GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}


def test_reads_which_layers_have_a_sliding_window(tmp_path: Path) -> None:
    windowed = MISTRAL | {"sliding_window": 4096, "max_position_embeddings": 32768}
    config = read(tmp_path, windowed)
    assert (config.sliding_window, config.window_layers) == (4096, tuple(range(32)))
    assert config.windows == dict.fromkeys(range(32), 4096)
    shorter = read(tmp_path, windowed, {"max_position_embeddings": 4096})
    assert (shorter.sliding_window, shorter.window_layers, shorter.windows) == (None, (), {})
    unsaid = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert read(tmp_path, unsaid).sliding_window == 4096
    mixed = windowed | {"layer_types": ["full_attention", *["sliding_attention"] * 3] * 8}
    assert read(tmp_path, mixed).window_layers == tuple(layer for layer in range(32) if layer % 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "4096 of 131072 positions. is not supported for Llama"),
        (
            EXPERTS | {"use_sliding_window": True, "sliding_window": 4096},
            "is not supported for Qwen3MoeForCausalLM: use a model with full attention",
        ),
        ({"layer_types": ["sliding_attention"] * 31}, "must be 32 of sliding_attention and full_attention"),
        ({"layer_types": ["chunked_attention"] * 32}, "must be 32 of"),
        ({"sliding_window": "4k"}, "sliding_window"),
        (
            {"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern = 'LLLG': name all layers in layer_types",
        ),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "sets final_logit_softcapping"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "sets use_bidirectional_attention"),
    ],
    ids=str,
)
def test_refuses_windows_of_unsupported_layers(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, MISTRAL | {"sliding_window": 4096} | change)


@pytest.mark.parametrize("architecture", ["Exaone4ForCausalLM", "Cohere2ForCausalLM"])
def test_unrotated_layers_stay_so_if_the_context_fits_the_window(tmp_path: Path, architecture: str) -> None:
    raw = LLAMA31 | {"architectures": [architecture], "sliding_window": 4096, "rope_scaling": None}
    whole, short = read(tmp_path, raw), read(tmp_path, raw, {"max_position_embeddings": 4096})
    assert whole.unrotated_layers == short.unrotated_layers == tuple(range(3, 32, 4))
    assert len(whole.window_layers) == 24 and short.window_layers == ()
    with pytest.raises(ModelError, match="sliding_window is missing, which Cohere2ForCausalLM needs"):
        read(tmp_path, raw | {"architectures": ["Cohere2ForCausalLM"], "sliding_window": None})


def test_reads_gemma_3_as_published(tmp_path: Path) -> None:
    """The published file has few keys. RoPE keys of transformers 4 and 5 give the same result."""
    config = read(tmp_path, GEMMA3)
    assert (config.q_heads, config.kv_heads, config.head_dim, config.vocab) == (8, 4, 256, 262208)
    assert config.windows == {layer: 1024 for layer in range(34) if layer not in (5, 11, 17, 23, 29)}
    assert config.rope == RopeConfig(1e6, {"rope_type": "linear", "factor": 8.0})
    assert config.window_rope == RopeConfig(1e4)
    assert (config.tied_embeddings, config.embedding_scale, config.attention_scale) == (True, 2560**0.5, 1.0)
    theirs = transformers.Gemma3Config(text_config=dict(GEMMA3["text_config"]))
    theirs.architectures = GEMMA3["architectures"]
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == replace(config, eos_ids=(1,))
    config = read(tmp_path, GEMMA3 | {"text_config": GEMMA3["text_config"] | {"query_pre_attn_scalar": 64}})
    assert config.attention_scale == 2.0


QWEN = MISTRAL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 8192},
        {"sliding_window": 8192, "max_window_layers": 31},
        {"sliding_window": 8192, "max_window_layers": 32},
        {"sliding_window": None},
        {"sliding_window": 8192, "layer_types": ["full_attention"] * 32},
        {"sliding_window": 8192, "layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
        {"sliding_window": 8192, "use_sliding_window": False},
        {},
        {"max_window_layers": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_qwen_has_windows_in_the_same_layers_as_in_transformers(
    tmp_path: Path, change: dict[str, Any], kind: str
) -> None:
    """If sliding_window is missing, transformers assumes 4,096."""
    raw = {key: value for key, value in QWEN.items() if key != "sliding_window"} | change
    raw |= {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    window = theirs.sliding_window if "sliding_attention" in theirs.layer_types else None
    config = read(tmp_path, raw)
    assert config.sliding_window == window
    slides = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [layer in config.windows for layer in range(config.layers)] == slides


def test_refuses_dual_chunk_attention_beyond_one_chunk(tmp_path: Path) -> None:
    """Qwen2.5-1M was trained with dual chunk attention, which transformers does not compute."""
    chunks = {"chunk_size": 65536, "local_size": 8192, "original_max_position_embeddings": 65536}
    raw = QWEN | {"use_sliding_window": False, "dual_chunk_attention_config": chunks}
    with pytest.raises(ModelError, match=r"dual_chunk_attention_config: .*beyond 65536 tokens"):
        read(tmp_path, raw)
    assert read(tmp_path, raw, {"max_position_embeddings": 65536}).positions == 65536
    with pytest.raises(ModelError, match="chunk_size"):
        read(tmp_path, raw | {"dual_chunk_attention_config": {"local_size": 8192}})
