from deltafront.workers.model.families.family import Family, GgufNames

_IMPLIED = {
    "use_bias": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}

ERNIE4_5 = Family(
    name="ERNIE 4.5, dense",
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    rope_theta=500_000.0,
    implied={**_IMPLIED, "head_dim": 128},
    only={"use_bias": (False,)},
    fixed={"interleaved_rope": True},
    gguf=GgufNames(architecture="ernie4_5"),
)
ERNIE4_5_MOE = Family(
    name="ERNIE 4.5, mixtures of experts",
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    rope_theta=500_000.0,
    implied={
        **_IMPLIED,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "scoring_func": "biased_softmax",
        "first_k_dense_replace": 1,
        "moe_layer_end_index": -1,
        "decoder_sparse_step": 1,
    },
    only={"use_bias": (False,), "norm_topk_prob": (True,), "scoring_func": ("biased_softmax",)},
    fixed={"interleaved_rope": True},
    keys={
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
        "moe_layer_start_index": "first_k_dense_replace",
        "moe_layer_interval": "decoder_sparse_step",
    },
    tensors={"mlp.moe_statics.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
    unread=("model.mtp_",),
    gguf=GgufNames(
        architecture="ernie4_5-moe",
        keys={
            "expert_shared_count": "n_shared_experts",
            "expert_shared_feed_forward_length": "shared_experts_width",
            "leading_dense_block_count": "first_k_dense_replace",
            "interleave_moe_layer_step": "decoder_sparse_step",
        },
        rows=("mlp.gate.e_score_correction_bias",),
    ),
    note="What predicts further tokens is not read.",
)
