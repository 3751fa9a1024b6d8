from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPTIONAL: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "no_rope_layers": None,
    "num_experts": None,
    "n_shared_experts": None,
    "use_qk_norm": False,
    "query_pre_attn_scalar": None,
    "rope_local_base_freq": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
"""Keys of config.json that only some families have → the value that changes nothing."""


@dataclass(frozen=True, kw_only=True)
class GgufNames:
    """How llama.cpp's files name a family.

    Args:
        permuted: The halves of each rotary head alternate in the rows of q and k.
        tensors: Names of a block's tensors, beside those that all families have → our modules.
        keys: Metadata of numbers → keys of config.json.
        implied: Keys of config.json of which a file says nothing → llama.cpp's values.
        by_layers: A model's number of layers → such keys of it alone.
        told_by: Metadata that files of this family have, where another one has the same architecture.
        adds_offset: Norms' weights have `ModelConfig.norm_offset` added.
    """

    architecture: str
    permuted: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    by_layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    told_by: str = ""
    adds_offset: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """Features of a family that a plain Llama lacks.

    Args:
        name: For people.
        architecture, model_type: transformers'.
        wrappers: Multimodal architectures whose language model it is.
        hidden_act: The activation, which config.json must not contradict.
        rope_theta: Where config.json names none.
        implied: Keys of config.json → what transformers takes a missing one for. Of `OPTIONAL` it has these.
        only: Keys of config.json → the values that are served, of a list's each.
        fixed: Fields of ModelConfig that no key tells.
        keys: Its names of config.json's keys → Llama's.
        layers: How its layers' tensors begin, before the layer's number.
        tensors: Its names of modules, within a layer or outside → ours. `ModelConfig.shapes` has ours.
        scales_by_width: Embeddings are multiplied by the root of the hidden size.
        rotates_windows_alone: Beside layers with windows, those that see everything are not rotated.
        gguf: None: no GGUF files are read.
        note: What its users should know.
    """

    name: str
    architecture: str
    model_type: str
    wrappers: tuple[str, ...] = ()
    hidden_act: str = "silu"
    rope_theta: float = 10_000.0
    implied: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers."
    tensors: Mapping[str, str] = field(default_factory=dict)
    scales_by_width: bool = False
    rotates_windows_alone: bool = False
    gguf: GgufNames | None = None
    note: str = ""

    def own_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with Llama's names of keys and the values of missing ones."""
        renamed = {own: raw[key] for key, own in self.keys.items() if key in raw}
        return {**self.implied, **raw, **renamed}

    def own_name(self, stored: str) -> str:
        """Return our name of a tensor in its checkpoints."""
        if not stored.startswith(self.layers):
            return self._renamed(stored)
        number, _, name = stored.removeprefix(self.layers).partition(".")
        return f"model.layers.{number}.{self._renamed(name)}"

    def _renamed(self, name: str) -> str:
        theirs = next((module for module in self.tensors if name.startswith(f"{module}.")), "")
        return self.tensors[theirs] + name.removeprefix(theirs) if theirs else name
