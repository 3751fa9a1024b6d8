from dataclasses import replace

from deltafront.workers.model.families.family import Family, GgufNames

OLMO2 = Family(
    name="OLMo 2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    implied={"attention_bias": False, "rms_norm_eps": 1e-5},
    fixed={"norms": "after", "qk_norm": True, "qk_norm_all_heads": True},
    tensors={
        "post_attention_layernorm": "self_attn.post_norm",
        "post_feedforward_layernorm": "mlp.post_norm",
    },
    gguf=GgufNames(
        architecture="olmo2",
        tensors={"post_attention_norm": "self_attn.post_norm", "post_ffw_norm": "mlp.post_norm"},
    ),
)
OLMO3 = replace(
    OLMO2,
    name="OLMo 3",
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    rope_theta=500_000.0,
    implied={
        **OLMO2.implied,
        "rope_local_base_freq": None,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    gguf=GgufNames(
        architecture="olmo2",
        tensors={"post_attention_norm": "self_attn.post_norm", "post_ffw_norm": "mlp.post_norm"},
        keys={"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
        told_by="attention.sliding_window",
    ),
    note="Three of four layers have windows, whose rope is not scaled.",
)
OLMOE = Family(
    name="OLMoE",
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    implied={
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    only={"clip_qkv": (None,)},
    fixed={"qk_norm": True, "qk_norm_all_heads": True},
    keys={"intermediate_size": "moe_intermediate_size"},
    gguf=GgufNames(architecture="olmoe"),
)
