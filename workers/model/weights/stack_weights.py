"""A stage's share of the weights, fused into few matrices. Shape suffixes also: J = H + G."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...progress import Tell, silent
from ...settings import Quantisation
from ..directory.headers import EMBEDDING, HEAD
from ..directory.json_files import ModelError
from ..directory.layer_shares import LayerShare
from ..directory.model_config import ModelConfig
from .lora import LoraAdapter
from .projections import Fp8Linear, Linear
from .sources import WeightSource, open_weights
from .uploads import THREADS, Uploads, in_threads

log = logging.getLogger(__name__)

_TOLD_LAYERS = 8

_ATTENTION = ("input_layernorm.", "self_attn.")
_MLP = ("post_attention_layernorm.", "mlp.")


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """The part of a model that a stage holds.

    Args:
        layers, mlps: The layers whose attention, and whose MLP, it has; mlps None for `layers`.
        embedding, head: Whether it has these ends.
        adapter: A LoRA adapter's directory.
        quantisation: The form of the layers' matrices; None for `dtype`.
    """

    config: ModelConfig
    layers: range
    mlps: range | None = None
    embedding: bool
    head: bool
    dtype: torch.dtype
    device: torch.device
    adapter: str | Path | None = None
    quantisation: Quantisation | None = None

    @property
    def share(self) -> LayerShare:
        return LayerShare(self.layers, self.layers if self.mlps is None else self.mlps)


@dataclass(frozen=True)
class AttentionWeights:
    input_norm_C: torch.Tensor
    qkv: Linear | Fp8Linear
    qk_norm_JD: torch.Tensor | None
    output: Linear | Fp8Linear


@dataclass(frozen=True)
class MlpWeights:
    post_norm_C: torch.Tensor
    gate_up: Linear | Fp8Linear
    down: Linear | Fp8Linear


@dataclass(frozen=True)
class StackWeights:
    """Tied embeddings are one tensor if a stage has both ends."""

    attentions: tuple[AttentionWeights, ...]
    mlps: tuple[MlpWeights, ...]
    embedding_VC: torch.Tensor | None
    final_norm_C: torch.Tensor | None
    head: Linear | None


Half = TypeVar("Half", AttentionWeights, MlpWeights)


class _Reader:
    """Several threads use it at once."""

    def __init__(self, source: WeightSource, spec: StackSpec) -> None:
        self.source, self.spec = source, spec
        self._adapter = None if spec.adapter is None else LoraAdapter(spec.adapter, spec.config.layers)
        self._uploads = Uploads(spec.device)
        self._taken: set[str] = set()

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """On a CPU this is the file's own memory if its dtype fits."""
        tensor = self._read(name, shape)
        if self.spec.device.type == "cpu":
            return tensor.to(self.spec.dtype)
        target = self._empty(shape)
        self._uploads.copy(tensor, target)
        return target

    def fused(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> torch.Tensor:
        target = self._empty((sum(rows), *columns))
        start = 0
        for name, count in zip(names, rows, strict=True):
            self._uploads.copy(self._read(name, (count, *columns)), target[start : start + count])
            start += count
        return target

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.spec.dtype, device=self.spec.device)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.source.names():
            raise ModelError(f"the weights have no tensor {name!r}: they do not belong to this config.json")
        self._taken.add(name)
        tensor = self.source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} is {tuple(tensor.shape)}, config.json says {shape}")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(f"tensor {name!r} is {tensor.dtype}: quantised safetensors are not supported")
        return tensor if self._adapter is None else self._adapter.merge(name, tensor)

    def quantised(self, half: Half) -> Half:
        """Use one thread, because it launches kernels."""
        if self.spec.quantisation is None:
            return half
        matrices: dict[str, Any] = {
            name: Fp8Linear.of(weight) for name, weight in vars(half).items() if isinstance(weight, Linear)
        }
        return replace(half, **matrices)

    def require_all_taken(self, prefix: str, elsewhere: tuple[str, ...]) -> None:
        """Without a bias, say, the model would be another. elsewhere: another stage checks these."""
        left = {name for name in self.source.names() if name.startswith(prefix)} - self._taken
        left = {name for name in left if not name.removeprefix(prefix).startswith(elsewhere)}
        left -= {f"{prefix}self_attn.rotary_emb.inv_freq"}  # in old checkpoints; the config implies it
        if left:
            raise ModelError(f"the decoder has no place for tensors {', '.join(sorted(left))}")

    def require_no_more_than(self, layers: int) -> None:
        matches = (re.match(r"model\.layers\.(\d+)\.", name) for name in self.source.names())
        last = max((int(match[1]) for match in matches if match), default=0)
        if last >= layers:
            raise ModelError(f"the weights have a layer {last}, but config.json says {layers} layers")


def read_stack(directory: str | Path, spec: StackSpec, tell: Tell = silent) -> StackWeights:
    """Read tensors, merge the adapter in float32, cast, upload and quantise.

    Raises:
        ModelError: Weights are missing, left over, misshapen or quantised, or the adapter does not fit.
    """
    read = _Reader(open_weights(directory), spec)
    read.require_no_more_than(spec.config.layers)
    embedding_VC, head_VC = _read_ends(read)
    attentions, mlps = _read_layers(read, tell)
    return StackWeights(
        attentions=attentions,
        mlps=mlps,
        embedding_VC=embedding_VC,
        final_norm_C=read.get("model.norm.weight", spec.config.hidden) if spec.head else None,
        head=None if head_VC is None else Linear(head_VC),
    )


def _read_ends(read: _Reader) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As in transformers 5, one of two tied tables may be missing, and tables that differ stay apart."""
    spec, names = read.spec, read.source.names()
    table = spec.config.vocab, spec.config.hidden
    tied = spec.config.tied_embeddings and (not {EMBEDDING, HEAD} <= names or _tables_are_equal(read))
    embedding, head = EMBEDDING, HEAD
    if tied:
        embedding = head = EMBEDDING if EMBEDDING in names else HEAD
    embedding_VC = read.get(embedding, *table) if spec.embedding else None
    if tied and embedding_VC is not None:
        return embedding_VC, embedding_VC if spec.head else None
    return embedding_VC, read.get(head, *table) if spec.head else None


def _tables_are_equal(read: _Reader) -> bool:
    if not (read.spec.embedding and read.spec.head):
        return False
    equal = torch.equal(read.source.read(EMBEDDING), read.source.read(HEAD))
    if not equal:
        log.warning("tie_word_embeddings is set, but %s differs from the embedding: it is used", HEAD)
    return equal


def _read_layers(read: _Reader, tell: Tell) -> tuple[tuple[AttentionWeights, ...], tuple[MlpWeights, ...]]:
    """A CPU mostly uses the files' own memory."""
    share, threads = read.spec.share, 1 if read.spec.device.type == "cpu" else THREADS
    attentions: list[AttentionWeights] = []
    mlps: list[MlpWeights] = []
    numbers = range(min(share.layers.start, share.mlps.start), share.layers.stop)
    layers = in_threads(lambda number: _read_layer(read, share, number), numbers, threads)
    for done, (attention, mlp) in enumerate(layers, start=1):
        if attention is not None:
            attentions.append(read.quantised(attention))
        if mlp is not None:
            mlps.append(read.quantised(mlp))
        if done % _TOLD_LAYERS == 0 or done == len(numbers):
            tell(f"loaded {done} of {len(numbers)} layers")
    return tuple(attentions), tuple(mlps)


def _read_layer(
    read: _Reader, share: LayerShare, layer: int
) -> tuple[AttentionWeights | None, MlpWeights | None]:
    prefix = f"model.layers.{layer}."
    attention = _read_attention(read, prefix) if layer in share.layers else None
    mlp = _read_mlp(read, prefix) if layer in share.mlps else None
    elsewhere = () if attention else _ATTENTION
    read.require_all_taken(prefix, elsewhere if mlp else (*elsewhere, *_MLP))
    return attention, mlp


def _read_attention(read: _Reader, prefix: str) -> AttentionWeights:
    config = read.spec.config
    heads = {"q": config.q_heads, "k": config.kv_heads, "v": config.kv_heads}
    rows = {name: count * config.head_dim for name, count in heads.items()}

    def projections(kind: str, *columns: int) -> torch.Tensor:
        names = [f"{prefix}self_attn.{name}_proj.{kind}" for name in rows]
        return read.fused(names, list(rows.values()), *columns)

    qk_norm_JD = None
    if config.qk_norm:
        norms = [read.get(f"{prefix}self_attn.{n}_norm.weight", config.head_dim) for n in "qk"]
        qk_norm_JD = torch.cat([norm.expand(heads[n], -1) for n, norm in zip("qk", norms, strict=True)])
    return AttentionWeights(
        input_norm_C=read.get(f"{prefix}input_layernorm.weight", config.hidden),
        qkv=Linear(projections("weight", config.hidden), projections("bias") if config.qkv_bias else None),
        qk_norm_JD=qk_norm_JD,
        output=Linear(
            read.get(f"{prefix}self_attn.o_proj.weight", config.hidden, rows["q"]),
            read.get(f"{prefix}self_attn.o_proj.bias", config.hidden) if config.o_bias else None,
        ),
    )


def _read_mlp(read: _Reader, prefix: str) -> MlpWeights:
    config = read.spec.config
    hidden, inner = config.hidden, config.intermediate

    def gate_up(kind: str, *columns: int) -> torch.Tensor:
        names = [f"{prefix}mlp.{name}_proj.{kind}" for name in ("gate", "up")]
        return read.fused(names, [inner, inner], *columns)

    return MlpWeights(
        post_norm_C=read.get(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=Linear(gate_up("weight", hidden), gate_up("bias") if config.mlp_bias else None),
        down=Linear(
            read.get(f"{prefix}mlp.down_proj.weight", hidden, inner),
            read.get(f"{prefix}mlp.down_proj.bias", hidden) if config.mlp_bias else None,
        ),
    )
