from .family import Family, GgufNames

_BIASES = {"attention_bias": False, "mlp_bias": False}

LLAMA = Family(
    name="Llama 2, 3.x",
    architecture="LlamaForCausalLM",
    model_type="llama",
    implied=_BIASES,
    gguf=GgufNames(architecture="llama", permuted=True),
)
