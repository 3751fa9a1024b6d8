from .family import Family, GgufNames

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
