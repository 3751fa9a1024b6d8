"""Configurations of tiny models of every family.

They are chosen so that every part affects the logits: RoPE scaling begins within the prompt, and windows are
shorter than the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "head_dim": 16,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WITHOUT_HEAD_DIM: dict[str, Any] = {"hidden_size": 96}
"""For families whose head dimension is the hidden size divided by the number of heads."""
PADDING: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 4.5, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
MINISTRAL3 = YARN | {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3}
"""RoPE of Ministral 3, with scaling that increases the queries four times within the prompt."""
MIXTURE = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
GLM_MIXTURE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
ERNIE_MIXTURE = {"moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 3}
FP8_FILES = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
WINDOW = 37
"""Window in tokens: a quarter of the prompt, and no multiple of a page or block."""
UNREAD = {"use_sliding_window": False}
"""A key that transformers ignores in these families, so that windows stay."""
MIXED = ["sliding_attention", "full_attention", "sliding_attention"] * 2
GEMMA3: dict[str, Any] = {
    **SHAPE,
    **PADDING,
    "num_attention_heads": 8,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 16,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
HYBRID: dict[str, Any] = {**SHAPE, **LINEAR, "head_dim": 32}
KINDS = ["linear_attention", "full_attention", "linear_attention"] * 2
"""Kinds of a hybrid model's layers, of which the first and the last have linear attention."""
HYBRID_MIXTURE = {**HYBRID, **MIXTURE, "shared_expert_intermediate_size": 48}
QWEN3_5_MOE = {
    key: value for key, value in HYBRID_MIXTURE.items() if key not in ("intermediate_size", "norm_topk_prob")
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama3": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96},
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "original_max_position_embeddings": 64,
            **LLAMA3,
        },
    ),
    "llama-linear-tied": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96},
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, rope_parameters=YARN, tie_word_embeddings=True),
    "llama-heads-of-112": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96, "head_dim": 112}, attention_bias=True
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE | {"head_dim": 32}),
    "qwen3-yarn": lambda: transformers.Qwen3Config(**SHAPE, rope_parameters=YARN),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **MIXTURE),
    "qwen3-moe-mixed": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, **MIXTURE, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(**SHAPE, **GLM_MIXTURE),
    "glm4-moe-groups": lambda: transformers.Glm4MoeConfig(
        **SHAPE | {"head_dim": 32},
        **GLM_MIXTURE | {"first_k_dense_replace": 3, "n_shared_experts": 2, "norm_topk_prob": False},
        n_group=4,
        topk_group=2,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "qwen3-moe-not-normed": lambda: transformers.Qwen3MoeConfig(
        **SHAPE | {"head_dim": 32}, **MIXTURE | {"norm_topk_prob": False, "num_experts_per_tok": 1}
    ),
    "llama-biases": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96}, attention_bias=True, mlp_bias=True
    ),
    "qwen3-biases": lambda: transformers.Qwen3Config(**SHAPE, attention_bias=True),
    "seed-oss": lambda: transformers.SeedOssConfig(**SHAPE),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(
            **SHAPE | {"max_position_embeddings": 8192}, sliding_window=None
        ),
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=14
        ),
    ),
    "ministral3": lambda: transformers.Ministral3Config(**SHAPE, rope_parameters=MINISTRAL3),
    "ministral3-multimodal": lambda: transformers.Mistral3Config(
        text_config=transformers.Ministral3Config(
            **SHAPE, rope_parameters=MINISTRAL3, tie_word_embeddings=True
        ),
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=14
        ),
        tie_word_embeddings=True,
    ),
    "seed-oss-all-biases": lambda: transformers.SeedOssConfig(
        **SHAPE, attention_out_bias=True, mlp_bias=True
    ),
    "phi3": lambda: transformers.Phi3Config(**SHAPE | WITHOUT_HEAD_DIM, **PADDING),
    "phi3-heads-of-96": lambda: transformers.Phi3Config(**SHAPE | {"hidden_size": 576}, **PADDING),
    "phi3-longrope-partial": lambda: transformers.Phi3Config(
        **SHAPE | WITHOUT_HEAD_DIM,
        **PADDING,
        tie_word_embeddings=True,
        original_max_position_embeddings=64,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75},
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SHAPE | WITHOUT_HEAD_DIM, tie_word_embeddings=True, **MULTIPLIERS
    ),
    "granite4": lambda: transformers.GraniteMoeHybridConfig(
        **SHAPE | WITHOUT_HEAD_DIM,
        **MULTIPLIERS,
        num_local_experts=0,
        shared_intermediate_size=80,
        layer_types=["full_attention"] * SHAPE["num_hidden_layers"],
        position_embedding_type="rope",
        mamba_n_heads=4,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**SHAPE, **PADDING, rope_parameters=YARN),
    "smollm3-listed": lambda: transformers.SmolLM3Config(
        **SHAPE, **PADDING, no_rope_layers=[0, 1, 1, 0, 0, 1], attention_bias=True
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE | WITHOUT_HEAD_DIM),
    "glm": lambda: transformers.GlmConfig(**SHAPE, **PADDING),
    "glm-heads-of-80": lambda: transformers.GlmConfig(**SHAPE | {"head_dim": 80}, **PADDING),
    "glm4": lambda: transformers.Glm4Config(**SHAPE, **PADDING, attention_bias=False),
    "exaone4": lambda: transformers.Exaone4Config(
        **SHAPE, sliding_window=None, layer_types=["full_attention"] * SHAPE["num_hidden_layers"]
    ),
    "exaone4-windows": lambda: transformers.Exaone4Config(**SHAPE, sliding_window=WINDOW, layer_types=MIXED),
    "mistral-windows": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW, **UNREAD),
    "mistral-mixed": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW, layer_types=MIXED),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "phi3-windows": lambda: transformers.Phi3Config(
        **SHAPE | WITHOUT_HEAD_DIM, **PADDING, sliding_window=WINDOW, **UNREAD
    ),
    "olmo3": lambda: transformers.Olmo3Config(
        **SHAPE | WITHOUT_HEAD_DIM,
        sliding_window=WINDOW,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
        },
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA3, **UNREAD, rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0}}
    ),
    "gemma3-multimodal": lambda: transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **GEMMA3 | {"query_pre_attn_scalar": 40, "layer_types": MIXED, "vocab_size": 601}
        ),
        image_token_index=600,
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28
        ),
    ),
    "exaone": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96},
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "arcee": lambda: transformers.ArceeConfig(**SHAPE | WITHOUT_HEAD_DIM, **PADDING, rope_parameters=YARN),
    "mixtral": lambda: transformers.MixtralConfig(
        **SHAPE | {"intermediate_size": 32}, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **SHAPE | WITHOUT_HEAD_DIM,
        **MIXTURE | {"norm_topk_prob": False},
        shared_expert_intermediate_size=48,
    ),
    "qwen2-moe-mixed": lambda: transformers.Qwen2MoeConfig(
        **SHAPE | WITHOUT_HEAD_DIM,
        **MIXTURE,
        shared_expert_intermediate_size=48,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        qkv_bias=False,
    ),
    "minimax-m2": lambda: transformers.MiniMaxM2Config(
        **SHAPE | {"intermediate_size": 32},
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "ernie": lambda: transformers.Ernie4_5Config(**SHAPE),
    "ernie-moe": lambda: transformers.Ernie4_5_MoeConfig(**SHAPE | WITHOUT_HEAD_DIM, **ERNIE_MIXTURE),
    "ernie-moe-mixed": lambda: transformers.Ernie4_5_MoeConfig(
        **SHAPE | WITHOUT_HEAD_DIM,
        **ERNIE_MIXTURE | {"moe_num_shared_experts": 0},
        moe_layer_end_index=4,
        moe_layer_interval=2,
        tie_word_embeddings=False,
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SHAPE | WITHOUT_HEAD_DIM),
    "starcoder2-windows": lambda: transformers.Starcoder2Config(
        **SHAPE | WITHOUT_HEAD_DIM, sliding_window=WINDOW, tie_word_embeddings=False
    ),
    "cohere": lambda: transformers.CohereConfig(**SHAPE | WITHOUT_HEAD_DIM, **PADDING),
    "cohere2": lambda: transformers.Cohere2Config(
        **SHAPE | WITHOUT_HEAD_DIM, **PADDING, sliding_window=WINDOW, attention_bias=True
    ),
    "apertus": lambda: transformers.ApertusConfig(**SHAPE | WITHOUT_HEAD_DIM, rope_parameters=YARN),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}
    ),
    "hunyuan-plain": lambda: transformers.HunYuanDenseV1Config(**SHAPE | {"head_dim": 32}, **PADDING),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SHAPE | WITHOUT_HEAD_DIM | {"intermediate_size": 32},
        num_experts=8,
        num_experts_per_tok=3,
        pad_token_id=0,
    ),
    "hunyuan-moe": lambda: transformers.HunYuanMoEV1Config(
        **SHAPE | {"intermediate_size": 32},
        num_experts=8,
        moe_topk=[3] * SHAPE["num_hidden_layers"],
        rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4},
    ),
    "hy3": lambda: transformers.HYV3Config(
        **SHAPE,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_layer_types=["dense", "sparse", "sparse"] * 2,
    ),
    "dots1": lambda: transformers.Dots1Config(
        **SHAPE, **GLM_MIXTURE, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True
    ),
    "solar-open": lambda: transformers.SolarOpenConfig(**SHAPE, **GLM_MIXTURE),
    "exaone-moe": lambda: transformers.ExaoneMoeConfig(
        **SHAPE, **MIXTURE, sliding_window=WINDOW, layer_types=MIXED
    ),
    "mellum": lambda: transformers.MellumConfig(
        **SHAPE,
        **MIXTURE,
        sliding_window=WINDOW,
        layer_types=MIXED,
        mlp_layer_types=["sparse", "dense", "sparse"] * 2,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "cwm": lambda: transformers.CwmConfig(
        **SHAPE | {"hidden_size": 96},
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "original_max_position_embeddings": 64,
            **LLAMA3,
        },
    ),
    "afmoe": lambda: transformers.AfmoeConfig(
        **SHAPE,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        num_dense_layers=2,
        route_scale=2.826,
        sliding_window=WINDOW,
        mup_enabled=True,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SHAPE | {"intermediate_size": 32},
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=WINDOW,
        rope_parameters=YARN | {"truncate": False},
    ),
    "nemotron": lambda: transformers.NemotronConfig(**SHAPE | {"head_dim": 32}),
    "jais2": lambda: transformers.Jais2Config(**SHAPE | WITHOUT_HEAD_DIM),
    "hyperclovax": lambda: transformers.HyperCLOVAXConfig(
        **SHAPE | WITHOUT_HEAD_DIM, **PADDING, **MULTIPLIERS | {"residual_multiplier": 1.0}
    ),
    "qwen3-vl": lambda: transformers.Qwen3VLConfig(
        text_config=transformers.Qwen3VLTextConfig(
            **SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        ),
        vision_config=transformers.Qwen3VLVisionConfig(**VISION),
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**HYBRID, full_attention_interval=3),
    "qwen3.5-ends-linear": lambda: transformers.Qwen3_5TextConfig(
        **HYBRID | {"linear_conv_kernel_dim": 3, "linear_num_key_heads": 4},
        layer_types=KINDS,
        rope_parameters=YARN | {"partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
    ),
    "qwen3.5-multimodal": lambda: transformers.Qwen3_5Config(
        text_config=transformers.Qwen3_5TextConfig(
            **HYBRID, layer_types=KINDS, rope_parameters=MROPE | {"mrope_interleaved": True}
        ),
        vision_config=transformers.Qwen3_5VisionConfig(**VISION),
    ),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(**QWEN3_5_MOE),
    "qwen3.5-moe-multimodal": lambda: transformers.Qwen3_5MoeConfig(
        text_config=transformers.Qwen3_5MoeTextConfig(**QWEN3_5_MOE, rope_parameters=MROPE),
        vision_config=transformers.Qwen3_5MoeVisionConfig(**VISION),
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**HYBRID_MIXTURE),
    "qwen3-next-mixed": lambda: transformers.Qwen3NextConfig(
        **HYBRID_MIXTURE | {"norm_topk_prob": False, "linear_num_value_heads": 6},
        layer_types=KINDS,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
}
