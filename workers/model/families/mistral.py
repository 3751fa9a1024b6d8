from .family import Family

MISTRAL = Family(
    name="Mistral, Mistral Small 3.x",
    architecture="MistralForCausalLM",
    model_type="mistral",
    wrappers=("Mistral3ForConditionalGeneration",),
    implied={"sliding_window": 4096, "layer_types": None},
    note="GGUF files of it say llama. Of a multimodal checkpoint the language model is served.",
)
