from deltafront.workers.model.families.family import Family, GgufNames

_IMPLIED = {
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITE = Family(
    name="Granite 3.x, dense",
    architecture="GraniteForCausalLM",
    model_type="granite",
    implied=_IMPLIED | {"mlp_bias": False},
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
)
GRANITE4 = Family(
    name="Granite 4, dense",
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    implied=_IMPLIED
    | {
        "num_local_experts": 8,
        "layer_types": "linear_attention",
        "position_embedding_type": None,
        "max_position_embeddings": 2048,
    },
    only={
        "num_local_experts": (0, None),
        "layer_types": ("attention", "full_attention"),
        "position_embedding_type": ("rope",),
    },
    fixed={"fused_gate_up": True},
    keys={"shared_intermediate_size": "intermediate_size"},
    tensors={"shared_mlp.input_linear": "mlp.gate_up_proj", "shared_mlp.output_linear": "mlp.down_proj"},
    note="Models with state-space layers or experts are refused. GGUF files say granite.",
)
HYPERCLOVAX = Family(
    name="HyperCLOVA X SEED Think",
    architecture="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    implied={
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": None,
        "logit_scale": 1.0,
        "use_post_norm": True,
    },
    only={"residual_multiplier": (1.0,), "use_post_norm": (True,)},
    fixed={"norms": "both"},
    keys={"logits_scaling": "logit_scale"},
    tensors={"post_norm1": "self_attn.post_norm", "post_norm2": "mlp.post_norm"},
)
