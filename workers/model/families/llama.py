"""Llama, and families that differ little from it."""

from deltafront.workers.model.families.family import Family, GgufNames

_BIASES = {"attention_bias": False, "mlp_bias": False}

LLAMA = Family(
    name="Llama 2, 3.x",
    architecture="LlamaForCausalLM",
    model_type="llama",
    implied=_BIASES,
    gguf=GgufNames(architecture="llama", permuted=True),
)
ARCEE = Family(
    name="Arcee AFM",
    architecture="ArceeForCausalLM",
    model_type="arcee",
    hidden_act="relu2",
    implied=_BIASES | {"rms_norm_eps": 1e-5},
    gguf=GgufNames(architecture="arcee", permuted=True),
)
PHI3 = Family(
    name="Phi-3, Phi-3.5, Phi-4",
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    implied={"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "sliding_window": None},
    fixed={"fused_qkv": True, "fused_gate_up": True},
    gguf=GgufNames(
        architecture="phi3",
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys={"attention.sliding_window": "sliding_window"},
    ),
    note="LongRoPE's long factors serve all prompts, unless `model.max_position_embeddings` keeps within "
    "the trained length: then its short ones do. transformers changes from prompt to prompt.",
)
SEED_OSS = Family(
    name="Seed-OSS",
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    implied={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 128},
    gguf=GgufNames(architecture="seed_oss", tensors={"post_attention_norm": "post_attention_layernorm"}),
)
SMOLLM3 = Family(
    name="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    rope_theta=2_000_000.0,
    implied={
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    gguf=GgufNames(architecture="smollm3", permuted=True),
)
APERTUS = Family(
    name="Apertus",
    architecture="ApertusForCausalLM",
    model_type="apertus",
    hidden_act="xielu",
    rope_theta=12_000_000.0,
    implied={"attention_bias": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 65_536},
    fixed={"qk_norm": True},
    tensors={"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
)
CWM = Family(
    name="CWM",
    architecture="CwmForCausalLM",
    model_type="cwm",
    rope_theta=1_000_000.0,
    implied={
        "mlp_bias": False,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": 8192,
        "layer_types": None,
    },
    needs=("layer_types",),
    note="Three of four layers have windows.",
)
AFMOE = Family(
    name="Arcee Trinity, mixtures of experts",
    architecture="AfmoeForCausalLM",
    model_type="afmoe",
    implied={
        "attention_bias": False,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16_384,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
        "layer_types": None,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "mup_enabled": False,
    },
    only={"n_group": (1,), "norm_topk_prob": (True,), "scoring_func": ("sigmoid",)},
    needs=("sliding_window",),
    fixed={"norms": "both", "qk_norm": True, "attention_gate": True},
    keys={
        "num_dense_layers": "first_k_dense_replace",
        "num_shared_experts": "n_shared_experts",
        "global_attn_every_n_layers": "sliding_window_pattern",
        "route_norm": "norm_topk_prob",
        "route_scale": "routed_scaling_factor",
        "score_func": "scoring_func",
    },
    tensors={
        "post_attention_layernorm": "self_attn.post_norm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "mlp.post_norm",
        "mlp.router.gate": "mlp.gate",
        "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    },
    scales_by_width=True,
    rotates_windows_alone=True,
    note="A gate follows attention. Three of four layers have windows, and the others are not rotated.",
)
