from .family import Family, GgufNames

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
