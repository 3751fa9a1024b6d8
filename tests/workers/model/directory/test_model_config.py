"""Tests reading config.json as in published models, and refusing unsupported ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltafront.workers.model.directory.config_file import lost_window_note, read_config
from deltafront.workers.model.directory.layer_config import MixtureConfig
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import RopeConfig
from deltafront.workers.model.family_registry import FAMILIES
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


def read(tmp_path: Path, raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config(tmp_path, overrides)


def test_reads_llama_31_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA31)
    assert config.head_dim == 128 and config.rope.theta == 500000.0 and config.rope.kind == "llama3"
    assert config.rope.scaling["original_max_position_embeddings"] == 8192
    assert config.eos_ids == (128001, 128008, 128009)


def test_old_and_new_rope_keys_give_the_same_configuration(tmp_path: Path) -> None:
    rope = LLAMA31["rope_scaling"] | {"rope_theta": 500000.0}
    new = {key: value for key, value in LLAMA31.items() if key not in ("rope_theta", "rope_scaling")}
    assert read(tmp_path, LLAMA31) == read(tmp_path, new | {"rope_parameters": rope})
    oldest = {"type": "linear", "factor": 2.0}
    linear = read(tmp_path, LLAMA31 | {"rope_scaling": oldest}).rope
    assert linear == RopeConfig(500000.0, {"rope_type": "linear", "factor": 2.0})


def test_reads_end_tokens_from_config_and_generation_config(tmp_path: Path) -> None:
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
def test_refuses_rope_keys_that_contradict_each_other(
    tmp_path: Path, pasted: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, SAVED_BY_TRANSFORMERS_5 | pasted)


def test_accepts_repeated_rope_keys_with_the_same_value(tmp_path: Path) -> None:
    both = SAVED_BY_TRANSFORMERS_5 | {
        "rope_parameters": YARN | {"rope_theta": 1e6},
        "rope_scaling": {"type": "yarn", **{key: YARN[key] for key in YARN if key != "rope_type"}},
        "rope_theta": 1e6,
    }
    assert read(tmp_path, both).rope == RopeConfig(1e6, YARN)


def test_reads_the_trained_length_from_a_top_level_key(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    top = SAVED_BY_TRANSFORMERS_5 | {"rope_parameters": scaling, "max_position_embeddings": 40960}
    assert read(tmp_path, top).rope.scaling["original_max_position_embeddings"] == 40960
    found = read(tmp_path, top | {"original_max_position_embeddings": 32768})
    assert found.rope.scaling["original_max_position_embeddings"] == 32768 and found.positions == 131072
    twice = {"rope_parameters": YARN, "original_max_position_embeddings": 8192}
    with pytest.raises(ModelError, match="= 8192, but 32768 in its rope scaling"):
        read(tmp_path, top | twice)


@pytest.mark.parametrize("said", [32768, 40960, 131072])
def test_yarn_multiplies_the_trained_length_by_its_factor(tmp_path: Path, said: int) -> None:
    """Positions are `factor` times the trained length, and max_position_embeddings is ignored, as in vLLM."""
    yarn = SAVED_BY_TRANSFORMERS_5 | {"rope_parameters": YARN, "max_position_embeddings": said}
    assert read(tmp_path, yarn).positions == 131072
    assert read(tmp_path, yarn, {"max_position_embeddings": 65536}).positions == 65536
    linear = {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    assert read(tmp_path, yarn | linear).positions == said


@pytest.mark.parametrize(
    ("rope", "known"),
    [
        ({}, 32768),
        ({"rope_parameters": YARN}, 131072),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 32768),
        ({"rope_parameters": LLAMA31["rope_scaling"] | {"rope_theta": 5e5}}, 32768),
    ],
)
def test_refuses_a_context_beyond_the_rope_scaling(tmp_path: Path, rope: dict[str, Any], known: int) -> None:
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
def test_reads_a_mixture_of_experts_and_counts_its_weights(tmp_path: Path, key: str) -> None:
    """Weights of all experts count, but multiplications only of the chosen experts."""
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
def test_reads_models_with_some_dense_layers(
    tmp_path: Path, change: dict[str, Any], dense: list[int]
) -> None:
    """Weights and costs are counted for each layer's own kind of MLP."""
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


def test_divides_every_kind_of_mlp_among_ranks(tmp_path: Path) -> None:
    raw = LLAMA31 | GLM | {"intermediate_size": 10944, "n_shared_experts": 2}
    part = read(tmp_path, raw).of_rank(4)
    assert part.mlp_widths == (352, 704, 2736) and part.mixture is not None
    with pytest.raises(ModelError, match="4 ranks cannot share the model's 10946 MLP columns equally"):
        read(tmp_path, raw | {"intermediate_size": 10946}).of_rank(4)


def test_each_family_reads_its_own_options(tmp_path: Path) -> None:
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
        ({"is_causal": False}, "is_causal is false, so rows attend to later tokens"),
        ({"is_causal": None}, "is_causal is false"),
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
        (GLM | {"num_experts_per_tok": [8, 4]}, r"num_experts_per_tok = \[8, 4\] differs between layers"),
        (EXPERTS | {"mlp_layer_types": ["sparse"]}, "sets mlp_layer_types, which Qwen3MoeForCausalLM"),
        (
            EXPERTS | {"architectures": ["HYV3ForCausalLM"], "mlp_layer_types": ["dense"]},
            r"mlp_layer_types = \['dense'\] must be 32 of dense and sparse",
        ),
        ({"use_qk_norm": True}, "sets use_qk_norm, which LlamaForCausalLM does not have"),
        (EXPERTS | {"num_experts_per_tok": 129}, "num_experts_per_tok = 129 of num_experts = 128"),
        (EXPERTS | {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (EXPERTS | {"mlp_bias": True}, "sets mlp_bias, which Qwen3MoeForCausalLM"),
    ],
)
def test_refuses_configurations_it_would_compute_wrongly(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, LLAMA31 | change)


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 0, "n_shared_experts": 0, "attn_logit_softcapping": 0.0, "is_causal": True},
        {"architectures": ["Qwen2ForCausalLM"], "attention_bias": True},
        EXPERTS | {"num_experts": 0},
    ],
    ids=str,
)
def test_ignores_keys_that_transformers_ignores(tmp_path: Path, change: dict[str, Any]) -> None:
    config = read(tmp_path, LLAMA31 | change)
    plain = {"architectures": change.get("architectures", LLAMA31["architectures"])}
    if plain["architectures"] == EXPERTS["architectures"]:
        assert config.mixture is None and config.intermediate == LLAMA31["intermediate_size"]
    else:
        assert config == read(tmp_path, LLAMA31 | plain)


def test_warns_of_a_mistral_gguf_without_its_windows(tmp_path: Path) -> None:
    """llama.cpp's converter writes Mistral 7B v0.1 as a Llama. Only v0.1 has a window."""
    lost = LLAMA31 | {
        "rope_scaling": None,
        "rope_theta": 1e4,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    }
    note = lost_window_note(read(tmp_path, lost))
    assert note is not None and "windows of 4096 tokens" in note and "max_position_embeddings: 4096" in note
    for other in (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        {"rope_theta": 1e6},
        {"max_position_embeddings": 4096},
        {"intermediate_size": 11008},
    ):
        assert lost_window_note(read(tmp_path, lost | other)) is None


def test_error_names_missing_and_invalid_config_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"parallel": True}, "in parallel layers, are not supported"),
        ({"layer_norms": True, "norms": "both"}, "LayerNorms after attention or MLP"),
        (
            {"qk_norm_after_rope": True, "qk_norm_all_heads": True},
            "QK norm over all heads after the rotation",
        ),
    ],
)
def test_refuses_features_that_do_not_combine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: dict[str, Any], message: str
) -> None:
    family = FAMILIES["Qwen3MoeForCausalLM"]
    monkeypatch.setitem(FAMILIES, family.architecture, replace(family, fixed={**family.fixed, **fixed}))
    with pytest.raises(ModelError, match=message):
        read(tmp_path, LLAMA31 | EXPERTS)
