from deltafront.workers.model.families.family import Family, GgufNames

_IMPLIED = {
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "use_qk_norm": True,
    "alpha": None,
}
_NORMS = {
    "self_attn.query_layernorm": "self_attn.q_norm",
    "self_attn.key_layernorm": "self_attn.k_norm",
}

HUNYUAN = Family(
    name="Hunyuan, dense",
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    implied=_IMPLIED,
    only={"use_qk_norm": (True,)},
    fixed={"qk_norm": True, "qk_norm_after_rope": True},
    tensors=_NORMS,
    gguf=GgufNames(architecture="hunyuan-dense"),
)
HUNYUAN_MOE = Family(
    name="Hunyuan, mixtures of experts",
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    implied=_IMPLIED
    | {"num_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 1, "norm_topk_prob": True},
    only={"use_qk_norm": (True,)},
    fixed={"qk_norm": True, "qk_norm_after_rope": True},
    keys={"moe_topk": "num_experts_per_tok", "intermediate_size": "moe_intermediate_size"},
    ignored=("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor"),
    tensors=_NORMS | {"mlp.gate.wg": "mlp.gate", "mlp.shared_mlp": "mlp.shared_experts"},
)
HY3 = Family(
    name="Hy3, mixtures of experts",
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    rope_theta=11_158_840.0,
    implied={
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.826,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "num_nextn_predict_layers": 1,
    },
    only={"mlp_bias": (False,), "norm_topk_prob": (True,), "scoring_func": ("sigmoid",)},
    fixed={"qk_norm": True},
    keys={
        "num_local_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    tensors={
        "mlp.router.gate": "mlp.gate",
        "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_mlp": "mlp.shared_experts",
    },
    note="Layers that predict further tokens are not read.",
)
