"""Published numbers of public models' config.json, and why the service refuses some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Public:
    """A model on the hub.

    Args:
        billions: Published size in billions of parameters, of a multimodal model only the language model.
            None: the service refuses the model. An int: only whole billions are published.
        reason: The reason that the refusal gives.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    billions: float | None = None
    reason: str = ""


_SHAPE = """num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size
    max_position_embeddings""".split()


def _config(architecture: str, *shape: int, **more: Any) -> dict[str, Any]:
    return {"architectures": [f"{architecture}ForCausalLM"], **dict(zip(_SHAPE, shape, strict=False)), **more}


def _llama3(factor: float, theta: float = 500_000.0) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_theta": theta, "rope_scaling": scaling | {"original_max_position_embeddings": 8192}}


def _granite(scores: float, logits: float, theta: float) -> dict[str, Any]:
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    more = {"attention_multiplier": scores, "logits_scaling": logits, "rope_theta": theta}
    return multipliers | more | {"tie_word_embeddings": True}


def _exaone(layers: int, hidden: int, inner: int, **more: Any) -> dict[str, Any]:
    shape = {"num_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": 102400}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768}
    names = {"activation_function": "silu", "layer_norm_epsilon": 1e-5}
    return {"architectures": ["ExaoneForCausalLM"]} | shape | heads | names | _llama3(8.0, 1e6) | more


def _experts(width: int) -> dict[str, Any]:
    chosen = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    return {"moe_intermediate_size": width, "decoder_sparse_step": 1, "mlp_only_layers": []} | chosen


_DELTA: dict[str, Any] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


def _qwen3_5(kind: str, *shape: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = _config("", *shape, 248320, 262144, rope_parameters=rope, attn_output_gate=True, **_DELTA | more)
    return {
        "architectures": [f"Qwen3_5{kind}ForConditionalGeneration"],
        "text_config": text | {"architectures": None, "model_type": f"qwen3_5{kind and '_moe'}_text"},
        "vision_config": {"model_type": f"qwen3_5{kind and '_moe'}"},
    }


def _glm_experts(experts: int, width: int) -> dict[str, Any]:
    chosen = {"n_routed_experts": experts, "num_experts_per_tok": 8, "norm_topk_prob": True}
    groups = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 1}
    attention = {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6}
    return {"moe_intermediate_size": width} | chosen | groups | attention


def _gemma3(layers: int, hidden: int, inner: int, **more: Any) -> dict[str, Any]:
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    rope = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"model_type": "gemma3_text"} | shape | rope | more,
        "vision_config": {"model_type": "siglip_vision_model"},
    }


def _ministral3(layers: int, hidden: int, inner: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6}
    grown = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    text = _config("", layers, hidden, inner, 32, 8, 131072, 262144, head_dim=128, **_FULL, **more)
    own: dict[str, Any] = {"architectures": None, "model_type": "ministral3"}
    own["rope_parameters"] = rope | grown | {"llama_4_scaling_beta": 0.1}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text | own}


def _heads(query: int, key: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": key}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_FULL: dict[str, Any] = {"sliding_window": None}
_OLMO: dict[str, Any] = {"rope_theta": 5e5}
_OLMO3: dict[str, Any] = _OLMO | {
    "sliding_window": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
_SMALL24 = (40, 5120, 32768, 32, 8, 131072)

SERVED = (
    Public("meta-llama/Llama-2-7b-hf", _config("Llama", 32, 4096, 11008, 32, 32, 32000, 4096), 6.74),
    Public(
        "meta-llama/Llama-3.1-8B-Instruct",
        _config("Llama", 32, 4096, 14336, 32, 8, 128256, 131072, **_llama3(8.0)),
        8.03,
    ),
    Public(
        "meta-llama/Llama-3.3-70B-Instruct",
        _config("Llama", 80, 8192, 28672, 64, 8, 128256, 131072, **_llama3(8.0)),
        70.6,
    ),
    Public(
        "meta-llama/Llama-3.2-1B-Instruct",
        _config("Llama", 16, 2048, 8192, 32, 8, 128256, 131072, head_dim=64, **_TIED, **_llama3(32.0)),
        1.24,
    ),
    Public(
        "meta-llama/Llama-3.2-3B-Instruct",
        _config("Llama", 28, 3072, 8192, 24, 8, 128256, 131072, head_dim=128, **_TIED, **_llama3(32.0)),
        3.21,
    ),
    Public(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        _config("Llama", 24, 2048, 8192, 32, 32, 49152, 8192, rope_theta=130_000, **_TIED),
        1.71,
    ),
    Public(
        "mistralai/Mistral-7B-Instruct-v0.3",
        _config("Mistral", 32, 4096, 14336, 32, 8, 32768, 32768, rope_theta=1e6, **_FULL),
        7.25,
    ),
    Public(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        _config("Mistral", *_SMALL24, 32768, head_dim=128, rope_theta=1e8, **_FULL),
        23.6,
    ),
    Public(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {
                **_config("", *_SMALL24, 131072, head_dim=128, rope_theta=1e9, **_FULL),
                "architectures": None,
                "model_type": "mistral",
            },
        },
        23.6,
    ),
    Public(
        "Qwen/Qwen2.5-0.5B-Instruct", _config("Qwen2", 24, 896, 4864, 14, 2, 151936, 32768, **_TIED), 0.494
    ),
    Public("Qwen/Qwen2.5-7B-Instruct", _config("Qwen2", 28, 3584, 18944, 28, 4, 152064, 32768), 7.62),
    Public("Qwen/Qwen2.5-32B-Instruct", _config("Qwen2", 64, 5120, 27648, 40, 8, 152064, 32768), 32.8),
    Public("Qwen/Qwen2.5-72B-Instruct", _config("Qwen2", 80, 8192, 29568, 64, 8, 152064, 32768), 72.7),
    Public(
        "Qwen/Qwen3-0.6B",
        _config("Qwen3", 28, 1024, 3072, 16, 8, 151936, 40960, head_dim=128, **_TIED),
        0.596,
    ),
    Public(
        "Qwen/Qwen3-4B-Instruct-2507",
        _config("Qwen3", 36, 2560, 9728, 32, 8, 151936, 262144, head_dim=128, rope_theta=5e6, **_TIED),
        4.02,
    ),
    Public("Qwen/Qwen3-8B", _config("Qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, head_dim=128), 8.19),
    Public("Qwen/Qwen3-32B", _config("Qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, head_dim=128), 32.8),
    Public(
        "Qwen/Qwen3-30B-A3B",
        _config("Qwen3Moe", 48, 2048, 6144, 32, 4, 151936, 40960, head_dim=128, **_experts(768)),
        30.5,
    ),
    Public(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        _config(
            *("Qwen3Moe", 48, 2048, 6144, 32, 4, 151936, 262144),
            head_dim=128,
            rope_theta=1e7,
            **_experts(768),
        ),
        30.5,
    ),
    Public(
        "Qwen/Qwen3-235B-A22B",
        _config("Qwen3Moe", 94, 4096, 12288, 64, 4, 151936, 40960, head_dim=128, **_experts(1536)),
        235.0,
    ),
    Public(
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        _config("SeedOss", 64, 5120, 27648, 80, 8, 155136, 524288, head_dim=128, rope_theta=1e7),
        36.2,
    ),
    Public(
        "microsoft/phi-4", _config("Phi3", 40, 5120, 17920, 40, 10, 100352, 16384, rope_theta=250_000), 14.7
    ),
    Public(
        "ibm-granite/granite-3.1-8b-instruct",
        _config("Granite", 40, 4096, 12800, 32, 8, 49155, 131072, **_granite(0.0078125, 16.0, 1e7)),
        8.17,
    ),
    Public(
        "ibm-granite/granite-3.1-2b-instruct",
        _config("Granite", 40, 2048, 8192, 32, 8, 49155, 131072, **_granite(0.015625, 8.0, 5e6)),
        2.53,
    ),
    Public(
        "ibm-granite/granite-4.0-micro",
        _config(
            *("GraniteMoeHybrid", 40, 2560, 8192, 40, 8, 100352, 131072),
            **_granite(0.015625, 10.0, 1e7),
            shared_intermediate_size=8192,
            num_local_experts=0,
            position_embedding_type="rope",
            layer_types=["attention"] * 40,
        ),
        3.4,
    ),
    Public(
        "HuggingFaceTB/SmolLM3-3B",
        _config("SmolLM3", 36, 2048, 11008, 16, 4, 128256, 65536, rope_theta=5e6),
        3.08,
    ),
    Public("allenai/OLMo-2-1124-7B", _config("Olmo2", 32, 4096, 11008, 32, 32, 100352, 4096, **_OLMO), 7.3),
    Public(
        "allenai/OLMo-2-1124-13B",
        _config("Olmo2", 40, 5120, 13824, 40, 40, 100352, 4096, **_OLMO),
        13.7,
    ),
    Public("allenai/OLMo-2-0325-32B", _config("Olmo2", 64, 5120, 27648, 40, 8, 100352, 4096, **_OLMO), 32.2),
    Public("zai-org/glm-4-9b-chat-hf", _config("Glm", 40, 4096, 13696, 32, 2, 151552, 131072), 9.4),
    Public("zai-org/GLM-4-9B-0414", _config("Glm4", 40, 4096, 13696, 32, 2, 151552, 32768), 9.4),
    Public("zai-org/GLM-4-32B-0414", _config("Glm4", 61, 6144, 23040, 48, 2, 151552, 32768), 32.6),
    Public(
        "zai-org/GLM-4.5-Air",
        _config(
            *("Glm4Moe", 46, 4096, 10944, 96, 8, 151552, 131072),
            **_glm_experts(128, 1408),
            first_k_dense_replace=1,
            routed_scaling_factor=1.0,
            use_qk_norm=False,
        ),
        106.0,
    ),
    Public(
        "zai-org/GLM-4.6",
        _config(
            *("Glm4Moe", 92, 5120, 12288, 96, 8, 151552, 202752),
            **_glm_experts(160, 1536),
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
        ),
        355.0,
    ),
    Public("LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct", _exaone(32, 4096, 14336), 7.82),
    Public("LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", _exaone(30, 2560, 7168, head_dim=80, **_TIED), 2.41),
    Public(
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
        _config("Exaone4", 30, 2048, 4096, 32, 8, 102400, 65536, head_dim=64, **_TIED, **_FULL),
        1.28,
    ),
    Public(
        "LGAI-EXAONE/EXAONE-4.0-32B",
        _config(
            *("Exaone4", 64, 5120, 27392, 40, 8, 102400, 131072),
            head_dim=128,
            sliding_window=4096,
            sliding_window_pattern="LLLG",
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16,
        ),
        32.0,
    ),
    Public(
        "mistralai/Mistral-7B-Instruct-v0.1",
        _config("Mistral", 32, 4096, 14336, 32, 8, 32000, 32768, sliding_window=4096),
        7.24,
    ),
    Public(
        "mistralai/Ministral-8B-Instruct-2410",
        _config("Mistral", 36, 4096, 12288, 32, 8, 131072, 32768, head_dim=128, sliding_window=32768),
        8.02,
    ),
    Public("mistralai/Ministral-3-3B-Instruct-2512", _ministral3(26, 3072, 9216, **_TIED), 3.4),
    Public("mistralai/Ministral-3-14B-Instruct-2512", _ministral3(40, 5120, 16384), 13.5),
    Public(
        "microsoft/Phi-3-mini-4k-instruct",
        _config("Phi3", 32, 3072, 8192, 32, 32, 32064, 4096, sliding_window=2047),
        3.82,
    ),
    Public(
        "google/gemma-3-1b-it",
        _config(
            *("Gemma3", 26, 1152, 6912, 4, 1, 262144, 32768),
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256,
            sliding_window=512,
            sliding_window_pattern=6,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
        ),
        1.0,
    ),
    Public("google/gemma-3-4b-it", _gemma3(34, 2560, 10240), 3.88),
    Public("google/gemma-3-12b-it", _gemma3(48, 3840, 15360, **_heads(16, 8)), 11.8),
    Public(
        "google/gemma-3-27b-it",
        _gemma3(62, 5376, 21504, **_heads(32, 16), head_dim=128, query_pre_attn_scalar=168),
        27.0,
    ),
    Public(
        "allenai/Olmo-3-7B-Instruct",
        _config("Olmo3", 32, 4096, 11008, 32, 32, 100278, 65536, **_OLMO3),
        7.3,
    ),
    Public(
        "allenai/Olmo-3-32B-Think",
        _config("Olmo3", 64, 5120, 27648, 40, 8, 100278, 65536, **_OLMO3),
        32.2,
    ),
    Public(
        "arcee-ai/AFM-4.5B",
        _config("Arcee", 36, 2560, 18432, 20, 4, 128004, 65536, head_dim=128, hidden_act="relu2"),
        4.62,
    ),
    Public(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _config("Mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, num_local_experts=8, **_FULL),
        46.7,
    ),
    Public(
        "mistralai/Mixtral-8x22B-Instruct-v0.1",
        _config("Mixtral", 56, 6144, 16384, 48, 8, 32768, 65536, num_local_experts=8, **_FULL),
        141.0,
    ),
    Public(
        "Qwen/Qwen1.5-MoE-A2.7B-Chat",
        _config("Qwen2Moe", 24, 2048, 5632, 16, 16, 151936, 8192, moe_intermediate_size=1408),
        14.3,
    ),
    Public(
        "Qwen/Qwen2-57B-A14B-Instruct",
        _config(
            *("Qwen2Moe", 28, 3584, 18944, 28, 4, 151936, 32768),
            moe_intermediate_size=2560,
            shared_expert_intermediate_size=20480,
            num_experts=64,
            num_experts_per_tok=8,
        ),
        57.4,
    ),
    Public(
        "MiniMaxAI/MiniMax-M2",
        _config(
            *("MiniMaxM2", 62, 3072, 1536, 48, 8, 200064, 196608),
            num_local_experts=256,
            num_experts_per_tok=8,
            rotary_dim=64,
            use_qk_norm=True,
            scoring_func="sigmoid",
        ),
        230.0,
    ),
    Public(
        "baidu/ERNIE-4.5-0.3B-PT",
        _config("Ernie4_5", 18, 1024, 3072, 16, 2, 103424, 131072, head_dim=128, **_TIED),
        0.36,
    ),
    Public(
        "baidu/ERNIE-4.5-21B-A3B-PT",
        _config("Ernie4_5_Moe", 28, 2560, 12288, 20, 4, 103424, 131072, moe_layer_end_index=-1, **_TIED),
        21.8,
    ),
    Public(
        "baidu/ERNIE-4.5-300B-A47B-PT",
        _config(
            *("Ernie4_5_Moe", 54, 8192, 28672, 64, 8, 103424, 131072),
            moe_intermediate_size=3584,
            moe_k=8,
            moe_num_shared_experts=0,
            moe_layer_start_index=3,
            tie_word_embeddings=False,
        ),
        300.0,
    ),
    Public(
        "bigcode/starcoder2-3b",
        _config("Starcoder2", 30, 3072, 12288, 24, 2, 49152, 16384, sliding_window=4096, rope_theta=999999),
        3.03,
    ),
    Public(
        "bigcode/starcoder2-7b",
        _config("Starcoder2", 32, 4608, 18432, 36, 4, 49152, 16384, sliding_window=4096, rope_theta=1e6),
        7.17,
    ),
    Public(
        "CohereLabs/c4ai-command-r-v01",
        _config("Cohere", 40, 8192, 22528, 64, 64, 256000, 8192, rope_theta=8e6, use_qk_norm=False),
        35.0,
    ),
    Public(
        "CohereLabs/c4ai-command-r7b-12-2024",
        _config("Cohere2", 32, 4096, 14336, 32, 8, 256000, 132096, rope_theta=5e4, logit_scale=0.25),
        8.03,
    ),
    Public(
        "CohereLabs/c4ai-command-a-03-2025",
        _config("Cohere2", 64, 12288, 36864, 96, 8, 256000, 131072, rope_theta=5e4, logit_scale=0.25),
        111.0,
    ),
    Public(
        "swiss-ai/Apertus-8B-Instruct-2509",
        _config("Apertus", 32, 4096, 21504, 32, 8, 131072, 65536, hidden_act="xielu", **_llama3(8.0, 12e6)),
        8.05,
    ),
    Public(
        "swiss-ai/Apertus-70B-Instruct-2509",
        _config("Apertus", 80, 8192, 43008, 64, 8, 131072, 65536, hidden_act="xielu", **_llama3(8.0, 12e6)),
        70.6,
    ),
    Public(
        "tencent/Hunyuan-7B-Instruct",
        _config(
            *("HunYuanDenseV1", 32, 4096, 14336, 32, 8, 128167, 32768),
            head_dim=128,
            use_qk_norm=True,
            rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0},
            **_TIED,
        ),
        7.5,
    ),
    Public(
        "allenai/OLMoE-1B-7B-0924-Instruct",
        _config("Olmoe", 16, 2048, 1024, 16, 16, 50304, 4096),
        6.92,
    ),
    Public(
        "tencent/Hunyuan-A13B-Instruct",
        _config(
            *("HunYuanMoEV1", 32, 4096, 3072, 32, 8, 128167, 32768),
            head_dim=128,
            num_experts=64,
            moe_topk=[8] * 32,
            moe_intermediate_size=[3072] * 32,
            norm_topk_prob=False,
            n_group=False,
            topk_group=False,
            routed_scaling_factor=False,
            use_qk_norm=True,
            rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0},
            **_TIED,
        ),
        80.0,
    ),
    Public(
        "tencent/Hy3-preview",
        _config(
            *("HYV3", 80, 4096, 13312, 64, 8, 120832, 262144),
            num_experts=192,
            router_scaling_factor=2.826,
            first_k_dense_replace=1,
            num_nextn_predict_layers=1,
        ),
        295.0,
    ),
    Public(
        "rednote-hilab/dots.llm1.inst",
        _config(
            *("Dots1", 62, 4096, 10944, 32, 32, 152064, 32768),
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            scoring_func="noaux_tc",
            rope_theta=1e7,
            **_FULL,
        ),
        142.0,
    ),
    Public(
        "upstage/Solar-Open-100B",
        _config(
            *("SolarOpen", 48, 4096, 10240, 64, 8, 196608, 131072),
            head_dim=128,
            rope_theta=1e6,
            rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
        ),
        102.6,
    ),
    Public(
        "LGAI-EXAONE/K-EXAONE-236B-A23B",
        _config(
            *("ExaoneMoe", 48, 6144, 18432, 64, 8, 153600, 262144),
            head_dim=128,
            num_experts=128,
            moe_intermediate_size=2048,
            sliding_window=128,
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 12,
        ),
        236.0,
    ),
    Public(
        "JetBrains/Mellum2-12B-A2.5B-Base",
        _config(
            *("Mellum", 28, 2304, 7168, 32, 4, 98304, 131072),
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 7,
        ),
        12,
    ),
    Public(
        "arcee-ai/Trinity-Mini",
        _config(
            *("Afmoe", 32, 2048, 6144, 32, 4, 200192, 131072),
            moe_intermediate_size=1024,
            num_experts=128,
            num_experts_per_tok=8,
            num_shared_experts=1,
            num_dense_layers=2,
            route_scale=2.826,
            sliding_window=2048,
            mup_enabled=True,
        ),
        26,
    ),
    Public(
        "openai/gpt-oss-20b",
        _config("GptOss", 24, 2880, 2880, 64, 8, 201088, 131072, num_local_experts=32, swiglu_limit=7.0),
        20.9,
    ),
    Public(
        "openai/gpt-oss-120b",
        _config("GptOss", 36, 2880, 2880, 64, 8, 201088, 131072, num_local_experts=128, swiglu_limit=7.0),
        116.8,
    ),
    Public(
        "facebook/cwm",
        _config(
            *("Cwm", 64, 6144, 21504, 48, 8, 128256, 131072),
            sliding_window=8192,
            layer_types=["full_attention", *["sliding_attention"] * 3] * 16,
            **_llama3(16.0, 1e6),
        ),
        32,
    ),
    Public(
        "nvidia/Minitron-4B-Base",
        _config(
            *("Nemotron", 32, 3072, 9216, 24, 8, 256000, 4096),
            head_dim=128,
            hidden_act="relu2",
            norm_eps=1e-5,
        ),
        4.19,
    ),
    Public(
        "inceptionai/Jais-2-8B-Chat",
        _config("Jais2", 32, 3328, 26624, 26, 26, 150272, 8192, hidden_act="relu2"),
        8,
    ),
    Public(
        "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",
        _config(
            *("HyperCLOVAX", 38, 6144, 14336, 48, 8, 110592, 131072),
            rope_theta=1e8,
            attention_multiplier=0.0078125,
            embedding_multiplier=10.0,
            logits_scaling=0.125,
        ),
        14,
    ),
    Public(
        "Qwen/Qwen3-VL-8B-Instruct",
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": _config("", 36, 4096, 12288, 32, 8, 151936, 262144, head_dim=128)
            | {
                "architectures": None,
                "model_type": "qwen3_vl_text",
                "rope_theta": 5e6,
                "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
            },
            "vision_config": {"model_type": "qwen3_vl"},
        },
        8,
    ),
    Public(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _config(
            *("Qwen3Next", 48, 2048, 5120, 16, 2, 151936, 262144),
            **_DELTA | _experts(512) | {"num_experts": 512, "num_experts_per_tok": 10},
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            shared_expert_intermediate_size=512,
        ),
        80,
    ),
    Public("Qwen/Qwen3.5-27B", _qwen3_5("", 64, 5120, 17408, 24, 4, linear_num_value_heads=48), 27),
    Public(
        "Qwen/Qwen3.5-35B-A3B",
        _qwen3_5(
            *("Moe", 40, 2048, 0, 16, 2),
            num_experts=256,
            num_experts_per_tok=8,
            mlp_only_layers=[],
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        35,
    ),
)

_MLA = "latent attention (MLA)"

REFUSED = (
    Public(
        "Qwen/Qwen2.5-7B-Instruct-1M",
        _config(
            *("Qwen2", 28, 3584, 18944, 28, 4, 152064, 1010000),
            dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192},
        ),
        reason="attention by chunks",
    ),
    Public(
        "deepseek-ai/DeepSeek-V3", _config("DeepseekV3", kv_lora_rank=512), reason="latent attention (MLA)"
    ),
    Public(
        "zai-org/GLM-4.7-Flash", _config("Glm4MoeLite", kv_lora_rank=512), reason="latent attention (MLA)"
    ),
    Public(
        "zai-org/GLM-5",
        _config("GlmMoeDsa", kv_lora_rank=512, index_topk=2048),
        reason=f"{_MLA}, an indexer that chooses keys (DSA)",
    ),
    Public(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": {"num_local_experts": 16},
            "vision_config": {"model_type": "llama4_vision_model"},
        },
        reason="attention by chunks, images",
    ),
    Public(
        "google/gemma-2-9b-it",
        _config("Gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        reason="capped scores, capped logits",
    ),
    Public(
        "google/gemma-4-31B-it",
        {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {"global_head_dim": 512}},
        reason="heads of other sizes in layers without windows",
    ),
    Public(
        "ibm-granite/granite-4.0-h-small",
        _config("GraniteMoeHybrid", num_local_experts=72, mamba_d_state=128),
        reason="state-space layers",
    ),
    Public("microsoft/phi-2", _config("Phi", layer_norm_eps=1e-5), reason="an output head with a bias"),
    Public("stabilityai/stablelm-2-12b", _config("StableLm", layer_norm_eps=1e-5), reason="no model family"),
)
