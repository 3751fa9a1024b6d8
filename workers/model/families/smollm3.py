from deltafront.workers.model.families.family import Family, GgufNames

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
    note="Every fourth layer is not rotated.",
)
