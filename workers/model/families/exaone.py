from dataclasses import replace

from deltafront.workers.model.families.family import Family, GgufNames

EXAONE = Family(
    name="EXAONE 3.x",
    architecture="ExaoneForCausalLM",
    model_type="exaone",
    keys={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    layers="transformer.h.",
    tensors={
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.attention.q_proj": "self_attn.q_proj",
        "attn.attention.k_proj": "self_attn.k_proj",
        "attn.attention.v_proj": "self_attn.v_proj",
        "attn.attention.out_proj": "self_attn.o_proj",
        "mlp.c_fc_0": "mlp.gate_proj",
        "mlp.c_fc_1": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    gguf=GgufNames(architecture="exaone"),
)
EXAONE4 = Family(
    name="EXAONE 4",
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    implied={"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None, "rms_norm_eps": 1e-5},
    fixed={"norms": "after", "qk_norm": True},
    tensors={
        "post_attention_layernorm": "self_attn.post_norm",
        "post_feedforward_layernorm": "mlp.post_norm",
    },
    gguf=GgufNames(
        architecture="exaone4",
        tensors={"post_attention_norm": "self_attn.post_norm", "post_ffw_norm": "mlp.post_norm"},
        keys={"attention.sliding_window": "sliding_window"},
    ),
    rotates_windows_alone=True,
    note="In the 32B model three of four layers have windows, and the others are not rotated.",
)
EXAONE_MOE = replace(
    EXAONE4,
    name="K-EXAONE, mixtures of experts",
    architecture="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    implied={
        **EXAONE4.implied,
        "max_position_embeddings": 2048,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
    },
    only={"scoring_func": ("sigmoid",)},
    fixed={"qk_norm": True},
    keys={"num_shared_experts": "n_shared_experts"},
    tensors={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
    unread=("mtp.",),
    gguf=None,
    note="Three of four layers have windows, and the others are not rotated. What predicts further tokens is "
    "not read.",
)
