from dataclasses import replace

from deltafront.workers.model.families.family import Family, GgufNames

_IMPLIED = {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}
_FIXED = {"o_bias": False, "interleaved_rope": True, "fused_gate_up": True}

GLM = Family(
    name="GLM-4 (-hf), dense",
    architecture="GlmForCausalLM",
    model_type="glm",
    implied=_IMPLIED,
    fixed=_FIXED,
    gguf=GgufNames(architecture="chatglm", tensors={"ffn_up": "mlp.gate_up_proj"}),
)
GLM4 = Family(
    name="GLM-4-0414, dense",
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    implied=_IMPLIED,
    fixed=_FIXED | {"norms": "both"},
    tensors={"post_self_attn_layernorm": "self_attn.post_norm", "post_mlp_layernorm": "mlp.post_norm"},
    gguf=GgufNames(
        architecture="glm4",
        tensors={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "self_attn.post_norm",
            "post_ffw_norm": "mlp.post_norm",
        },
    ),
)
GLM4_MOE = Family(
    name="GLM-4.5 to 4.7, mixtures of experts",
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    implied={
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    fixed={"o_bias": False},
    keys={
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    gguf=GgufNames(
        architecture="glm4moe",
        tensors={"post_attention_norm": "post_attention_layernorm"},
        keys={
            "expert_shared_count": "n_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "nextn_predict_layers": "num_nextn_predict_layers",
        },
    ),
    note="Layers that predict further tokens are not read.",
)
SOLAR_OPEN = replace(
    GLM4_MOE,
    name="Solar Open, mixtures of experts",
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    rope_theta=1_000_000.0,
    implied={
        **GLM4_MOE.implied,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
    },
    only={"use_qk_norm": (False,), "first_k_dense_replace": (0,)},
    gguf=None,
    note="",
)
DOTS1 = replace(
    GLM4_MOE,
    name="dots.llm1, mixtures of experts",
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    implied={
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
        "num_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 0,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 0,
    },
    fixed={"qk_norm": True},
    ignored=("scoring_func",),
    gguf=GgufNames(
        architecture="dots1",
        keys={
            "expert_shared_count": "n_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
    ),
    note="",
)
