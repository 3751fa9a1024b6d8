"""Reads the configuration and the weights of a GGUF file, under our names."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from deltafront.workers.model.directory.headers import open_gguf
from deltafront.workers.model.directory.layer_config import read_linear
from deltafront.workers.model.directory.model_config import LINEAR
from deltafront.workers.model.directory.model_files import ModelError, gguf_parts
from deltafront.workers.model.family_registry import gguf_families
from deltafront.workers.model.weights.gguf import linear
from deltafront.workers.model.weights.gguf.tokenizer import end_ids

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction",
}
"""Names of tensors in mixtures of experts. Braces mark tensors with the matrices of all experts; each
expert's number replaces them."""
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_GATING = {"softmax": 1, "biased_softmax": 1, "sigmoid": 2}
"""The values of expert_gating_func."""

_PREDICTING = "nextn_predict_layers"
_PATTERN = "attention.sliding_window_pattern"
_FREQUENCIES, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_ROPE_FACTORS = (_FREQUENCIES, _SHORT, _LONG)

_TOLD_BY = {
    "attention_bias": "attn_q.bias",
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_up.bias",
    "use_qk_norm": "attn_q_norm.weight",
}
"""Keys of config.json that are true if the first layer has this tensor."""

_READ = frozenset(
    """vocab_size context_length embedding_length block_count feed_forward_length tensor_data_layout
    attention.head_count attention.head_count_kv attention.key_length attention.layer_norm_rms_epsilon
    rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor rope.scale_linear
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.attn_factor
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow""".split()
)
"""Metadata keys that are read, or that have no effect."""
_FACTORS = """attention.output_scale logit_scale embedding_scale residual_scale
    rope.scaling.yarn_ext_factor""".split()
"""Metadata keys that have no effect if their value is 1."""


class GgufSource:
    """A memory-mapped GGUF file, with all its parts. Each tensor is dequantised when it is read."""

    def __init__(self, path: str | Path) -> None:
        parts = gguf_parts(Path(path))
        self.path = parts[0]
        readers = [open_gguf(part) for part in parts]
        self._reader = readers[0]
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self._refuse_other_parts(parts, readers)
        self._architecture = str(self.field("general.architecture"))
        families = gguf_families()
        if self._architecture not in families:
            known = ", ".join(families)
            raise ModelError(f"{self.path}: GGUF architecture {self._architecture!r} is not one of {known}")
        self.family, self._gguf = next(
            (family, names)
            for family, names in families[self._architecture]
            if not names.told_by or self.model_field(names.told_by, 0)
        )
        if not self._has_experts and (experts := int(self.model_field("expert_count", 0))):
            raise ModelError(
                f"{self.path} is a mixture of {experts} experts of architecture {self._architecture!r}, and "
                f"{self.family.name} is served without experts alone"
            )
        self._keys = {**self._gguf.keys, **(_EXPERT_KEYS if self._has_experts else {})}
        if self._is_hybrid:
            self._keys |= linear.KEYS
        blocks = {**_BLOCK, **(_EXPERTS if self._has_experts else {}), **self._gguf.tensors}
        blocks |= linear.TENSORS if self._is_hybrid else {}
        self._names = dict(self._places(blocks, linear.PARAMETERS if self._is_hybrid else {}))
        self._unfused = (linear.QKV, linear.Z) if self.family.fuses_linear else ()
        """The ends of names of tensors that are parts of a fused one."""
        if self._unfused:
            firsts = [name for name in self._names if name.endswith(linear.QKV)]
            self._names |= {name.replace(linear.QKV, linear.QKVZ): self._names[name] for name in firsts}

    def names(self) -> frozenset[str]:
        return frozenset(name for name in self._names if not name.endswith(self._unfused))

    @property
    def _layers(self) -> int:
        """Number of layers, without the multi-token-prediction layers at the end."""
        return int(self.model_field("block_count")) - self._predicting

    @property
    def _predicting(self) -> int:
        count = int(self.model_field(_PREDICTING, 0))
        if count > len(self._tensors):
            raise ModelError(f"{self.path}: GGUF key {_PREDICTING} = {count}, but it has fewer tensors")
        return count

    @property
    def _is_hybrid(self) -> bool:
        return "linear_num_value_heads" in self.family.implied

    @property
    def _has_experts(self) -> bool:
        return "num_experts" in self.family.implied

    def _places(
        self, blocks: Mapping[str, str], parameters: Mapping[str, str]
    ) -> Iterator[tuple[str, tuple[str, int | None]]]:
        """Yield our name of each tensor, with its name in the file and its expert's number (None: no expert).
        Multi-token prediction and RoPE factors are left out."""
        predicting = tuple(f"blk.{self._layers + n}." for n in range(self._predicting))
        for name in self._tensors.keys() - {*_ROPE_FACTORS}:
            if name.startswith(predicting):
                continue
            own = _own_name(name, blocks, parameters)
            experts = int(self._tensors[name].shape[-1]) if "{}" in own else None
            for expert in (None,) if experts is None else range(experts):
                yield own.format(expert), (name, expert)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in Hugging Face's layout. A quantised tensor becomes float32."""
        return self._linear_tensors(name) if f".{LINEAR}." in name else self._read(name)

    @cached_property
    def _linear_tensors(self) -> linear.LinearTensors:
        sizes = read_linear(self.config(), self.family, self._layers)
        if sizes is None:
            raise ModelError(f"{self.path}: its metadata name no layer with linear attention")
        return linear.LinearTensors(self._read, sizes, tiled=not sizes.fused)

    def _read(self, name: str) -> torch.Tensor:
        stored, expert = self._names[name]
        data = _to_torch(self._tensors[stored], expert)
        if self._gguf.permuted and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = "attention.head_count" if "q_proj" in name else "attention.head_count_kv"
            data = _unpermute(data, int(self.model_field(heads, self.model_field("attention.head_count"))))
        if name.endswith(self._gguf.rows):
            data = data.view(1, -1)
        if self._gguf.adds_offset and name.endswith("norm.weight") and f".{LINEAR}." not in name:
            data = data - self.family.fixed["norm_offset"]
        return data

    def read_compact(self, name: str) -> torch.Tensor:
        """Return a tensor. A quantised tensor becomes bf16."""
        data = self.read(name)
        kind = self._tensors[self._names[name][0]].tensor_type.name
        return data if kind in ("F32", "F16") else data.to(torch.bfloat16)

    def field(self, key: str, default: Any = None) -> Any:
        """Return a metadata value. Raises ModelError if there is neither a value nor a default."""
        entry = self._reader.get_field(key)
        if entry is None and default is None:
            raise ModelError(f"{self.path}: GGUF metadata has no {key!r}")
        return default if entry is None else entry.contents()

    def model_field(self, key: str, default: Any = None) -> Any:
        return self.field(f"{self._architecture}.{key}", default)

    def has_field(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def _refuse_other_parts(self, parts: list[Path], readers: list[Any]) -> None:
        for number, (part, reader) in enumerate(zip(parts, readers, strict=True)):
            at, count = _split(reader, "no", 0), _split(reader, "count", 1)
            if (at, count) != (number, len(parts)):
                raise ModelError(
                    f"{part} is part {at + 1} of {count}: the parts must be called as llama-gguf-split calls "
                    f"them (…-00001-of-{count:05d}.gguf), side by side"
                )
        if (expected := int(self.field("split.tensors.count", len(self._tensors)))) != len(self._tensors):
            raise ModelError(
                f"{self.path} says {expected} tensors, but its {len(parts)} parts hold {len(self._tensors)}: "
                "take parts of one model"
            )

    def config(self) -> dict[str, Any]:
        """Make the config.json that corresponds to this metadata."""
        heads, hidden = self.model_field("attention.head_count"), self.model_field("embedding_length")
        head_dim = self.model_field("attention.key_length", hidden // heads)
        rotated = self.model_field("rope.dimension_count", head_dim)
        is_partial = "partial_rotary_factor" in self.family.implied
        if rotated != head_dim and not is_partial:
            raise ModelError(f"{self.path}: rotary embedding of a part of the head is not supported")
        self._refuse_unread(head_dim)
        config = {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            "num_hidden_layers": self._layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self.model_field("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": self._vocab(),
            "max_position_embeddings": self.model_field("context_length"),
            "rms_norm_eps": _shortest_float(self.model_field("attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "hidden_act": self.family.hidden_act,
            "sliding_window": None,
            "eos_token_id": end_ids(self),
        }
        if "intermediate_size" not in self.family.ignored:
            config["intermediate_size"] = self.model_field("feed_forward_length")
        if is_partial:
            config["partial_rotary_factor"] = rotated / head_dim
        config |= {key: f"blk.0.{name}" in self._tensors for key, name in self._told()}
        config |= self._gguf.implied
        config |= self._gguf.by_layers.get(config["num_hidden_layers"], {})
        config |= self._window_layers()
        config |= linear.linear_keys(self.model_field) if self._is_hybrid else {}
        for key, own in self._keys.items():
            has = self.has_field(f"{self._architecture}.{key}")
            config[own] = _number(self.model_field(key)) if has else config.get(own)
        if self.has_field("tokenizer.ggml.bos_token_id"):
            config["bos_token_id"] = self.field("tokenizer.ggml.bos_token_id")
        return config

    def _window_layers(self) -> dict[str, Any]:
        """Read which layers have sliding windows: a list has an entry per layer; with a number n, every n-th
        layer has no window."""
        pattern = self.model_field(_PATTERN, 0) if self._has_windows else 0
        if isinstance(pattern, list):
            return {
                "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]
            }
        return {"sliding_window_pattern": int(pattern)} if pattern else {}

    @property
    def _has_windows(self) -> bool:
        return "attention.sliding_window" in self._keys

    def _told(self) -> Iterator[tuple[str, str]]:
        for key, name in _TOLD_BY.items():
            if key in self.family.implied:
                yield key, name

    def _vocab(self) -> int:
        if "token_embd.weight" not in self._tensors:
            raise ModelError(f"{self.path} has no tensor token_embd.weight: it is not a whole model")
        rows = int(self._tensors["token_embd.weight"].shape[1])
        if (tokens := len(self.field("tokenizer.ggml.tokens", []))) > rows:
            raise ModelError(f"{self.path}: {tokens} tokens, but only {rows} embeddings")
        return rows

    def _refuse_unread(self, head_dim: int) -> None:
        inert: dict[str, Any] = dict.fromkeys(_FACTORS, 1.0)
        inert |= {"attention.causal": True, "hidden_activation": "silu"}
        inert["expert_gating_func"] = _GATING[self.family.implied.get("scoring_func", "softmax")]
        inert |= {"attention.value_length": head_dim, "attention.scale": head_dim**-0.5}
        for name in self._reader.fields:
            prefix, _, key = name.partition(".")
            if prefix != self._architecture or key in _READ or key in self._keys:
                continue
            value = self.field(name)
            if (key == _PATTERN and self._has_windows) or (key in linear.READ and self._is_hybrid):
                continue
            if key == "attention.sliding_window" and value >= self.model_field("context_length"):
                continue
            if not _is_inert(value, inert.get(key, 0)):
                raise ModelError(
                    f"{self.path}: GGUF key {name} = {value!r} is not supported, and without it this model "
                    "would compute something else"
                )

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": float(self.model_field("rope.freq_base", 10_000.0))}
        kind = str(self.model_field("rope.scaling.type", "linear"))
        factor = self._rope_number("factor", self.model_field("rope.scale_linear", 1.0)) or 1.0
        attention = self._rope_number("attn_factor", 1.0)
        if _LONG in self._tensors:
            trained = self.model_field("rope.scaling.original_context_length")
            factors = {"short_factor": self._rope_factors(_SHORT), "long_factor": self._rope_factors(_LONG)}
            rope |= factors | {"original_max_position_embeddings": trained, "attention_factor": attention}
            return {**rope, "rope_type": "longrope"}
        if kind != "yarn" and attention != 1.0:
            self._refuse_rope("attn_factor", attention)
        if _FREQUENCIES in self._tensors:
            if kind != "none" and factor != 1.0:
                self._refuse_rope("factor", factor)
            return {**rope, "rope_type": "factors", "factors": self._rope_factors(_FREQUENCIES)}
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return {**rope, "rope_type": "default"}
        rope |= {"rope_type": kind, "factor": factor}
        if self.has_field(f"{self._architecture}.rope.scaling.original_context_length"):
            original = self.model_field("rope.scaling.original_context_length")
            rope["original_max_position_embeddings"] = original
        return rope | (self._yarn(factor, attention) if kind == "yarn" else {})

    def _rope_factors(self, name: str) -> list[float]:
        factors: list[float] = _to_torch(self._tensors[name]).tolist()
        return factors

    def _yarn(self, factor: float, attention: float) -> dict[str, float]:
        """Read YaRN's keys. llama.cpp multiplies YaRN's temperature by attn_factor and ignores
        yarn_attn_factor, which Hugging Face uses. Raises ModelError if the two disagree."""
        if self.has_field(self._yarn_key("log_multiplier")):  # as in DeepSeek-V2, where mscale is 1
            return {"mscale": 1.0, "mscale_all_dim": self._rope_number("yarn_log_multiplier")} | self._betas()
        temperature = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        stated = self._rope_number("yarn_attn_factor", temperature)
        if not math.isclose(stated, temperature, rel_tol=1e-6):
            self._refuse_rope("yarn_attn_factor", stated)
        return {"attention_factor": attention * temperature} | self._betas()

    def _betas(self) -> dict[str, float]:
        stated = (key for key in ("beta_fast", "beta_slow") if self.has_field(self._yarn_key(key)))
        return {key: self._rope_number(f"yarn_{key}") for key in stated}

    def _yarn_key(self, key: str) -> str:
        return f"{self._architecture}.rope.scaling.yarn_{key}"

    def _rope_number(self, key: str, default: float | None = None) -> float:
        return _shortest_float(self.model_field(f"rope.scaling.{key}", default))

    def _refuse_rope(self, key: str, value: float) -> NoReturn:
        name = f"{self._architecture}.rope.scaling.{key}"
        raise ModelError(f"{self.path}: GGUF key {name} = {value} is not supported with this kind of scaling")


def _split(reader: Any, key: str, default: int) -> int:
    entry = reader.get_field(f"split.{key}")
    return default if entry is None else int(entry.contents())


def _is_inert(value: Any, wanted: Any) -> bool:
    """Return whether a key's value has no effect: it equals `wanted`, or is zero for a factor or an unused
    key."""
    if isinstance(wanted, float):
        return isinstance(value, int | float) and (value == 0 or math.isclose(value, wanted, rel_tol=1e-6))
    return bool(value == wanted) if wanted else not value


def _own_name(name: str, blocks: Mapping[str, str], parameters: Mapping[str, str]) -> str:
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.partition(".")
    number, _, module = rest.partition(".")
    if block == "blk" and module in parameters:
        return f"model.layers.{number}.{parameters[module]}"
    part, _, kind = module.rpartition(".")
    if block != "blk" or part not in blocks or kind not in ("weight", "bias"):
        raise ModelError(f"GGUF tensor {name!r} is not part of such a decoder")
    own = f"model.layers.{number}.{blocks[part]}.{kind}"
    return own.replace("e_score_correction.bias", "e_score_correction_bias")  # undo llama.cpp's renaming


def _to_torch(tensor: Any, expert: int | None = None) -> torch.Tensor:
    shape, data = tuple(int(size) for size in reversed(tensor.shape)), tensor.data
    if expert is not None:
        shape, data = shape[1:], data[expert]
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return torch.from_numpy(np.array(data)).view(shape)
    try:
        values = quants.dequantize(data, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(
            f"{tensor.name}: GGUF type {tensor.tensor_type.name} cannot be dequantised"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values)).view(shape)


def _unpermute(rows_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of each rotary head's halves."""
    pairs = rows_OI.view(heads, rows_OI.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows_OI.shape)


def _shortest_float(value: float) -> float:
    """Return the shortest decimal number of a float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _number(value: float) -> float:
    return value if isinstance(value, int) else _shortest_float(value)
