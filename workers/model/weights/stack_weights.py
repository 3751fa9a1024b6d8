"""The weights of one stage's share of the layers, read from safetensors or GGUF, fused for few matmuls.

Shape suffixes: V vocabulary, C hidden size, J = q plus key heads, D head dimension.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
"""Progress is told after so many layers."""

_ATTENTION = ("input_layernorm.", "self_attn.")
_FEED_FORWARD = ("post_attention_layernorm.", "mlp.")
"""How names of the tensors of a layer's halves begin."""


@dataclass(frozen=True)
class AttentionWeights:
    """The attention of a decoder layer. q, k and v are one matrix."""

    input_norm_C: torch.Tensor
    qkv: Linear | Fp8Linear
    qk_norm_JD: torch.Tensor | None
    output: Linear | Fp8Linear


@dataclass(frozen=True)
class FeedForwardWeights:
    """The feed-forward network of a decoder layer. gate and up are one matrix."""

    post_norm_C: torch.Tensor
    gate_up: Linear | Fp8Linear
    down: Linear | Fp8Linear


@dataclass(frozen=True)
class StackWeights:
    """What one stage holds. attentions, feeds: of the layers whose attention and of those whose feed-forward
    network it computes. Tied embeddings are one tensor, shared if a stage has both ends."""

    attentions: tuple[AttentionWeights, ...]
    feeds: tuple[FeedForwardWeights, ...]
    embedding_VC: torch.Tensor | None
    final_norm_C: torch.Tensor | None
    head: Linear | None


Half = TypeVar("Half", AttentionWeights, FeedForwardWeights)


@dataclass(frozen=True)
class _Reader:
    """Used from several threads at once."""

    source: WeightSource
    adapter: LoraAdapter | None
    dtype: torch.dtype
    device: torch.device
    quantisation: Quantisation | None
    uploads: Uploads
    taken: set[str] = field(default_factory=set)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """On the device. On a CPU that is the file's own memory, where its dtype is ours."""
        tensor = self._read(name, shape)
        if self.device.type == "cpu":
            return tensor.to(self.dtype)
        target = self._empty(shape)
        self.uploads.copy(tensor, target)
        return target

    def fused(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> torch.Tensor:
        """Several below one another, each read to its place."""
        whole = self._empty((sum(rows), *columns))
        start = 0
        for name, count in zip(names, rows, strict=True):
            self.uploads.copy(self._read(name, (count, *columns)), whole[start : start + count])
            start += count
        return whole

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """On the host, as the file has it, the adapter merged."""
        if name not in self.source.names():
            raise ModelError(f"the weights have no tensor {name!r}: they do not belong to this config.json")
        self.taken.add(name)
        tensor = self.source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} is {tuple(tensor.shape)}, config.json says {shape}")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(f"tensor {name!r} is {tensor.dtype}: quantised safetensors are not supported")
        return tensor if self.adapter is None else self.adapter.merge(name, tensor)

    def in_its_bits(self, half: Half) -> Half:
        """Half a layer with its matrices in as many bits as the model is to have. Not from several threads:
        it launches kernels."""
        if self.quantisation is None:
            return half
        fewer: dict[str, Any] = {
            name: Fp8Linear.of(one) for name, one in vars(half).items() if isinstance(one, Linear)
        }
        return replace(half, **fewer)

    def require_all_taken(self, prefix: str, elsewhere: tuple[str, ...]) -> None:
        """A tensor left over (a bias, say) would be a model computed wrongly without a word. elsewhere: how
        the names go on that another stage reads, and finds what is left of them."""
        left = {name for name in self.source.names() if name.startswith(prefix)} - self.taken
        left = {name for name in left if not name.removeprefix(prefix).startswith(elsewhere)}
        left -= {f"{prefix}self_attn.rotary_emb.inv_freq"}  # old checkpoints: derived from the config
        if left:
            raise ModelError(f"the decoder has no place for tensors {', '.join(sorted(left))}")

    def require_no_more_than(self, layers: int) -> None:
        """Layers that config.json does not count would be left out of the model, likewise."""
        found = (re.match(r"model\.layers\.(\d+)\.", name) for name in self.source.names())
        last = max((int(match[1]) for match in found if match), default=0)
        if last >= layers:
            raise ModelError(f"the weights have a layer {last}, but config.json says {layers} layers")


def read_stack(
    directory: str | Path,
    config: ModelConfig,
    layers: range,
    *,
    feeds: range | None = None,
    embedding: bool,
    head: bool,
    dtype: torch.dtype,
    device: torch.device,
    adapter: str | Path | None = None,
    quantisation: Quantisation | None = None,
    tell: Tell = silent,
) -> StackWeights:
    """Read the attention of layers `layers`, the feed-forward networks of layers `feeds` (the same ones,
    unless told otherwise) and the ends asked for, merge the adapter in float32, cast, move, and quantise the
    layers' matrices if so asked. tell: of progress.

    Raises ModelError if weights are missing, left over, misshapen or quantised, or the adapter does not fit.
    """
    lora = None if adapter is None else LoraAdapter(adapter, config.layers)
    read = _Reader(open_weights(directory), lora, dtype, device, quantisation, Uploads(device))
    read.require_no_more_than(config.layers)
    embedding_VC, head_VC = _read_ends(read, config, embedding, head)
    share = LayerShare(layers, layers if feeds is None else feeds)
    attentions, feed_forwards = _read_layers(read, config, share, tell)
    return StackWeights(
        attentions=attentions,
        feeds=feed_forwards,
        embedding_VC=embedding_VC,
        final_norm_C=read.get("model.norm.weight", config.hidden) if head else None,
        head=None if head_VC is None else Linear(head_VC),
    )


def _read_ends(
    read: _Reader, config: ModelConfig, embedding: bool, head: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As transformers 5 does: of tables that should be tied one may be missing, and both stay apart where
    they differ."""
    table, there = (config.vocab, config.hidden), read.source.names()
    tied = config.tied_embeddings and (not {EMBEDDING, HEAD} <= there or _equal(read.source, embedding, head))
    names = [EMBEDDING, HEAD]
    if tied:
        names = [EMBEDDING if EMBEDDING in there else HEAD] * 2
    embedding_VC = read.get(names[0], *table) if embedding else None
    if tied and embedding_VC is not None:
        return embedding_VC, embedding_VC if head else None
    return embedding_VC, read.get(names[1], *table) if head else None


def _equal(source: WeightSource, embedding: bool, head: bool) -> bool:
    """Who holds one of them reads that one, whether they are equal or not."""
    if not (embedding and head):
        return False
    equal = torch.equal(source.read(EMBEDDING), source.read(HEAD))
    if not equal:
        log.warning("tie_word_embeddings is set, but %s differs from the embedding: it is used", HEAD)
    return equal


def _read_layers(
    read: _Reader, config: ModelConfig, share: LayerShare, tell: Tell
) -> tuple[tuple[AttentionWeights, ...], tuple[FeedForwardWeights, ...]]:
    """For a GPU several layers at a time; a CPU mostly uses the files' own memory."""
    threads = 1 if read.device.type == "cpu" else THREADS
    attentions: list[AttentionWeights] = []
    feeds: list[FeedForwardWeights] = []
    numbers = range(min(share.layers.start, share.feeds.start), share.layers.stop)
    made = in_threads(lambda number: _read_layer(read, config, share, number), numbers, threads)
    for done, (attention, feed_forward) in enumerate(made, start=1):
        if attention is not None:
            attentions.append(read.in_its_bits(attention))
        if feed_forward is not None:
            feeds.append(read.in_its_bits(feed_forward))
        if done % _TOLD_LAYERS == 0 or done == len(numbers):
            tell(f"loaded {done} of {len(numbers)} layers")
    return tuple(attentions), tuple(feeds)


def _read_layer(
    read: _Reader, config: ModelConfig, share: LayerShare, layer: int
) -> tuple[AttentionWeights | None, FeedForwardWeights | None]:
    """The halves of a layer that are in the share."""
    prefix = f"model.layers.{layer}."
    attention = _read_attention(read, config, prefix) if layer in share.layers else None
    feed_forward = _read_feed_forward(read, config, prefix) if layer in share.feeds else None
    elsewhere = () if attention else _ATTENTION
    read.require_all_taken(prefix, elsewhere if feed_forward else (*elsewhere, *_FEED_FORWARD))
    return attention, feed_forward


def _read_attention(read: _Reader, config: ModelConfig, prefix: str) -> AttentionWeights:
    hidden = config.hidden
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
        input_norm_C=read.get(f"{prefix}input_layernorm.weight", hidden),
        qkv=Linear(projections("weight", hidden), projections("bias") if config.qkv_bias else None),
        qk_norm_JD=qk_norm_JD,
        output=Linear(read.get(f"{prefix}self_attn.o_proj.weight", hidden, rows["q"])),
    )


def _read_feed_forward(read: _Reader, config: ModelConfig, prefix: str) -> FeedForwardWeights:
    hidden, inner = config.hidden, config.intermediate
    gate_up = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
    return FeedForwardWeights(
        post_norm_C=read.get(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=Linear(read.fused(gate_up, [inner, inner], hidden)),
        down=Linear(read.get(f"{prefix}mlp.down_proj.weight", hidden, inner)),
    )
