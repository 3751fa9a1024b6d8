from deltafront.workers.model.families.family import Family, GgufNames

_TENSORS = {
    "post_attention_layernorm": "self_attn.post_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp.post_norm",
}

GEMMA3 = Family(
    name="Gemma 3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    wrappers=("Gemma3ForConditionalGeneration",),
    hidden_act="gelu_pytorch_tanh",
    rope_theta=1_000_000.0,
    implied={
        "attention_bias": False,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "tie_word_embeddings": True,
    },
    fixed={"norms": "both", "qk_norm": True, "norm_offset": 1.0},
    keys={"hidden_activation": "hidden_act"},
    tensors=_TENSORS,
    scales_by_width=True,
    gguf=GgufNames(
        architecture="gemma3",
        tensors={"post_attention_norm": "self_attn.post_norm", "post_ffw_norm": "mlp.post_norm"},
        keys={"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
        implied={"query_pre_attn_scalar": None, "rope_local_base_freq": 10_000.0},
        by_layers={62: {"query_pre_attn_scalar": 168}},
        adds_offset=True,
    ),
    note="The language model of a multimodal checkpoint is served. Five of six layers have windows.",
)
