"""Weights and configuration out of a GGUF file, under the names that Hugging Face checkpoints use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import ModelError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

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

_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """A memory-mapped GGUF file; tensors are dequantised one by one, when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        from gguf import GGUFReader

        self.path = Path(path)
        try:
            self._reader: Any = GGUFReader(self.path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path} cannot be read as GGUF: {error}") from None
        self._architecture = str(self.field("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ModelError(f"{self.path}: GGUF architecture {self._architecture!r} is not one of {known}")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._names = {_hugging_face_name(name): name for name in self._tensors if name != _ROPE_FACTORS}

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in Hugging Face layout: float32, or the file's own dtype where it is not quantised."""
        tensor = self._tensors[self._names[name]]
        data = _to_torch(tensor)
        if self._architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "attention.head_count" if "q_proj" in name else "attention.head_count_kv"
            data = _unpermute(data, int(self.model_field(heads, self.model_field("attention.head_count"))))
        return data

    def read_compact(self, name: str) -> torch.Tensor:
        """`read`, with tensors that the file has quantised rounded to bf16: the form to store."""
        data = self.read(name)
        kind = self._tensors[self._names[name]].tensor_type.name
        return data if kind in ("F32", "F16") else data.to(torch.bfloat16)

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value. Raises ModelError if there is neither a value nor a default."""
        entry = self._reader.get_field(key)
        if entry is None and default is None:
            raise ModelError(f"{self.path}: GGUF metadata has no {key!r}")
        return default if entry is None else entry.contents()

    def model_field(self, key: str, default: Any = None) -> Any:
        return self.field(f"{self._architecture}.{key}", default)

    def has_field(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def config(self) -> dict[str, Any]:
        """The config.json that this file's metadata amounts to, as `read_config` reads it."""
        heads, hidden = self.model_field("attention.head_count"), self.model_field("embedding_length")
        head_dim = self.model_field("attention.key_length", hidden // heads)
        if self.model_field("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{self.path}: rotary embedding of a part of the head is not supported")
        config = {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "num_hidden_layers": self.model_field("block_count"),
            "hidden_size": hidden,
            "intermediate_size": self.model_field("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.model_field("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "max_position_embeddings": self.model_field("context_length"),
            "rms_norm_eps": _shortest_float(self.model_field("attention.layer_norm_rms_epsilon")),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "hidden_act": "silu",
        }
        for key in ("bos_token_id", "eos_token_id"):
            if self.has_field(f"tokenizer.ggml.{key}"):
                config[key] = self.field(f"tokenizer.ggml.{key}")
        return config

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": float(self.model_field("rope.freq_base", 10_000.0))}
        kind = str(self.model_field("rope.scaling.type", "none"))
        if _ROPE_FACTORS in self._tensors:
            return {
                **rope,
                "rope_type": "factors",
                "factors": _to_torch(self._tensors[_ROPE_FACTORS]).tolist(),
            }
        if kind == "none":
            return {**rope, "rope_type": "default"}
        rope |= {"rope_type": kind, "factor": self.model_field("rope.scaling.factor")}
        if self.has_field(f"{self._architecture}.rope.scaling.original_context_length"):
            original = self.model_field("rope.scaling.original_context_length")
            rope["original_max_position_embeddings"] = original
        return rope


def _hugging_face_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.partition(".")
    number, _, module = rest.partition(".")
    part, _, kind = module.rpartition(".")
    if block != "blk" or part not in _BLOCK or kind not in ("weight", "bias"):
        raise ModelError(f"GGUF tensor {name!r} is not part of a Llama-family decoder")
    return f"model.layers.{number}.{_BLOCK[part]}.{kind}"


def _to_torch(tensor: Any) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants

    shape = tuple(int(size) for size in reversed(tensor.shape))
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return torch.from_numpy(np.array(tensor.data)).view(shape)
    try:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(
            f"{tensor.name}: GGUF type {tensor.tensor_type.name} cannot be dequantised"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values)).view(shape)


def _unpermute(rows_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two halves of each rotary head for this architecture; put them back."""
    pairs = rows_OI.view(heads, rows_OI.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows_OI.shape)


def _shortest_float(value: float) -> float:
    """1e-5 went through float32 on its way into the file: take the shortest decimal that reads the same."""
    return float(str(np.float32(value)))
