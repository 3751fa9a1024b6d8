"""config.json in the shapes that real models have, what is refused, and layer splits against brute force."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from deltafront.service.cli.size import SHAPES
from deltafront.workers.model.directory.json_files import ModelError
from deltafront.workers.model.directory.mixture_config import MixtureConfig
from deltafront.workers.model.directory.model_config import ModelConfig, read_config
from deltafront.workers.model.directory.rope_config import RopeConfig
from deltafront.workers.model.layer_shares import LayerShare, balanced
from deltafront.workers.prefill.group.chunks import ModelWork

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


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SAVED_BY_TRANSFORMERS_5: dict[str, Any] = {
    key: value for key, value in LLAMA31.items() if key not in ("rope_theta", "rope_scaling")
} | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("pasted", "message"),
    [
        ({"rope_scaling": YARN}, r"rope_parameters \(default\) and another rope_scaling \(yarn\)"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "another rope_scaling"),
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}}, "another rope_scaling"),
        ({"rope_theta": 5e5}, r"several rope_theta, \[1000000.0, 500000.0\]"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, "several rope_theta"),
    ],
)
def test_rope_keys_that_contradict_each_other_are_refused(
    tmp_path: Path, pasted: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, SAVED_BY_TRANSFORMERS_5 | pasted)


def test_rope_keys_that_agree_may_stand_twice(tmp_path: Path) -> None:
    both = SAVED_BY_TRANSFORMERS_5 | {
        "rope_parameters": YARN | {"rope_theta": 1e6},
        "rope_scaling": {"type": "yarn", **{key: YARN[key] for key in YARN if key != "rope_type"}},
        "rope_theta": 1e6,
    }
    assert read(tmp_path, both).rope == RopeConfig(1e6, YARN)


def test_the_trained_length_may_stand_at_the_top(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    top = SAVED_BY_TRANSFORMERS_5 | {"rope_parameters": scaling, "max_position_embeddings": 40960}
    assert read(tmp_path, top).rope.scaling["original_max_position_embeddings"] == 40960
    found = read(tmp_path, top | {"original_max_position_embeddings": 32768})
    assert found.rope.scaling["original_max_position_embeddings"] == 32768 and found.positions == 131072
    twice = {"rope_parameters": YARN, "original_max_position_embeddings": 8192}
    with pytest.raises(ModelError, match="= 8192, but 32768 in its rope scaling"):
        read(tmp_path, top | twice)


@pytest.mark.parametrize("said", [32768, 40960, 131072])
def test_yarn_raises_the_positions(tmp_path: Path, said: int) -> None:
    """As vLLM: `factor` times what the model was trained for, whatever max_position_embeddings says."""
    yarn = SAVED_BY_TRANSFORMERS_5 | {"rope_parameters": YARN, "max_position_embeddings": said}
    assert read(tmp_path, yarn).positions == 131072
    assert read(tmp_path, yarn, {"max_position_embeddings": 65536}).positions == 65536
    linear = {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    assert read(tmp_path, yarn | linear).positions == said


@pytest.mark.parametrize(("rope", "known"), [({}, 32768), ({"rope_parameters": YARN}, 131072)])
def test_more_positions_than_the_rope_reaches_are_refused(
    tmp_path: Path, rope: dict[str, Any], known: int
) -> None:
    raw, more = SAVED_BY_TRANSFORMERS_5 | rope, {"max_position_embeddings": known + 1}
    with pytest.raises(ModelError, match=rf"--max-model-len\) = {known + 1}, but the model has {known} pos"):
        read(tmp_path, raw, more)
    assert read(tmp_path, raw, more | {"rope_theta": 8e6}).positions == known + 1


def test_overrides_replace_theta_and_positions(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA31, {"rope_theta": 8e6, "max_position_embeddings": 262144})
    assert config.rope.theta == 8e6 and config.positions == 262144
    assert config.rope.scaling["original_max_position_embeddings"] == 8192
    with pytest.raises(ModelError, match="rope_thetta"):
        read(tmp_path, LLAMA31, {"rope_thetta": 1.0})


EXPERTS: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 768}


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a_mixture_of_experts(tmp_path: Path, key: str) -> None:
    """Numbers of all experts are counted, multiply-adds of the chosen ones."""
    config = read(tmp_path, LLAMA31 | EXPERTS | {key: 64, "num_experts_per_tok": 4, "norm_topk_prob": True})
    assert config.mixture == MixtureConfig(experts=64, per_token=4, normed=True)
    assert (config.intermediate, config.of_rank(4).intermediate) == (768, 192)
    one = 3 * config.hidden * 768
    assert (config.mlp_matrices, config.mlp_macs) == (64 * one, 4 * one + 64 * config.hidden)
    layer = config.weights(range(1), embedding=False, head=False)
    norms = 2 * config.hidden + (config.q_heads + config.kv_heads) * config.head_dim
    assert layer == config.attention_matrices + config.mlp_matrices + 64 * config.hidden + norms
    dense = replace(config, mixture=None, intermediate=4 * 768)
    assert config.split(3) == dense.split(3), "stages are balanced by what a token costs"
    assert read(tmp_path, LLAMA31 | EXPERTS).mixture == MixtureConfig(experts=128, per_token=8, normed=False)


GLM: dict[str, Any] = {"architectures": ["Glm4MoeForCausalLM"], "moe_intermediate_size": 1408}


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        (GLM, [0]),
        (GLM | {"first_k_dense_replace": 3}, [0, 1, 2]),
        (GLM | {"first_k_dense_replace": 0}, []),
        (EXPERTS, []),
        (EXPERTS | {"mlp_only_layers": [31, 4]}, [4, 31]),
        (
            EXPERTS | {"decoder_sparse_step": 4, "mlp_only_layers": [3]},
            [3, *(n for n in range(32) if n % 4 != 3)],
        ),
    ],
    ids=str,
)
def test_some_layers_may_have_no_experts(tmp_path: Path, change: dict[str, Any], dense: list[int]) -> None:
    """Each layer counts as what it is, in sizes, stages and chunks."""
    config = read(tmp_path, LLAMA31 | change)
    assert config.mixture is not None and config.mixture.dense_layers == tuple(sorted(dense))
    mlp = 3 * config.hidden * 14336
    experts = config.mlp_macs
    costs = [mlp if n in dense else experts for n in range(config.layers)]
    assert [config.of_layer(n).mlp_macs for n in range(config.layers)] == costs
    shapes = config.shapes()
    ends = config.weights(range(0), embedding=True, head=True)
    norms = (config.q_heads + config.kv_heads - 2) * config.head_dim * config.qk_norm * config.layers
    assert config.weights(range(config.layers)) - norms == sum(map(math.prod, shapes.values()))
    apart = [config.weights(range(n, n + 1), embedding=False, head=False) for n in range(config.layers)]
    assert config.weights(range(config.layers)) == ends + sum(apart)
    work = ModelWork.of(config, 3, quantised=False)
    attention = (config.layers - 1) * config.attention_matrices + config.qkv_matrices
    assert sum(stage.per_token for stage in work.stages) == attention + sum(costs[:-1])
    fullest = max(stage.per_token + 5_700 * stage.per_pair for stage in work.stages)
    assert fullest < 1.1 * sum(stage.per_token + 5_700 * stage.per_pair for stage in work.stages) / 3
    widths = {config.hidden, config.intermediate, 32 * config.head_dim, *[14336] * bool(dense)}
    assert {*config.matrix_widths()} == widths


def test_ranks_share_every_kind_of_mlp(tmp_path: Path) -> None:
    raw = LLAMA31 | GLM | {"intermediate_size": 10944, "n_shared_experts": 2}
    part = read(tmp_path, raw).of_rank(4)
    assert part.mlp_widths == (352, 704, 2736) and part.mixture is not None
    with pytest.raises(ModelError, match="4 ranks cannot share the model's 10946 MLP columns equally"):
        read(tmp_path, raw | {"intermediate_size": 10946}).of_rank(4)


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
    unsaid = {key: value for key, value in MISTRAL.items() if key not in ("attention_bias", "sliding_window")}
    seed = read(tmp_path, unsaid | {"architectures": ["SeedOssForCausalLM"], "hidden_size": 5120})
    assert (seed.qkv_bias, seed.o_bias, seed.mlp_bias, seed.head_dim) == (True, False, False, 128)
    biased = read(tmp_path, LLAMA31 | {"attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0 is not a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": "4x"}}, "factor = '4x' is not a number above 0"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0, -1.0]}}, "is not a number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale needs yarn"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta with rope scaling 'yarn' is not supported for LlamaForCausalLM",
        ),
        (
            {"architectures": ["Ministral3ForCausalLM"], "llama_4_scaling_beta": 0.1, "rope_scaling": None},
            "llama_4_scaling_beta with rope scaling 'default'",
        ),
        (
            {
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "position_embedding_type": "rope",
                "num_local_experts": 0,
                "layer_types": ["attention", "mamba"],
                "mamba_d_state": 128,
            },
            r"layer_types = 'mamba' is not supported, only with 'attention' or .* \(it has state-space",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention",
        ),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by awq"),
        ({"num_key_value_heads": 5}, "divide"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM' is not a list"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None is not a number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4' is not a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan is not a number above 0"),
        ({"eos_token_id": {"id": 2}}, "eos_token_id holds something else than token ids"),
        ({"eos_token_id": True}, r"eos_token_id holds something else than token ids: \[True\]"),
        ({"eos_token_id": [2, False]}, "eos_token_id holds something else than token ids"),
        ({"partial_rotary_factor": 0.5}, "partial rotary factor"),
        (
            {"architectures": ["MistralForCausalLM"], "attention_bias": True},
            "MistralForCausalLM does not have",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, "sets mlp_bias, which Qwen3ForCausalLM"),
        ({"architectures": ["Mistral3ForConditionalGeneration"]}, "has no section text_config"),
        ({"rope_scaling": ["yarn"]}, "is not a section of keys"),
        ({"num_experts": 8}, "sets num_experts, which LlamaForCausalLM does not have"),
        (EXPERTS | {"mlp_only_layers": 3}, "mlp_only_layers = 3 is not a list of layers"),
        (EXPERTS | {"mlp_only_layers": ["0"]}, "is not a list of layers"),
        (EXPERTS | {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 is not a positive whole number"),
        (EXPERTS | {"mlp_only_layers": [3], "intermediate_size": None}, "has no 'intermediate_size'"),
        (EXPERTS | {"n_shared_experts": 1}, "sets n_shared_experts, which Qwen3MoeForCausalLM"),
        (GLM | {"n_group": 3}, "n_group = 3 and topk_group = 1 cannot be groups .* of 128 experts"),
        (GLM | {"n_group": 128}, "cannot be groups of two or more"),
        (GLM | {"n_group": 4, "topk_group": 5}, "topk_group = 5 cannot"),
        (
            GLM | {"n_group": 16, "topk_group": 1, "num_experts_per_tok": 9},
            "num_experts_per_tok = 9 of 1 groups of 8",
        ),
        (GLM | {"routed_scaling_factor": 0}, "routed_scaling_factor = 0 is not a number above 0"),
        (GLM | {"n_shared_experts": -1}, "n_shared_experts = -1 is not"),
        (GLM | {"first_k_dense_replace": "1"}, "first_k_dense_replace = '1' is not"),
        (GLM | {"scoring_func": "relu"}, "scoring_func = 'relu' is not supported"),
        ({"use_qk_norm": True}, "sets use_qk_norm, which LlamaForCausalLM does not have"),
        (EXPERTS | {"num_experts_per_tok": 129}, "num_experts_per_tok = 129 of num_experts = 128"),
        (EXPERTS | {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (EXPERTS | {"mlp_bias": True}, "sets mlp_bias, which Qwen3MoeForCausalLM"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, LLAMA31 | change)


def test_windows_are_those_of_transformers(tmp_path: Path) -> None:
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
def test_windows_that_no_layer_here_has_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, MISTRAL | {"sliding_window": 4096} | change)


def test_gemma_3_as_published(tmp_path: Path) -> None:
    """Few keys; its older spelling of rope and transformers 5's read the same."""
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
def test_a_qwen_slides_where_transformers_lets_it(tmp_path: Path, change: dict[str, Any], kind: str) -> None:
    """Without a window it assumes one of 4,096."""
    raw = {key: value for key, value in QWEN.items() if key != "sliding_window"} | change
    raw |= {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    window = theirs.sliding_window if "sliding_attention" in theirs.layer_types else None
    config = read(tmp_path, raw)
    assert config.sliding_window == window
    slides = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [layer in config.windows for layer in range(config.layers)] == slides


def test_dual_chunk_attention_is_refused_beyond_its_chunk(tmp_path: Path) -> None:
    """Qwen2.5-1M's key; transformers computes another attention than the model was made for."""
    chunks = {"chunk_size": 65536, "local_size": 8192, "original_max_position_embeddings": 65536}
    raw = QWEN | {"use_sliding_window": False, "dual_chunk_attention_config": chunks}
    with pytest.raises(ModelError, match=r"dual_chunk_attention_config: .*beyond 65536 tokens"):
        read(tmp_path, raw)
    assert read(tmp_path, raw, {"max_position_embeddings": 65536}).positions == 65536
    with pytest.raises(ModelError, match="chunk_size"):
        read(tmp_path, raw | {"dual_chunk_attention_config": {"local_size": 8192}})


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)


def shape(layers: int, hidden: int, intermediate: int, vocab: int) -> ModelConfig:
    rope = RopeConfig(1e4)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=vocab,
        positions=512,
        rms_eps=1e-5,
        rope=rope,
    )


def costs_of(config: ModelConfig) -> list[int]:
    """Multiplications per token of A0, M0, A1, M1 …, written out: q, k, v and output, and for each of 5,700
    keys a score and a value; gate, up, down. The last layer is q, k and v alone, and the head."""
    qkv = config.hidden * config.head_dim * (config.q_heads + 2 * config.kv_heads)
    attention = qkv + config.hidden * config.q_heads * config.head_dim
    attention += 5_700 * 2 * config.q_heads * config.head_dim
    mlp = 3 * config.hidden * config.intermediate
    head = config.vocab * config.hidden // 512
    return [attention, mlp] * (config.layers - 1) + [qkv + head, 0]


def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Where to cut A0 M0 A1 M1 … so that each part has an A, which are at the even places."""
    for cuts in itertools.combinations(range(1, 2 * layers), stages - 1):
        bounds = [0, *cuts, 2 * layers]
        if all(any(half % 2 == 0 for half in range(*pair)) for pair in itertools.pairwise(bounds)):
            yield tuple(bounds)


def cuts_of(parts: tuple[LayerShare, ...]) -> tuple[int, ...]:
    """Such bounds, of parts that must follow one another without gaps."""
    bounds = [0]
    for part in parts:
        halves = sorted([2 * layer for layer in part.layers] + [2 * layer + 1 for layer in part.mlps])
        assert len(part.layers) > 0 and halves == list(range(bounds[-1], halves[-1] + 1))
        assert part.layers.start - part.mlps.start in (0, 1) and part.layers.stop - part.mlps.stop in (0, 1)
        bounds.append(halves[-1] + 1)
    return tuple(bounds)


def shares_of(costs: Sequence[int], bounds: tuple[int, ...]) -> list[int]:
    return [sum(costs[start:end]) for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
@pytest.mark.parametrize("vocab", [100, 4_000_000, 400_000_000])
@pytest.mark.parametrize("intermediate", [128, 4096, 40_000])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_split_is_the_best_of_all(layers: int, vocab: int, intermediate: int, stages: int) -> None:
    config = shape(layers, 64, intermediate, vocab)
    if stages > layers:
        with pytest.raises(ModelError, match="stages"):
            config.split(stages)
        return
    costs, found = costs_of(config), cuts_of(config.split(stages))
    every = list(every_cut(layers, stages))
    assert found in every
    least = min(max(shares_of(costs, bounds)) for bounds in every)
    assert max(shares_of(costs, found)) == least
    best = [bounds for bounds in every if max(shares_of(costs, bounds)) == least]
    inside = min(sum(bound % 2 for bound in bounds) for bounds in best)
    assert sum(bound % 2 for bound in found) == inside, "layers are cut in two only where that gains"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_layers_with_windows_and_mlps_without_experts_cost_what_they_compute(first: int, stages: int) -> None:
    """Dense MLPs in the first layers, experts behind them, windows in two of three layers."""
    layers, hidden, width, dense, window = 6, 64, 48, 4096, 100
    mixture = MixtureConfig(
        experts=32,
        per_token=4,
        normed=True,
        shared_width=80,
        dense_layers=tuple(range(first)),
        dense_width=dense,
    )
    windows = {"sliding_window": window, "window_layers": tuple(n for n in range(layers) if n % 3)}
    config = replace(shape(layers, hidden, width, 100), mixture=mixture, **windows)
    costs = []
    for layer in range(layers):
        keys = window if layer % 3 else 5_700
        costs += [hidden * 16 * (4 + 2 * 2) + hidden * 16 * 4 + keys * 2 * 4 * 16]
        costs += [3 * hidden * (dense if layer < first else 4 * width + 80) + 32 * hidden * (layer >= first)]
    costs[-2:] = hidden * 16 * 8 + 100 * hidden // 512, 0
    least = min(max(shares_of(costs, bounds)) for bounds in every_cut(layers, stages))
    assert max(shares_of(costs, cuts_of(config.split(stages)))) == least


@pytest.mark.parametrize("seed", range(60))
def test_any_costs_are_shared_out_best(seed: int) -> None:
    """Feed-forward networks, the first layer and the last may cost what they will."""
    rng = random.Random(seed)
    layers = rng.randint(1, 7)
    costs = [rng.randint(1, 9), rng.randint(0, 9)] * layers
    costs[-2:] = rng.randint(1, 20), 0
    for stages in range(1, layers + 1):
        found = cuts_of(balanced(tuple(costs), stages))

        def worth(bounds: tuple[int, ...]) -> tuple[int, int, int]:
            shares = shares_of(costs, bounds)
            return max(shares), sum(bound % 2 for bound in bounds), sum(share**2 for share in shares)

        assert worth(found) == min(worth(bounds) for bounds in every_cut(layers, stages))


def test_two_stages_of_llama_8b_share_a_layer() -> None:
    """The first would have 16 layers else, and the second 15 and what is left of the last."""
    config = SHAPES["8b"]
    assert config.split(2) == (LayerShare(range(16), range(15)), LayerShare(range(16, 32), range(15, 32)))
    first, last = shares_of(costs_of(config), cuts_of(config.split(2)))
    layer = sum(costs_of(config)[:2])
    assert max(first, last) < 15.8 * layer


def test_layers_stay_whole_where_a_cut_gains_nothing() -> None:
    """Of four stages one has eight layers' worth whatever is done."""
    for name, stages in (("8b", 4), ("8b", 8), ("70b", 4), ("70b", 8)):
        parts = SHAPES[name].split(stages)
        each = SHAPES[name].layers // stages
        assert [len(part.layers) for part in parts] == [each] * stages
        assert all(part.layers == part.mlps for part in parts)


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    light, heavy = shape(12, 64, 128, 1000).split(3), shape(12, 64, 128, 40_000_000).split(3)
    assert [len(part.layers) for part in light] == [4, 4, 4]
    assert len(heavy[-1].layers) < len(heavy[0].layers)
