import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OPTIONAL: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "no_rope_layers": None,
    "num_experts": None,
    "mlp_layer_types": None,
    "n_shared_experts": None,
    "use_qk_norm": False,
    "query_pre_attn_scalar": None,
    "rope_local_base_freq": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
"""Keys of config.json that only some families have, each with the value that has no effect."""

Stacks = Literal["alternating", "halves"]

_LAYERS = "model.layers."
_EXPERT = re.compile(r"experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class GgufNames:
    """The names of a family's tensors and keys in llama.cpp's GGUF files, mapped to ours.

    Args:
        permuted: True if llama.cpp interleaves the two halves of each rotary head in the rows of q and k.
        tensors: Names of a layer's tensors that not all families have.
        keys: Metadata keys with numbers, mapped to keys of config.json.
        implied: Keys of config.json that GGUF files lack, with llama.cpp's values.
        by_layers: Further implied keys, by the number of layers of the model that has them.
        told_by: A metadata key that only this family's files have, if another family has the same
            architecture.
        adds_offset: True if the stored norm weights include `ModelConfig.norm_offset`.
        rows: Our names, in a layer, of vectors that safetensors store as a matrix with one row.
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
    """The differences between a model family and Llama.

    Args:
        name: The name shown to users.
        architecture, model_type: The names in transformers.
        wrappers: Multimodal architectures that contain this language model.
        hidden_act: The activation. config.json must not name another one.
        rope_theta: The default if config.json has none.
        implied: transformers' defaults for keys of config.json. The family has only these keys of `OPTIONAL`.
        only: The supported values of keys of config.json; for a list, the supported elements.
        needs: Keys of config.json that must not be null.
        fixed: Fields of ModelConfig that no key of config.json gives.
        keys: The family's names of keys in config.json, mapped to Llama's.
        ignored: Keys that the makers' config.json have, but transformers ignores.
        layers: Prefix of a layer's tensor names, before the layer's number.
        tensors: The family's names of modules and tensors, mapped to ours (see `ModelConfig.shapes`). Braces
            stand for an expert's number.
        unread: Prefixes of our names of tensors that only multi-token prediction uses. They are not loaded.
        yarn: The trained length for each value of max_position_embeddings. Cards of these models extend it by
            YaRN to four times that length.
        stacks_experts: How a tensor of a checkpoint has all experts of a layer, if it does
            (`directory.text_part`): rows of gate and up alternate, or gate has the first half.
        fuses_linear: `LinearConfig.fused` of the family's checkpoints.
        scales_by_width: True if embeddings are multiplied by the square root of the hidden size, unless
            config.json says `mup_enabled: false`.
        rotates_windows_alone: True if only layers with sliding windows use RoPE, if there are any.
        gguf: The names in GGUF files; None: GGUF files are not supported.
        note: A remark for users of the family.
    """

    name: str
    architecture: str
    model_type: str
    wrappers: tuple[str, ...] = ()
    hidden_act: str = "silu"
    rope_theta: float = 10_000.0
    implied: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    layers: str = _LAYERS
    tensors: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    yarn: Mapping[int, int] = field(default_factory=dict)
    stacks_experts: Stacks | None = None
    fuses_linear: bool = False
    scales_by_width: bool = False
    rotates_windows_alone: bool = False
    gguf: GgufNames | None = None
    note: str = ""

    def own_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with Llama's key names, and with defaults for missing keys."""
        renamed = {own: raw[key] for key, own in self.keys.items() if key in raw}
        kept = {key: value for key, value in raw.items() if key not in (*self.keys, *self.ignored)}
        return {**self.implied, **kept, **renamed}

    def own_name(self, stored: str) -> str:
        """Return our name of a tensor in a checkpoint."""
        if not stored.startswith(self.layers):
            return _renamed(stored, self.tensors)
        number, _, name = stored.removeprefix(self.layers).partition(".")
        return f"{_LAYERS}{number}.{_renamed(name, self.tensors)}"

    def stored_name(self, own: str) -> str:
        """Return the name in a checkpoint of our tensor: the inverse of `own_name`."""
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
