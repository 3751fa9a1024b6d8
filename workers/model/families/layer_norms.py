"""Families with LayerNorm in place of RMSNorm."""

from dataclasses import replace

from deltafront.workers.model.families.family import Family

STARCODER2 = Family(
    name="StarCoder2",
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    hidden_act="gelu_pytorch_tanh",
    implied={
        "use_bias": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
    },
    only={"use_bias": (True,)},
    fixed={
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "activation": "ungated_gelu",
        "layer_norms": True,
        "norm_bias": True,
    },
    keys={"norm_epsilon": "rms_norm_eps"},
    tensors={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
)
COHERE = Family(
    name="Command R, R+",
    architecture="CohereForCausalLM",
    model_type="cohere",
    rope_theta=500_000.0,
    implied={
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    fixed={"interleaved_rope": True, "layer_norms": True, "parallel": True},
    keys={"layer_norm_eps": "rms_norm_eps"},
    note="Norms of heads (Command R+ of April 2024) are refused.",
)
COHERE2 = replace(
    COHERE,
    name="Command A, R7B",
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    rope_theta=10_000.0,
    implied={
        **COHERE.implied,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    needs=("sliding_window",),
    rotates_windows_alone=True,
    note="Three of four layers have windows, and the others are not rotated.",
)
NEMOTRON = Family(
    name="Nemotron 4, Minitron",
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    hidden_act="relu2",
    implied={
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
    fixed={"layer_norms": True, "norm_bias": True, "norm_offset": 1.0},
    keys={"norm_eps": "rms_norm_eps"},
)
JAIS2 = Family(
    name="Jais 2",
    architecture="Jais2ForCausalLM",
    model_type="jais2",
    hidden_act="relu2",
    implied={
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    fixed={"layer_norms": True, "norm_bias": True},
    keys={"layer_norm_eps": "rms_norm_eps"},
)
