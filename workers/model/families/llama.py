from deltafront.workers.model.families.family import Family, GgufNames

_BIASES = {"attention_bias": False, "mlp_bias": False}

LLAMA = Family(
    name="Llama 2, 3.x",
    architecture="LlamaForCausalLM",
    model_type="llama",
    implied=_BIASES,
    gguf=GgufNames(architecture="llama", permuted=True),
)
ARCEE = Family(
    name="Arcee AFM",
    architecture="ArceeForCausalLM",
    model_type="arcee",
    hidden_act="relu2",
    implied=_BIASES | {"rms_norm_eps": 1e-5},
    gguf=GgufNames(architecture="arcee", permuted=True),
    note="Its MLPs have no gate, but the square of ReLU.",
)
