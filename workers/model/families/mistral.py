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
