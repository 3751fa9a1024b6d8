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
MINIMAX_M2 = Family(
    name="MiniMax-M2",
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    rope_theta=5_000_000.0,
    implied={
        "head_dim": 128,
        "partial_rotary_factor": None,
        "rotary_dim": None,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": 1,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "max_position_embeddings": 196_608,
    },
    only={
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "attn_type_list": (1,),
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
    },
    fixed={"qk_norm": True, "qk_norm_all_heads": True},
    keys=_KEYS,
    tensors=_EXPERTS | {"block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
    gguf=GgufNames(architecture="minimax-m2"),
)
