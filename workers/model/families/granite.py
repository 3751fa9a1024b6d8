from .family import Family, GgufNames

GRANITE = Family(
    name="Granite 3.x, dense",
    architecture="GraniteForCausalLM",
    model_type="granite",
    implied={
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    gguf=GgufNames(
        architecture="granite",
        permuted=True,
        keys={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    note="Its multipliers are in the embedding, the angles and the norms' epsilon.",
)
