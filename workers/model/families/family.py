import re
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

_LAYERS = "model.layers."
_EXPERT = re.compile(r"experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class GgufNames:
    """How llama.cpp's files name a family.

    Args:
        permuted: llama.cpp interleaves the two halves of each rotary head in the rows of q and k.
        tensors: Names of a block's tensors, besides those common to all families → our modules.
        keys: Metadata keys with numbers → keys of config.json.
        implied: Keys of config.json that GGUF files lack → llama.cpp's values.
        by_layers: Number of layers → implied keys of only the model with that number.
        told_by: A metadata key that only this family's files have, if another family has the same
            architecture.
        adds_offset: The stored norm weights include `ModelConfig.norm_offset`.
        rows: Our names, in a layer, of vectors that safetensors store as a matrix of one row.
    """

    architecture: str
    permuted: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    by_layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    told_by: str = ""
    adds_offset: bool = False
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """Features of a family that a plain Llama lacks.

    Args:
        name: The name shown to users.
        architecture, model_type: transformers' names.
        wrappers: Multimodal architectures that contain this language model.
        hidden_act: The activation, which config.json must not contradict.
        rope_theta: The default if config.json has none.
        implied: Keys of config.json → transformers' defaults. The family has only these keys of `OPTIONAL`.
        only: Keys of config.json → the values that are supported, also for each element of a list.
        fixed: Fields of ModelConfig that no key of config.json gives.
        keys: The family's key names in config.json → Llama's.
        layers: Prefix of a layer's tensor names, before the layer's number.
        tensors: The family's names of modules and tensors, within a layer or outside → ours, as in
            `ModelConfig.shapes`. Braces stand for an expert's number.
        unread: Prefixes of tensors, by our names, that only predict further tokens.
        scales_by_width: Embeddings are multiplied by the square root of the hidden size.
        rotates_windows_alone: If some layers have windows, only these use RoPE.
        gguf: None: its GGUF files are not supported.
        note: Shown to users of the family.
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
    layers: str = _LAYERS
    tensors: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    scales_by_width: bool = False
    rotates_windows_alone: bool = False
    gguf: GgufNames | None = None
    note: str = ""

    def own_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with Llama's key names, and with defaults for missing keys."""
        renamed = {own: raw[key] for key, own in self.keys.items() if key in raw}
        return {**self.implied, **raw, **renamed}

    def own_name(self, stored: str) -> str:
        """Return our name of a checkpoint's tensor."""
        if not stored.startswith(self.layers):
            return _renamed(stored, self.tensors)
        number, _, name = stored.removeprefix(self.layers).partition(".")
        return f"{_LAYERS}{number}.{_renamed(name, self.tensors)}"

    def stored_name(self, own: str) -> str:
        """Return a checkpoint's name of our tensor: the inverse of `own_name`."""
        theirs = {module: name for name, module in self.tensors.items()}
        if not own.startswith(_LAYERS):
            return _renamed(own, theirs)
        number, _, name = own.removeprefix(_LAYERS).partition(".")
        return f"{self.layers}{number}.{_renamed(name, theirs)}"


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    expert = _EXPERT.search(name)
    name = _EXPERT.sub("experts.{}.", name, count=1)
    old = next((module for module in modules if f"{name}.".startswith(f"{module}.")), "")
    new = modules[old] + name.removeprefix(old) if old else name
    return new if expert is None else new.replace("{}", expert[1], 1)
