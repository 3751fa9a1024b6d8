from deltafront.workers.model.families.family import Family, GgufNames

SEED_OSS = Family(
    name="Seed-OSS",
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    implied={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 128},
    gguf=GgufNames(architecture="seed_oss", tensors={"post_attention_norm": "post_attention_layernorm"}),
)
