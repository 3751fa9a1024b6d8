from deltafront.workers.model.families.family import Family, GgufNames

_EXPERTS = {
    "block_sparse_moe.gate": "mlp.gate",
    "block_sparse_moe.experts.{}.w1": "mlp.experts.{}.gate_proj",
    "block_sparse_moe.experts.{}.w2": "mlp.experts.{}.down_proj",
    "block_sparse_moe.experts.{}.w3": "mlp.experts.{}.up_proj",
}
_KEYS = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"}

MIXTRAL = Family(
    name="Mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    rope_theta=1_000_000.0,
    implied={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "sliding_window": None,
    },
    only={"norm_topk_prob": (True,)},
    keys=_KEYS,
    tensors=_EXPERTS,
    gguf=GgufNames(architecture="llama", permuted=True, told_by="expert_count"),
)
