from deltafront.workers.model.families.family import Family, GgufNames

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
