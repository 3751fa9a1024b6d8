"""Loads a stage's share of the weights, fused into few matrices. Shape suffixes also: J = H + G.

A tensor-parallel rank of a decode worker has a part of each matrix (Megatron-LM, Shoeybi et al. 2019, section
3): its heads' rows of q, k and v, its rows of gate and up, the matching columns of the output and down
projections, and its rows of the output head.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from deltafront.kernels.gated_delta.parameters import DeltaParameters
from deltafront.workers.model.directory.layer_config import CHOICE_BIAS, LinearConfig
from deltafront.workers.model.directory.model_config import (
    EMBEDDING,
    HEAD,
    LINEAR,
    SHARED,
    SHARED_GATE,
    XIELU,
    ModelConfig,
)
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.layer_shares import LayerShare
from deltafront.workers.model.weights.layer_weights import (
    AttentionWeights,
    GatedDeltaWeights,
    LayerNorm,
    MlpWeights,
    Norm,
    Xielu,
    tanh_gelu,
)
from deltafront.workers.model.weights.lora import LoraAdapter
from deltafront.workers.model.weights.mixture_weights import MixtureWeights
from deltafront.workers.model.weights.projections import Activation, Fp8Linear, Linear
from deltafront.workers.model.weights.sources import WeightSource, open_weights
from deltafront.workers.model.weights.uploads import THREADS, Uploads, in_threads
from deltafront.workers.progress import Tell, silent
from deltafront.workers.settings import Quantisation

log = logging.getLogger(__name__)

_TOLD_LAYERS = 8

GATE = "gate_proj"
"""The gate of attention in module `self_attn`. Some checkpoints store it in q_proj."""

_ATTENTION = ("input_layernorm.", "self_attn.", f"{LINEAR}.")
_MLP = ("post_attention_layernorm.", "mlp.")
_FUSED_Q_GATE = ".self_attn.q_proj.weight", f".self_attn.{GATE}.weight"
_ROTATED = ("q_proj", "k_proj", "qkv_proj", "q_norm", "k_norm")
_BY_HEADS = "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", GATE


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """The part of a model that a stage or rank loads.

    Args:
        layers, mlps: The layers whose attention, and those whose MLP, is computed (None: the same layers).
        embedding, head: True if this part has the embedding and the output head.
        adapter: The directory of a LoRA adapter.
        quantisation: The format of the layers' matrices; None: `dtype`.
        rank, ranks: The tensor-parallel rank and the number of ranks.
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
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        self.config.of_rank(self.ranks)  # raises ModelError

    @property
    def share(self) -> LayerShare:
        return LayerShare(self.layers, self.layers if self.mlps is None else self.mlps)


@dataclass(frozen=True)
class StackWeights:
    """The weights of a `LayerStack`. A tied embedding and output head are one tensor."""

    attentions: tuple[AttentionWeights | GatedDeltaWeights, ...]
    mlps: tuple[MlpWeights | MixtureWeights, ...]
    embedding_VC: torch.Tensor | None
    final_norm: Norm | None
    head: Linear | None


Half = TypeVar("Half", AttentionWeights | GatedDeltaWeights, MlpWeights | MixtureWeights)


class _Reader:
    """Reads a stage's tensors. Several threads may use it at once."""

    def __init__(self, source: WeightSource, spec: StackSpec) -> None:
        self.source, self.spec = source, spec
        self._adapter = None if spec.adapter is None else LoraAdapter(spec.adapter, spec.config)
        self._uploads = Uploads(spec.device)
        self._shapes = spec.config.shapes()
        self._shapes.setdefault(HEAD, self._shapes[EMBEDDING])
        self._channels_D = rotary_order(spec.config)

    def get(self, *names: str, split: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return tensors, concatenated by rows. If `split` is given, take this rank's part of each along that
        dimension.

        On a CPU, a single tensor shares the file's memory if it already has the dtype. `dtype` None means the
        stack's.
        """
        dtype = dtype or self.spec.dtype
        fused = split is not None and self.spec.ranks > 1
        tensors = [part for name in names for part in (self._parts(name) if fused else (self._read(name),))]
        parts = [self.part(tensor, split) for tensor in tensors]
        if self.spec.device.type == "cpu" and len(parts) == 1:
            return parts[0].to(dtype)
        rows, columns = [len(part) for part in parts], parts[0].shape[1:]
        whole = torch.empty((sum(rows), *columns), dtype=dtype, device=self.spec.device)
        for part, target in zip(parts, torch.split(whole, rows), strict=True):
            self._uploads.copy(part, target)
        return whole

    def input_norm(self, module: str) -> Norm | None:
        """Return the norm before attention, an MLP or the output head; None if the family has none there."""
        weight_C, bias = self.norm(module), f"{module}.bias"
        if weight_C is None or not self.spec.config.layer_norms:
            return weight_C
        bias_C = self.get(bias) if bias in self._shapes else None
        return LayerNorm(weight_C.to(self.spec.dtype), bias_C)

    def norm(self, module: str) -> torch.Tensor | None:
        return self.norm_weight(f"{module}.weight") if f"{module}.weight" in self._shapes else None

    def norm_weight(self, name: str, split: int | None = None) -> torch.Tensor:
        """Return a norm's weights, with the family's offset added. The sum is float32, since 16 bits would
        round it."""
        if not (offset := self.spec.config.norm_offset):
            return self.get(name, split=split)
        return self.part(self._read(name).float() + offset, split).to(self.spec.device)

    def number(self, name: str) -> torch.Tensor:
        return self._read(name).to(self.spec.device, torch.float32)

    def _parts(self, name: str) -> Sequence[torch.Tensor]:
        tensor, config, module = self._read(name), self.spec.config, name.split(".")[-2]
        if module == "gate_up_proj":
            return tensor.chunk(2)
        if config.linear is not None and module in config.linear.sections:
            return torch.split(tensor, list(config.linear.sections[module]))
        if module != "qkv_proj":
            return (tensor,)
        rows = [heads * config.head_dim for heads in (config.q_heads, config.kv_heads, config.kv_heads)]
        return torch.split(tensor, rows)

    def part(self, tensor: torch.Tensor, split: int | None) -> torch.Tensor:
        """Return this rank's part of a tensor along dimension `split`. If it does not divide evenly, the last
        parts are padded with zeros."""
        ranks = self.spec.ranks
        if split is None or ranks == 1:
            return tensor
        size = -(-tensor.shape[split] // ranks)
        part = tensor.tensor_split([size * n for n in range(1, ranks)], split)[self.spec.rank]
        missing = size - part.shape[split]
        if not missing:
            return part
        rest = part.new_zeros([missing if dim == split else n for dim, n in enumerate(part.shape)])
        return torch.cat([part, rest], split)

    def linear(self, *modules: str, split: int) -> Linear:
        """Return modules with the same inputs as one linear layer.

        With split 0, each rank computes a part of the outputs. With split 1, each rank has a part of the
        inputs, and only rank 0 adds the bias.
        """
        weight_OI = self.get(*(f"{module}.weight" for module in modules), split=split)
        biases = [f"{module}.bias" for module in modules]
        if biases[0] not in self._shapes:
            return Linear(weight_OI)
        bias_O = self.get(*biases, split=None if split else 0)
        return Linear(weight_OI, None if split and self.spec.rank else bias_O)

    def _read(self, name: str) -> torch.Tensor:
        if self.spec.config.fused_q_gate and name.endswith(_FUSED_Q_GATE):
            return self._q_or_gate(name)
        return self._arranged(name, self._stored(name))

    def _q_or_gate(self, name: str) -> torch.Tensor:
        """Return the rows of q or of its gate. A checkpoint has them in one matrix, by heads."""
        gates = name.endswith(_FUSED_Q_GATE[1])
        fused = self._stored(name.replace(GATE, "q_proj"))
        by_heads = fused.view(self.spec.config.q_heads, 2, self.spec.config.head_dim, -1)
        return self._arranged(name, by_heads[:, int(gates)].flatten(0, 1))

    def _stored(self, name: str) -> torch.Tensor:
        if name not in self.source.names():
            raise ModelError(f"the weights have no tensor {name!r}: they do not belong to this config.json")
        tensor, shape = self.source.read(name), self._shapes[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} is {tuple(tensor.shape)}, config.json says {shape}")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(f"tensor {name!r} is {tensor.dtype}: quantised safetensors are not supported")
        return tensor if self._adapter is None else self._adapter.merge(name, tensor)

    def _arranged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the channels of q's and k's heads as the RoPE kernel expects (`rotary_order`), and the rows
        of linear attention's fused matrices; pad heads. This does not change scores."""
        module, config = name.split(".")[-2], self.spec.config
        if config.head_padding and f"self_attn.{module}." in name and module in _BY_HEADS:
            tensor = self._padded(tensor, dim=1 if module == "o_proj" else 0)
        if config.linear is not None and module in ("in_proj_qkvz", "in_proj_ba"):
            return tensor[torch.tensor(config.linear.rows_by_kind(module))]
        if self._channels_D is None or module not in _ROTATED:
            return tensor
        heads = tensor.view(-1, config.head_dim, *tensor.shape[1:])
        turned = config.q_heads + config.kv_heads if module == "qkv_proj" else len(heads)
        return torch.cat([heads[:turned, self._channels_D], heads[turned:]]).view(tensor.shape)

    def _padded(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Append `head_padding` zero channels to each head along `dim`. A bias of o_proj has no heads."""
        if dim == tensor.dim():
            return tensor
        config, shape = self.spec.config, tensor.shape
        heads = tensor.reshape(*shape[:dim], -1, config.as_stored.head_dim, *shape[dim + 1 :])
        zeros = (0, 0) * (tensor.dim() - 1 - dim) + (0, config.head_padding)
        return F.pad(heads, zeros).flatten(dim, dim + 1)

    def quantised(self, half: Half) -> Half:
        """Quantise the matrices of attention or MLP to FP8 if the stack is quantised. Only one thread may
        call this, because it launches kernels."""
        if self.spec.quantisation is None:
            return half
        matrices: dict[str, Any] = {
            name: Fp8Linear.of(weight) for name, weight in vars(half).items() if isinstance(weight, Linear)
        }
        return replace(half, **matrices)

    def refuse_left_over(self, prefix: str, elsewhere: tuple[str, ...]) -> None:
        """Raise ModelError if a layer has tensors that the decoder does not use, since ignoring a bias would
        change the model.

        Another stage loads the tensors whose names begin with one of `elsewhere`.
        """
        left = {name for name in self.source.names() if name.startswith(prefix)} - self._shapes.keys()
        left = {name for name in left if not name.removeprefix(prefix).startswith(elsewhere)}
        left -= {f"{prefix}self_attn.rotary_emb.inv_freq"}  # in old checkpoints; follows from config.json
        if left:
            raise ModelError(f"the decoder has no place for tensors {', '.join(sorted(left))}")

    def require_no_more_than(self, layers: int) -> None:
        matches = (re.match(r"model\.layers\.(\d+)\.", name) for name in self.source.names())
        last = max((int(match[1]) for match in matches if match), default=0)
        if last >= layers:
            raise ModelError(f"the weights have a layer {last}, but config.json says {layers} layers")


def rotary_order(config: ModelConfig) -> torch.Tensor | None:
    """Return the order of a head's channels in which channel f is rotated with channel f + D/2; None: as
    stored.

    Channels without rotation come last in each half. With D = 4 and interleaved RoPE the order is
    [0, 2, 1, 3]. With D = 8 and rotary_dim 4 it is [0, 1, 4, 5, 2, 3, 6, 7].
    """
    dim, turned = config.head_dim, config.rotary_dim or config.head_dim
    if turned == dim and not config.interleaved_rope:
        return None
    rotated, still = torch.arange(turned), torch.arange(turned, dim)
    first, second = (rotated[::2], rotated[1::2]) if config.interleaved_rope else rotated.chunk(2)
    before, after = torch.split(still, [(dim - turned) // 2] * 2)
    return torch.cat([first, before, second, after])


def read_stack(directory: str | Path, spec: StackSpec, tell: Tell = silent) -> StackWeights:
    """Load a stack's weights: read tensors, merge the adapter in float32, cast, copy to the device and
    quantise.

    Raises:
        ModelError: Weights are missing, superfluous, misshapen or quantised, or the adapter does not fit.
    """
    read = _Reader(open_weights(directory), spec)
    read.require_no_more_than(spec.config.layers)
    embedding_VC, head_VC = _read_ends(read)
    attentions, mlps = _read_layers(read, tell)
    return StackWeights(
        attentions=attentions,
        mlps=mlps,
        embedding_VC=embedding_VC,
        final_norm=read.input_norm("model.norm") if spec.head else None,
        head=None if head_VC is None else Linear(head_VC),
    )


def _read_ends(read: _Reader) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Read embedding and output head. As in transformers 5, one of two tied tensors may be missing, and
    tensors that differ are not tied."""
    spec, names = read.spec, read.source.names()
    tied = spec.config.tied_embeddings and (not {EMBEDDING, HEAD} <= names or _tables_are_equal(read))
    embedding, head = EMBEDDING, HEAD
    if tied:
        embedding = head = EMBEDDING if EMBEDDING in names else HEAD
    embedding_VC = read.get(embedding) if spec.embedding else None
    if tied and embedding_VC is not None:
        return embedding_VC, read.part(embedding_VC, 0) if spec.head else None
    return embedding_VC, read.get(head, split=0) if spec.head else None


def _tables_are_equal(read: _Reader) -> bool:
    if not (read.spec.embedding and read.spec.head):
        return False
    equal = torch.equal(read.source.read(EMBEDDING), read.source.read(HEAD))
    if not equal:
        log.warning("tie_word_embeddings is set, but %s differs from the embedding: it is used", HEAD)
    return equal


def _read_layers(
    read: _Reader, tell: Tell
) -> tuple[tuple[AttentionWeights | GatedDeltaWeights, ...], tuple[MlpWeights | MixtureWeights, ...]]:
    share, threads = read.spec.share, 1 if read.spec.device.type == "cpu" else THREADS
    attentions: list[AttentionWeights | GatedDeltaWeights] = []
    mlps: list[MlpWeights | MixtureWeights] = []
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
) -> tuple[AttentionWeights | GatedDeltaWeights | None, MlpWeights | MixtureWeights | None]:
    prefix = f"model.layers.{layer}."
    config = read.spec.config.of_layer(layer)
    attention: AttentionWeights | GatedDeltaWeights | None = None
    if layer in share.layers:
        linear = config.of_linear_layers
        attention = _read_attention(read, prefix) if linear is None else _read_linear(read, prefix, linear)
    read_mlp = _read_mlp if config.mixture is None else _read_mixture
    mlp = read_mlp(read, prefix) if layer in share.mlps else None
    elsewhere = () if attention else _ATTENTION
    read.refuse_left_over(prefix, elsewhere if mlp else (*elsewhere, *_MLP))
    return attention, mlp


def _read_attention(read: _Reader, prefix: str) -> AttentionWeights:
    config, module = read.spec.config.of_rank(read.spec.ranks), f"{prefix}self_attn."
    heads = {"q": config.q_heads, "k": config.kv_heads} if config.qk_norm else {}
    split = 0 if config.qk_norm_all_heads else None
    norms_JD = [
        read.norm_weight(f"{module}{name}_norm.weight", split).view(-1, config.head_dim).expand(count, -1)
        for name, count in heads.items()
    ]
    norm_JD = torch.cat(norms_JD) if norms_JD else None
    q_scale_D = None
    if norm_JD is not None and config.qk_norm_after_rope:
        q_scale_D, norm_JD = norm_JD[0].float() * norm_JD[-1], torch.ones_like(norm_JD)
    return AttentionWeights(
        input_norm=read.input_norm(f"{prefix}input_layernorm"),
        qkv=read.linear(*(f"{module}{name}" for name in config.qkv_modules), split=0),
        qk_norm_JD=norm_JD,
        output=read.linear(f"{module}o_proj", split=1),
        output_norm_C=read.norm(f"{module}post_norm"),
        q_scale_D=q_scale_D,
        gate=read.linear(f"{module}{GATE}", split=0) if config.attention_gate else None,
        sink_H=read.get(f"{module}sinks", split=0) if config.attention_sinks else None,
    )


def _read_linear(read: _Reader, prefix: str, linear: LinearConfig) -> GatedDeltaWeights:
    module = f"{prefix}{LINEAR}."
    projections = [f"{module}{name}" for name in linear.modules]
    gates = 1 if linear.fused else 2
    width = torch.float32
    conv_E1X = read.get(f"{module}conv1d.weight", split=0)
    return GatedDeltaWeights(
        input_norm=read.input_norm(f"{prefix}input_layernorm"),
        qkvz=read.linear(*projections[:-gates], split=0),
        ba_JC=read.get(*(f"{name}.weight" for name in projections[-gates:]), split=0),
        delta=DeltaParameters(
            conv_EX=conv_E1X[:, 0].contiguous(),
            decay_H=-read.get(f"{module}A_log", split=0, dtype=width).exp(),
            bias_H=read.get(f"{module}dt_bias", split=0, dtype=width),
            norm_D=read.get(f"{module}norm.weight", dtype=width),
            eps=read.spec.config.rms_eps,
            key_heads=linear.key_heads // read.spec.ranks,
        ),
        output=read.linear(f"{module}out_proj", split=1),
    )


def _read_mlp(read: _Reader, prefix: str) -> MlpWeights:
    gate_up, down = _read_matrices(read, f"{prefix}mlp")
    return MlpWeights(
        input_norm=read.input_norm(f"{prefix}post_attention_layernorm"),
        gate_up=gate_up,
        down=down,
        output_norm_C=read.norm(f"{prefix}mlp.post_norm"),
        activation=_read_activation(read, f"{prefix}mlp.act_fn"),
    )


def _read_activation(read: _Reader, module: str) -> Activation | None:
    kind = read.spec.config.activation
    if kind == "xielu":
        return Xielu(*(read.number(f"{module}.{name}") for name in XIELU))
    return tanh_gelu if kind == "ungated_gelu" else None


def _read_matrices(read: _Reader, *modules: str) -> tuple[Linear, Linear]:
    """Return gate_up and down of MLPs, concatenated by rows. Each rank has a part of every MLP's columns."""
    gate_up = [f"{module}.{name}" for module in modules for name in read.spec.config.gate_up_modules]
    return read.linear(*gate_up, split=0), read.linear(*(f"{m}.down_proj" for m in modules), split=1)


def _read_mixture(read: _Reader, prefix: str) -> MixtureWeights:
    mixture = read.spec.config.mixture
    assert mixture is not None
    gate_up, down = _read_matrices(read, *(f"{prefix}mlp.experts.{n}" for n in range(mixture.experts)))
    shared = _read_matrices(read, f"{prefix}{SHARED}") if mixture.shared_width else (None, None)
    wide = torch.float32 if mixture.has_bias else None
    config, bias = read.spec.config, f"{prefix}mlp.gate.bias"
    return MixtureWeights(
        config=mixture,
        input_norm_C=read.norm(f"{prefix}post_attention_layernorm"),
        router_EC=read.get(f"{prefix}mlp.gate.weight", dtype=wide),
        gate_up=gate_up,
        down=down,
        output_norm_C=read.norm(f"{prefix}mlp.post_norm"),
        bias_E=read.get(f"{prefix}{CHOICE_BIAS}", dtype=wide).view(-1) if mixture.has_bias else None,
        shared_gate_up=shared[0],
        shared_down=shared[1],
        shared_gate_1C=_read_shared_gate(read, prefix) if mixture.shared_gate else None,
        router_bias_E=read.get(bias, dtype=wide) if config.router_bias else None,
        clamped=config.activation == "clamped_swiglu",
    )


def _read_shared_gate(read: _Reader, prefix: str) -> torch.Tensor:
    """Read the shared expert's gate as a copy: on a CPU, the rounding of a GEMM with one row depends on the
    row's address."""
    return read.get(f"{prefix}{SHARED_GATE}.weight").clone()
