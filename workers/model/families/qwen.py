from dataclasses import replace
from typing import Any

from deltafront.workers.model.families.family import Family, GgufNames

_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_SHARED = {"mlp.shared_expert": "mlp.shared_experts", "mlp.shared_expert_gate": "mlp.shared_gate"}
_SHARED_GGUF = GgufNames(
    architecture="qwen2moe",
    tensors={"ffn_gate_inp_shexp": "mlp.shared_gate"},
    keys={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    rows=("mlp.shared_gate.weight",),
)

QWEN2 = Family(
    name="Qwen2, Qwen2.5",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    implied=_WINDOWS,
    fixed={"qkv_bias": True, "o_bias": False},
    yarn={32_768: 32_768},
    gguf=GgufNames(architecture="qwen2"),
)
QWEN3 = Family(
    name="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    implied=_WINDOWS | {"attention_bias": False, "head_dim": 128},
    fixed={"qk_norm": True},
    yarn={40_960: 32_768},
    gguf=GgufNames(architecture="qwen3"),
)
QWEN3_MOE = Family(
    name="Qwen3, mixtures of experts",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    implied={
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    fixed={"qk_norm": True},
    yarn={40_960: 32_768, 262_144: 262_144},
    keys={"num_local_experts": "num_experts"},
    gguf=GgufNames(architecture="qwen3moe", implied={"norm_topk_prob": True}),
    note="Adapters of experts are not read.",
)
QWEN2_MOE = Family(
    name="Qwen1.5 and Qwen2, mixtures of experts",
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    implied={
        "attention_bias": True,
        "use_sliding_window": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    fixed={"o_bias": False},
    keys={"qkv_bias": "attention_bias"},
    tensors=_SHARED,
    gguf=_SHARED_GGUF,
)
MELLUM = Family(
    name="Mellum 2, mixtures of experts",
    architecture="MellumForCausalLM",
    model_type="mellum",
    rope_theta=500_000.0,
    implied={
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 1024,
        "layer_types": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "mlp_layer_types": None,
    },
    needs=("layer_types",),
    fixed={"qk_norm": True},
    keys={"num_local_experts": "num_experts"},
    note="Three of four layers have windows, with a RoPE of their own.",
)
QWEN3_VL = replace(
    QWEN3,
    name="Qwen3-VL, dense",
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl_text",
    wrappers=("Qwen3VLForConditionalGeneration",),
    rope_theta=500_000.0,
    implied={"attention_bias": False, "head_dim": 128, "max_position_embeddings": 128_000},
    yarn={},
    gguf=None,
    note="Its language model is served.",
)

_HYBRID: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_HYBRID_ONLY = {"attention_bias": (False,), "attn_output_gate": (True,)}
_HYBRID_FIXED = {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True, "fused_q_gate": True}
_HYBRID_UNREAD = "mtp.", "model.visual."

_HYBRID_MIXTURE: dict[str, Any] = {
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}

QWEN3_5 = Family(
    name="Qwen3.5, dense",
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    wrappers=("Qwen3_5ForConditionalGeneration",),
    implied=_HYBRID | {"num_key_value_heads": 4},
    only=_HYBRID_ONLY,
    fixed=_HYBRID_FIXED,
    unread=_HYBRID_UNREAD,
    yarn={262_144: 262_144},
    gguf=GgufNames(architecture="qwen35", adds_offset=True),
)
QWEN3_5_MOE = Family(
    name="Qwen3.5, mixtures of experts",
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    wrappers=("Qwen3_5MoeForConditionalGeneration",),
    implied=_HYBRID | _HYBRID_MIXTURE | {"num_key_value_heads": 2},
    only=_HYBRID_ONLY | {"norm_topk_prob": (True,)},
    fixed=_HYBRID_FIXED,
    ignored=("mlp_only_layers", "decoder_sparse_step", "intermediate_size"),
    tensors=_SHARED,
    unread=_HYBRID_UNREAD,
    stacks_experts="halves",
    yarn={262_144: 262_144},
    gguf=replace(_SHARED_GGUF, architecture="qwen35moe", adds_offset=True),
)
QWEN3_NEXT = Family(
    name="Qwen3-Next",
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    implied={
        **_HYBRID,
        **_HYBRID_MIXTURE,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    only=_HYBRID_ONLY,
    fixed=_HYBRID_FIXED,
    tensors=_SHARED,
    unread=_HYBRID_UNREAD,
    stacks_experts="halves",
    fuses_linear=True,
    yarn={262_144: 262_144},
    gguf=replace(_SHARED_GGUF, architecture="qwen3next", adds_offset=True),
)
