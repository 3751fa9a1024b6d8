"""The weights of a contiguous range of layers, read from safetensors or GGUF, fused for few matmuls.

Shape suffixes: V vocabulary, C hidden size, J = q plus key heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..settings import Quantisation
from .config import ModelConfig, ModelError
from .gguf import GgufSource
from .linear import Fp8Linear, Linear
from .lora import LoraAdapter
from .store import INDEX, weight_index


class WeightSource(Protocol):
    """Tensors by their Hugging Face names; only what is asked for is read."""

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> torch.Tensor: ...


class SafetensorsSource:
    """One safetensors file, or shards with an index. A shard that no asked-for tensor is in stays shut."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, Any] = {}

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def read(self, name: str) -> torch.Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _open_safetensors(path)
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor


def open_weights(directory: str | Path) -> WeightSource:
    """Find a directory's weights. Raises ModelError naming what was looked for."""
    root = Path(directory)
    index = weight_index(root)
    if index is not None:
        return SafetensorsSource(index)
    single = root / "model.safetensors"
    if single.exists():
        return SafetensorsSource(dict.fromkeys(_open_safetensors(single).keys(), single))
    ggufs = sorted(root.glob("*.gguf"))
    if len(ggufs) == 1:
        return GgufSource(ggufs[0])
    found = f"{len(ggufs)} .gguf files" if ggufs else "none of them"
    raise ModelError(
        f"no weights in {root}: looked for {INDEX}, model.safetensors and one .gguf, found {found}"
    )


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. q, k and v are one matrix; so are gate and up."""

    input_norm_C: torch.Tensor
    qkv: Linear | Fp8Linear
    qk_norm_JD: torch.Tensor | None
    output: Linear | Fp8Linear
    post_norm_C: torch.Tensor
    gate_up: Linear | Fp8Linear
    down: Linear | Fp8Linear


@dataclass(frozen=True)
class StackWeights:
    """What one stage holds. Tied embeddings are one tensor, shared if a stage has both ends."""

    layers: tuple[LayerWeights, ...]
    embedding_VC: torch.Tensor | None
    final_norm_C: torch.Tensor | None
    head: Linear | None


@dataclass(frozen=True)
class _Reader:
    source: WeightSource
    adapter: LoraAdapter | None
    dtype: torch.dtype
    device: torch.device
    quantisation: Quantisation | None
    taken: set[str] = field(default_factory=set)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self.source.names():
            raise ModelError(f"the weights have no tensor {name!r}: they do not belong to this config.json")
        self.taken.add(name)
        tensor = self.source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} is {tuple(tensor.shape)}, config.json says {shape}")
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name!r} is {tensor.dtype}: quantised safetensors are not supported")
        if self.adapter is not None:
            tensor = self.adapter.merge(name, tensor)
        return tensor.to(self.device, self.dtype)

    def linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> Linear | Fp8Linear:
        """A layer's, in as many bits as the model is to have."""
        plain = Linear(weight_OI, bias_O)
        return plain if self.quantisation is None else Fp8Linear.of(plain)

    def require_all_taken(self, prefix: str) -> None:
        """A tensor left over (a bias, say) would be a model computed wrongly without a word."""
        left = {name for name in self.source.names() if name.startswith(prefix)} - self.taken
        left -= {f"{prefix}self_attn.rotary_emb.inv_freq"}  # old checkpoints: derived from the config
        if left:
            raise ModelError(f"the decoder has no place for tensors {', '.join(sorted(left))}")


def read_stack(
    directory: str | Path,
    config: ModelConfig,
    layers: range,
    *,
    embedding: bool,
    head: bool,
    dtype: torch.dtype,
    device: torch.device,
    adapter: str | Path | None = None,
    quantisation: Quantisation | None = None,
) -> StackWeights:
    """Read layers `layers` (and the ends asked for), merge the adapter in float32, cast, move, and quantise
    the layers' matrices if so asked.

    Raises ModelError if weights are missing, misshapen or quantised, or the adapter does not fit.
    """
    lora = None if adapter is None else LoraAdapter(adapter, config.layers)
    read = _Reader(open_weights(directory), lora, dtype, device, quantisation)
    table = (config.vocab, config.hidden)
    embedding_VC = read.get("model.embed_tokens.weight", *table) if embedding else None
    head_VC = None
    if head and config.tied_embeddings:
        head_VC = read.get("model.embed_tokens.weight", *table) if embedding_VC is None else embedding_VC
    elif head:
        head_VC = read.get("lm_head.weight", *table)
    return StackWeights(
        layers=tuple(_read_layer(read, config, layer) for layer in layers),
        embedding_VC=embedding_VC,
        final_norm_C=read.get("model.norm.weight", config.hidden) if head else None,
        head=None if head_VC is None else Linear(head_VC),
    )


def _read_layer(read: _Reader, config: ModelConfig, layer: int) -> LayerWeights:
    prefix, hidden, inner = f"model.layers.{layer}.", config.hidden, config.intermediate
    heads = {"q": config.q_heads, "k": config.kv_heads, "v": config.kv_heads}
    rows = {name: count * config.head_dim for name, count in heads.items()}

    def projections(kind: str, *columns: int) -> torch.Tensor:
        return torch.cat([read.get(f"{prefix}self_attn.{n}_proj.{kind}", rows[n], *columns) for n in "qkv"])

    qk_norm_JD = None
    if config.qk_norm:
        norms = [read.get(f"{prefix}self_attn.{n}_norm.weight", config.head_dim) for n in "qk"]
        qk_norm_JD = torch.cat([norm.expand(heads[n], -1) for n, norm in zip("qk", norms, strict=True)])
    gate_up_2IC = torch.cat([read.get(f"{prefix}mlp.{n}_proj.weight", inner, hidden) for n in ("gate", "up")])
    weights = LayerWeights(
        input_norm_C=read.get(f"{prefix}input_layernorm.weight", hidden),
        qkv=read.linear(projections("weight", hidden), projections("bias") if config.qkv_bias else None),
        qk_norm_JD=qk_norm_JD,
        output=read.linear(read.get(f"{prefix}self_attn.o_proj.weight", hidden, rows["q"])),
        post_norm_C=read.get(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=read.linear(gate_up_2IC),
        down=read.linear(read.get(f"{prefix}mlp.down_proj.weight", hidden, inner)),
    )
    read.require_all_taken(prefix)
    return weights
