"""Mistral, and families with the keys of its experts: Mixtral, MiniMax-M2 and gpt-oss."""

from deltafront.workers.model.families.family import Family, GgufNames

MISTRAL = Family(
    name="Mistral, Mistral Small 3.x",
    architecture="MistralForCausalLM",
    model_type="mistral",
    wrappers=("Mistral3ForConditionalGeneration",),
    implied={"sliding_window": 4096, "layer_types": None},
    note="GGUF files of it say llama, or mistral3. The language model of a multimodal checkpoint is served.",
)
MINISTRAL3 = Family(
    name="Ministral 3, Devstral Small 2",
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    wrappers=("Mistral3ForConditionalGeneration",),
    rope_theta=1_000_000.0,
    implied={
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "sliding_window": None,
        "llama_4_scaling_beta": None,
    },
    gguf=GgufNames(
        architecture="mistral3",
        permuted=True,
        keys={
            "attention.temperature_scale": "llama_4_scaling_beta",
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        },
    ),
    note="Queries grow with their position. The language model of a multimodal checkpoint is served.",
)

_EXPERTS = {
    "block_sparse_moe.gate": "mlp.gate",
    "block_sparse_moe.experts.{}.w1": "mlp.experts.{}.gate_proj",
    "block_sparse_moe.experts.{}.w2": "mlp.experts.{}.down_proj",
    "block_sparse_moe.experts.{}.w3": "mlp.experts.{}.up_proj",
}
_KEYS = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"}

MIXTRAL = Family(
    name="Mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    rope_theta=1_000_000.0,
    implied={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": None,
    },
    only={"norm_topk_prob": (True,)},
    keys=_KEYS,
    tensors=_EXPERTS,
    gguf=GgufNames(architecture="llama", permuted=True, told_by="expert_count"),
)
MINIMAX_M2 = Family(
    name="MiniMax-M2",
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    rope_theta=5_000_000.0,
    implied={
        "head_dim": 128,
        "partial_rotary_factor": None,
        "rotary_dim": None,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": 1,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "max_position_embeddings": 196_608,
    },
    only={
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "attn_type_list": (1,),
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
    },
    fixed={"qk_norm": True, "qk_norm_all_heads": True},
    keys=_KEYS,
    tensors=_EXPERTS | {"block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
    gguf=GgufNames(architecture="minimax-m2"),
)
GPT_OSS = Family(
    name="gpt-oss, mixtures of experts",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    rope_theta=150_000.0,
    implied={
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "layer_types": None,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    only={"norm_topk_prob": (True,), "swiglu_limit": (7.0,)},
    fixed={"mlp_bias": True, "router_bias": True, "attention_sinks": True, "activation": "clamped_swiglu"},
    keys=_KEYS,
    ignored=("initial_context_length",),
    tensors={"mlp.router": "mlp.gate"},
    stacks_experts="alternating",
    note="MXFP4 is dequantised.",
)
