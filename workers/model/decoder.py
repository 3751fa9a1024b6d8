"""One thin decoder for the Llama family, for any contiguous part of its layers, which may begin and end
between a layer's attention and its feed-forward network.

Shape suffixes: T tokens, C hidden size, H query heads, G key/value heads, X = H + 2 G, D head dimension,
V vocabulary.

Attention is not in here: `attend` is given by the caller, who knows where K/V live and which tokens belong
to which prompt. So the same stack runs prefill chunks and batched decode steps. What stands between the
matrix products is one kernel each (`kernels/layers`), and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ...kernels.layers.norm import LinearInput, add_norm
from ...kernels.layers.rope import HeadNorm, KVRows, rotate_and_store
from ..progress import Tell, silent
from ..settings import ModelSpec, Quantisation
from .config import ModelConfig, ModelError, read_config
from .linear import Fp8Linear, Linear
from .rope import Rope
from .store import adapter_directory, model_directory
from .weights import AttentionWeights, StackWeights, read_stack

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(absolute layer, q_THD, k_TGD, v_TGD) -> out_THD. q and k are rotated (and normalised where the
model does so); the caller stores k and v before or while it attends."""

AttendStored = Callable[[int, torch.Tensor], torch.Tensor]
"""attend(absolute layer, q_THD) -> out_THD, where K and V have been written to where they are kept."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, as `rope.py` lays them out."""


@dataclass
class Stream:
    """The residual stream between two products: hidden_TC, and what is still to be added to it. The next
    norm does that on its way."""

    hidden_TC: torch.Tensor
    update_TC: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """hidden_TC with everything added."""
        return self.hidden_TC if self.update_TC is None else self.hidden_TC + self.update_TC

    def rows_from(self, first: int) -> Stream:
        """Its tokens from number `first` on."""
        update_TC = None if self.update_TC is None else self.update_TC[first:]
        return Stream(self.hidden_TC[first:], update_TC)


class LayerStack:
    """The attention of layers `layers` of a model, the feed-forward networks of layers `feeds`, and the
    embedding or the head where it has those ends.

    feeds: the same layers, unless told otherwise. It may begin with the layer before the first, whose
    attention another stack computes, and may leave out the last one.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        weights: StackWeights,
        dtype: torch.dtype,
        device: torch.device | str,
        feeds: range | None = None,
    ) -> None:
        feeds = layers if feeds is None else feeds
        if layers.step != 1 or not layers or layers.start < 0 or layers.stop > config.layers:
            raise ModelError(f"layers {layers} are not a contiguous part of the model's {config.layers}")
        before, after = layers.start - feeds.start, layers.stop - feeds.stop
        if feeds.step != 1 or feeds.start < 0 or before not in (0, 1) or after not in (0, 1):
            raise ModelError(f"feed-forward networks {feeds} do not go with the attention of layers {layers}")
        self.config = config
        self.layers = layers
        self.feeds = feeds
        self.dtype = dtype
        self.device = torch.device(device)
        self._weights = weights
        self._rope = Rope(config.rope, config.head_dim, self.device)

    @property
    def has_head(self) -> bool:
        return self._weights.head is not None

    @property
    def quantised(self) -> bool:
        """Whether its layers multiply in 8 bits."""
        return self._weights.attentions[0].qkv.quantised

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """hidden_TC of token ids (any integer dtype). Ids must be in range: CUDA cannot report it here."""
        if self._weights.embedding_VC is None:
            raise ModelError("this stack has no embedding: only the first stage embeds tokens")
        return F.embedding(ids_T.to(self.device, torch.int64), self._weights.embedding_VC)

    def forward(
        self,
        hidden_TC: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        layers: range | None = None,
    ) -> torch.Tensor:
        """hidden_TC after this stack's layers, or some of them. positions_T: absolute position of each row,
        in any order.
        """
        rows_T = torch.arange(hidden_TC.shape[0], device=self.device)
        shape = (hidden_TC.shape[0], self.config.kv_heads, self.config.head_dim)
        fresh: list[KVRows] = []

        def keep(_layer: int) -> KVRows:
            k_TGD, v_TGD = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in "kv")
            fresh[:] = [KVRows(k_TGD, v_TGD, rows_T)]
            return fresh[0]

        def attend_stored(layer: int, q_THD: torch.Tensor) -> torch.Tensor:
            return attend(layer, q_THD, fresh[0].k_RGD, fresh[0].v_RGD)

        return self.forward_stored(hidden_TC, positions_T, keep, attend_stored, layers)

    def forward_stored(
        self,
        hidden_TC: torch.Tensor,
        positions_T: torch.Tensor,
        keep: Callable[[int], KVRows],
        attend: AttendStored,
        layers: range | None = None,
    ) -> torch.Tensor:
        """As `forward`, with each layer's K and V written to where `keep` says before it attends.

        A prefill stage takes the same steps one by one, since it does more between them.
        """
        angles, stream = self.angles(positions_T), Stream(hidden_TC)
        layers = self.layers if layers is None else layers
        if layers.start == self.layers.start:
            self.feed_forward(layers.start - 1, stream)
        for layer in layers:
            q_THD = self.rotate(layer, self.project(layer, stream), angles, keep(layer))
            self.add_attention(layer, stream, attend(layer, q_THD))
            self.feed_forward(layer, stream)
        return stream.total()

    def angles(self, positions_T: torch.Tensor) -> Angles:
        """What `rotate` needs, for all layers alike."""
        return self._rope.angles(positions_T.to(self.device))

    def project(self, layer: int, stream: Stream) -> torch.Tensor:
        """qkv_TXD: query, key and value heads, not rotated yet."""
        weights = self._attention(layer)
        qkv_TO = weights.qkv(self._norm(stream, weights.input_norm_C, weights.qkv))
        heads = self.config.q_heads + 2 * self.config.kv_heads
        return qkv_TO.view(-1, heads, self.config.head_dim)

    def rotate(self, layer: int, qkv_TXD: torch.Tensor, angles: Angles, kv: KVRows) -> torch.Tensor:
        """q_THD at its positions, normed where the model does so; k and v are written to `kv`. qkv is used
        up."""
        weight_JD = self._attention(layer).qk_norm_JD
        norm = None if weight_JD is None else HeadNorm(weight_JD, self.config.rms_eps)
        return rotate_and_store(qkv_TXD, *angles, norm, kv)

    def add_attention(self, layer: int, stream: Stream, out_THD: torch.Tensor) -> None:
        """Add what attention found to the stream."""
        stream.hidden_TC = stream.total()
        stream.update_TC = self._attention(layer).output(out_THD.flatten(1))

    def output_weight(self, layer: int) -> torch.Tensor:
        """weight_CO of the projection of what attention found, heads side by side."""
        return self._attention(layer).output.weight_OI

    def feed_forward(self, layer: int, stream: Stream) -> None:
        """Add the layer's feed-forward network of the stream to it; nothing where another stack does that."""
        if layer not in self.feeds:
            return
        weights = self._weights.feeds[layer - self.feeds.start]
        normed = self._norm(stream, weights.post_norm_C, weights.gate_up)
        stream.update_TC = weights.down(weights.gate_up.gated(normed))

    def meet_products(self) -> None:
        """Compile what products of many rows take, whichever numbers of rows it is that take it."""
        attention = self._weights.attentions[0]
        products = [attention.qkv, attention.output]
        if self._weights.feeds:
            products += [self._weights.feeds[0].gate_up, self._weights.feeds[0].down]
        for product in products:
            product.meet()

    def logits(self, hidden_TC: torch.Tensor) -> torch.Tensor:
        """Next-token logits_TV, float32: pass only the rows that are sampled from."""
        if self._weights.head is None or self._weights.final_norm_C is None:
            raise ModelError("this stack has no LM head: only the last stage gives logits")
        head = self._weights.head
        return head(self._norm(Stream(hidden_TC), self._weights.final_norm_C, head)).float()

    def _attention(self, layer: int) -> AttentionWeights:
        return self._weights.attentions[layer - self.layers.start]

    def _norm(self, stream: Stream, weight_C: torch.Tensor, taker: Linear | Fp8Linear) -> LinearInput:
        """The norm of the whole stream, as `taker` takes it; the stream has nothing left to be added then."""
        eps = self.config.rms_eps
        sum_TC, normed = add_norm(stream.hidden_TC, stream.update_TC, weight_C, eps, taker.quantised)
        stream.hidden_TC, stream.update_TC = sum_TC, None
        return normed


def load_stack(
    directory: str | Path,
    config: ModelConfig,
    layers: range,
    *,
    feeds: range | None = None,
    embedding: bool,
    head: bool,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: str | Path | None = None,
    quantisation: Quantisation | None = None,
    tell: Tell = silent,
) -> LayerStack:
    """Load a part of a model directory; see `read_stack` for what is read and what is refused."""
    target = torch.device(device)
    weights = read_stack(
        directory,
        config,
        layers,
        feeds=feeds,
        embedding=embedding,
        head=head,
        dtype=dtype,
        device=target,
        adapter=adapter,
        quantisation=quantisation,
        tell=tell,
    )
    return LayerStack(config, layers, weights, dtype, target, feeds)


def load_model(
    model: ModelSpec, device: torch.device | str, stage: int = 0, stages: int = 1, tell: Tell = silent
) -> LayerStack:
    """The share of one of `stages` stages of a model: all of it, unless told otherwise. tell: of progress.

    Raises ModelError for a model that cannot be loaded, split or quantised so, ValueError for an unknown
    dtype.
    """
    _check_quantisation(model, torch.device(device))
    directory = model_directory(model.path)
    config = read_config(directory, model.overrides)
    share = config.split(stages)[stage]
    return load_stack(
        directory,
        config,
        share.layers,
        feeds=share.feeds,
        embedding=stage == 0,
        head=stage == stages - 1,
        dtype=torch_dtype(model),
        device=device,
        adapter=None if model.adapter is None else adapter_directory(model.adapter),
        quantisation=model.quantisation,
        tell=tell,
    )


def _check_quantisation(model: ModelSpec, device: torch.device) -> None:
    """Raises ModelError where there is no matrix unit for it."""
    kind = model.quantisation
    if kind is None:
        return
    if device.type != "cuda":
        raise ModelError(f"model.quantisation: {kind} needs a GPU, not {device.type}")
    if torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ModelError(f"model.quantisation: {kind} needs a GPU that multiplies 8-bit floats, not {name}")


def torch_dtype(model: ModelSpec) -> torch.dtype:
    """Raises ValueError for a name that is none of the dtypes we compute in."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if model.dtype not in known:
        raise ValueError(f"model dtype {model.dtype!r} is unknown; known: {', '.join(known)}")
    return known[model.dtype]
