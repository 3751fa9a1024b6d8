"""Computes the GPUs and memory that a model needs at given context lengths.

Weights and KV cache are counted as workers allocate them. Everything else is a flat reserve per process.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deltafront.service.config import LEAST_SLOTS
from deltafront.service.settings import DoorConfig
from deltafront.workers.kv.pages.host_states import state_share
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.rope_config import RopeConfig
from deltafront.workers.model.weight_bytes import attention_bytes, final_norm_bytes, mlp_bytes
from deltafront.workers.settings import DecodeConfig, Dtype, KVDtype, Quantisation

GIB = 1 << 30
DTYPE_BYTES: Mapping[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
RESERVE_GIB = 8.0
"""Memory of each process on a GPU besides weights and KV cache: the CUDA context and NCCL (1 GiB), an MLP's
activations of 16,384 tokens (3 GiB for 70B), tile selection (2.9 GiB at 524,288 tokens: docs/performance.md),
CUDA graphs."""
REQUEST_STATES = 2
"""States of a request on a decode worker."""
STAGE_STATES = 8
"""States that a stage holds at once: its open prompts', and those on their way to a decode worker."""
_STATE_SHARE = 0.25
"""The largest share for states of a decode worker's memory for states and pages."""
HOST_SHARE = 0.5
"""The largest share of the free host memory for the prefix cache. The rest is for weights that are being
loaded, Ray's object store (30%) and the processes."""
HOST_PAGES = 2
"""The most host memory for the prefix cache, as a multiple of the GPUs' KV cache. It is pinned at the start,
which takes seconds for tens of GiB."""


_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=32,
    hidden=4096,
    intermediate=14_336,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
    positions=131_072,
    rms_eps=1e-5,
    rope=RopeConfig(500_000.0),
)
_70B = replace(_8B, layers=80, hidden=8192, intermediate=28_672, q_heads=64)
SHAPES: Mapping[str, ModelConfig] = {"8b": _8B, "70b": _70B}
"""Llama 3.1's models. Their names are accepted instead of a model directory."""


@dataclass(frozen=True)
class Sizing:
    """The GPUs that a model needs to prefill contexts one at a time, and to decode `concurrency` of them at
    once.

    Attributes:
        tokens: Tokens of prompt and answer.
        stages: None if no number fits.
        ranks: GPUs of a decode worker (decode.tensor_parallel).
        stage_bytes, decode_bytes: Bytes used on each GPU.
        contexts_per_worker: 0 if its GPUs cannot hold the weights and one context.
        host_cache_gib: Host memory of a decode worker (decode.host_cache_gib); 0: none.
        host_tokens: Tokens whose KV fits into that host memory.
        rolling_buffer: As in `ModelSpec`.
    """

    model: str
    quantisation: Quantisation | None
    kv_dtype: KVDtype | None
    tokens: int
    concurrency: int
    gpu_gib: float
    weight_bytes: int
    kv_token_bytes: int
    pages: int
    kv_bytes: int
    stages: int | None
    stage_bytes: int
    ranks: int
    contexts_per_worker: int
    decode_bytes: int
    host_cache_gib: float
    host_tokens: int
    rolling_buffer: bool

    @property
    def decode_workers(self) -> int | None:
        return -(-self.concurrency // self.contexts_per_worker) if self.contexts_per_worker else None

    @property
    def gpus(self) -> int | None:
        """The total number of GPUs; None if something does not fit."""
        if self.stages is None or self.decode_workers is None:
            return None
        return self.stages + self.decode_workers * self.ranks


def weight_bytes(
    model: ModelConfig,
    layers: range,
    dtype: Dtype,
    quantisation: Quantisation | None,
    *,
    mlps: range | None = None,
    embedding: bool = True,
    head: bool = True,
) -> int:
    """Count the bytes of the attention weights of `layers` and of the MLPs of `mlps`, by default the same
    layers.

    Only the layers' matrices are quantised.
    """
    size, quantised = DTYPE_BYTES[dtype], quantisation is not None
    held = sum(count * attention_bytes(kind, size, quantised) for kind, count in model.kinds(layers))
    kinds = model.kinds(layers if mlps is None else mlps)
    held += sum(count * mlp_bytes(kind, size, quantised) for kind, count in kinds)
    tables = 1 if embedding and head and model.tied_embeddings else embedding + head
    return held + tables * model.vocab * model.hidden * size + head * final_norm_bytes(model, size)


def kv_bytes(model: ModelConfig, layers: int, dtype: Dtype, kv_dtype: KVDtype | None = None) -> int:
    """Count the bytes of one token's K and V. In 8 bits each head's K and V also have a scale byte each."""
    return model.kv_bytes(layers, DTYPE_BYTES[dtype], kv_dtype is not None)


def brought_back_bytes(model: ModelConfig, cache_tokens: int, dtype: Dtype, kv_dtype: KVDtype | None) -> int:
    """Count the bytes of one layer's 8-bit KV cache converted to `dtype`, which a prefill stage needs for
    attention."""
    tokens = pages_for(cache_tokens) * PAGE_TOKENS
    return 0 if kv_dtype is None else tokens * kv_bytes(model, 1, dtype)


def stage_bytes(
    model: ModelConfig,
    stages: int,
    cache_tokens: int,
    dtype: Dtype,
    quantisation: Quantisation | None = None,
    kv_dtype: KVDtype | None = None,
) -> int:
    """Count the bytes of weights, KV cache and states on the fullest stage. Raises ModelError for more stages
    than layers."""
    tokens = pages_for(cache_tokens) * PAGE_TOKENS
    brought_back = brought_back_bytes(model, cache_tokens, dtype, kv_dtype)
    sizes = []
    for stage, share in enumerate(model.split(stages)):
        ends = {"embedding": stage == 0, "head": stage == stages - 1}
        weights = weight_bytes(model, share.layers, dtype, quantisation, mlps=share.mlps, **ends)
        kv = tokens * kv_bytes(model, len(model.page_layers(share.layers)), dtype, kv_dtype)
        states = STAGE_STATES * model.state_bytes(share.layers, DTYPE_BYTES[dtype])
        sizes.append(weights + kv + brought_back + states)
    return max(sizes)


def rank_bytes(
    model: ModelConfig,
    ranks: int,
    cache_tokens: int,
    dtype: Dtype,
    quantisation: Quantisation | None = None,
    kv_dtype: KVDtype | None = None,
    state_slots: int = 0,
) -> int:
    """Count the bytes of weights, KV cache and states on one tensor-parallel rank of a decode worker: its
    part of layers and output head, and the whole embedding. Raises ModelError if the model does not divide
    evenly over the ranks."""
    part, size = model.of_rank(ranks), DTYPE_BYTES[dtype]
    kv = pages_for(cache_tokens) * PAGE_TOKENS * kv_bytes(part, model.kv_layers, dtype, kv_dtype)
    rows = 0 if model.tied_embeddings else -(-model.vocab // ranks)  # a tied head is part of the embedding
    layers = weight_bytes(part, range(model.layers), dtype, quantisation, embedding=False, head=False)
    states = (state_slots + 1) * part.state_bytes(range(model.layers), size)
    ends = (model.vocab + rows) * model.hidden * size + final_norm_bytes(model, size)
    return layers + kv + states + ends


def rank_counts(model: ModelConfig) -> list[int]:
    """List the possible tensor-parallel sizes of a decode worker."""
    keys = () if model.linear is None else (model.linear.key_heads,)
    whole = math.gcd(model.kv_heads, *model.mlp_widths, *keys)
    return [n for n in range(1, whole + 1) if whole % n == 0]


def state_slots(model: ModelConfig, dtype: Dtype, room: int, concurrency: int) -> int:
    """Choose decode.state_slots: the default, or fewer if they would take more than _STATE_SHARE of `room`
    bytes, but enough for `concurrency` requests."""
    size = model.state_bytes(range(model.layers), DTYPE_BYTES[dtype])
    fit = int(_STATE_SHARE * room) // size if size else 0
    return max(LEAST_SLOTS, REQUEST_STATES * concurrency, min(DecodeConfig.state_slots, fit))


def state_spacing(model: ModelConfig, dtype: Dtype, kv_dtype: KVDtype | None) -> int:
    """Choose door.state_spacing: the default, or a multiple of it at which the cached states of a prompt take
    at most _STATE_SHARE of what its pages take."""
    state = model.state_bytes(range(model.layers), DTYPE_BYTES[dtype])
    tokens = state / kv_bytes(model, model.kv_layers, dtype, kv_dtype) / _STATE_SHARE
    return DoorConfig.state_spacing * max(1, math.ceil(tokens / DoorConfig.state_spacing))


def with_rolling_buffers(model: ModelConfig) -> ModelConfig:
    """Return the model with rolling buffers, if it can have them."""
    has_both = 0 < len(model.window_layers) < model.layers
    return replace(model, rolling_buffer=True) if has_both else model


def sizing(
    name: str,
    model: ModelConfig,
    tokens: int,
    concurrency: int,
    gpu_gib: float,
    *,
    dtype: Dtype = "bfloat16",
    quantisation: Quantisation | None = None,
    kv_dtype: KVDtype | None = None,
    stages: int | None = None,
    ranks: int | None = None,
    reserve_gib: float = RESERVE_GIB,
    host_cache_gib: float = 0.0,
) -> Sizing:
    """Find the prefill stages and decode workers for contexts of `tokens` tokens. Windows are counted as
    rolling buffers, if the model fits on a decode worker of one rank.

    Args:
        stages: None: as few as fit.
        ranks: None: the number that needs the fewest GPUs.

    Raises:
        ModelError: There are more stages than layers, or the ranks cannot share the model equally.
        ValueError: A number is not positive or finite, or the quantisation does not go with the dtype.
    """
    check(tokens, concurrency, gpu_gib, reserve_gib, host_cache_gib)
    if quantisation is not None and DTYPE_BYTES[dtype] != 2:
        raise ValueError(f"quantisation {quantisation} goes with a dtype of 16 bits, not {dtype}")
    if ranks in (None, 1) and not model.rolling_buffer:
        how: dict[str, Any] = {"dtype": dtype, "quantisation": quantisation, "kv_dtype": kv_dtype}
        how |= {
            "stages": stages,
            "ranks": ranks,
            "reserve_gib": reserve_gib,
            "host_cache_gib": host_cache_gib,
        }
        rolling = with_rolling_buffers(model)
        if rolling.rolling_buffer:
            found = sizing(name, rolling, tokens, concurrency, gpu_gib, **how)
            if found.contexts_per_worker:
                return found
    room = int((gpu_gib - reserve_gib) * GIB)
    kv_token_bytes = kv_bytes(model, model.kv_layers, dtype, kv_dtype)
    weights = weight_bytes(model, range(model.layers), dtype, quantisation)
    kv = pages_for(tokens) * PAGE_TOKENS * kv_token_bytes
    states = REQUEST_STATES * model.state_bytes(range(model.layers), DTYPE_BYTES[dtype])
    share = state_share(kv, states)
    kv += states
    counts = rank_counts(model) if ranks is None else [ranks]
    empty = {n: rank_bytes(model, n, 0, dtype, quantisation) for n in counts}
    held = {n: min(max(room - empty[n], 0) // (kv // n), concurrency) for n in counts}
    ranks = min(
        (n for n in counts if held[n]), key=lambda n: (-(-concurrency // held[n]) * n, n), default=counts[-1]
    )
    contexts = held[ranks]
    tried = range(1, model.layers + 1) if stages is None else (stages,)
    needs = {count: stage_bytes(model, count, tokens, dtype, quantisation, kv_dtype) for count in tried}
    fewest = next((count for count, need in needs.items() if need <= room), None)
    return Sizing(
        model=name,
        quantisation=quantisation,
        kv_dtype=kv_dtype,
        tokens=tokens,
        concurrency=concurrency,
        gpu_gib=gpu_gib,
        weight_bytes=weights,
        kv_token_bytes=kv_token_bytes,
        pages=pages_for(tokens),
        kv_bytes=kv,
        stages=fewest,
        stage_bytes=needs[fewest] if fewest else min(needs.values()),
        ranks=ranks,
        contexts_per_worker=contexts,
        decode_bytes=empty[ranks] + max(contexts, 1) * (kv // ranks),
        host_cache_gib=host_cache_gib,
        host_tokens=host_tokens(kv_token_bytes, host_cache_gib, share),
        rolling_buffer=model.rolling_buffer,
    )


def host_tokens(kv_token_bytes: int, gib: float, share: float) -> int:
    """Return the tokens whose KV fits into `gib` GiB of host memory, in full pages of all ranks.

    Args:
        kv_token_bytes: Bytes of a token's KV.
        share: The share of this memory that states get.
    """
    return int(gib * (1 - share) * GIB) // (PAGE_TOKENS * kv_token_bytes) * PAGE_TOKENS


def host_gib(free_gib: float, kept_gib: float) -> float:
    """Choose the prefix cache's host memory in GiB: HOST_SHARE of the free memory, at most HOST_PAGES times
    the GPUs' KV cache (`kept_gib`). Host memory also holds a copy of every block cached on the GPUs. So a
    size of at most `kept_gib` is useless, and the result is 0."""
    gib = int(min(HOST_SHARE * free_gib, HOST_PAGES * kept_gib))
    return float(gib) if gib > kept_gib else 0.0


def host_reason(free_gib: float, kept_gib: float) -> str:
    return f"at most {HOST_PAGES} × the GPUs' {kept_gib:.0f} and {HOST_SHARE:.0%} of {free_gib:.0f} free"


def check(
    tokens: int, concurrency: int, gpu_gib: float, reserve_gib: float, host_cache_gib: float = 0.0
) -> None:
    """Check that numbers are finite, and that tokens, concurrency and gpu_gib are positive. Raises
    ValueError."""
    for key, value in (("tokens", tokens), ("concurrency", concurrency), ("gpu_gib", gpu_gib)):
        if value <= 0:
            raise ValueError(f"{key} = {value}: must be above 0")
    if not 0 <= host_cache_gib < math.inf:
        raise ValueError(f"host_cache_gib = {host_cache_gib}: must be finite, and not below 0")
    if not math.isfinite(gpu_gib - reserve_gib):
        raise ValueError(f"gpu_gib = {gpu_gib} and reserve_gib = {reserve_gib}: must be finite")


def row(sized: Sizing) -> dict[str, str]:
    """Return a table row: column → value. Prefill is stages × GiB, decode is workers × ranks × GiB."""
    stage, decode = sized.stage_bytes / GIB, decode_cell(sized)
    workers = sized.decode_workers
    host = f"{sized.host_cache_gib:g} GiB, {sized.host_tokens:,} tokens"
    return {
        "model": named(sized),
        "context": f"{sized.tokens:,}",
        "concurrent contexts": str(sized.concurrency),
        "GPU GiB": f"{sized.gpu_gib:g}",
        "weights GiB": f"{sized.weight_bytes / GIB:.1f}",
        "KV KiB per token": f"{sized.kv_token_bytes / 1024:g}",
        "pages": f"{sized.pages:,}",
        "KV cache GiB": f"{sized.kv_bytes / GIB:.1f}",
        "prefill": f"{sized.stages} × {stage:.1f}" if sized.stages else f"does not fit: {stage:.1f}",
        "decode": f"{workers} × {decode}" if workers else f"does not fit: {decode}",
        "GPUs": "–" if sized.gpus is None else str(sized.gpus),
        **({"host memory per worker": host} if sized.host_cache_gib else {}),
    }


def named(sized: Sizing) -> str:
    """Return a model's name, with its 8-bit formats (weights, KV cache)."""
    parts = [sized.model, sized.quantisation, sized.kv_dtype and f"KV cache {sized.kv_dtype}"]
    return ", ".join(part for part in parts if part)


def decode_cell(sized: Sizing) -> str:
    """Format a worker's memory: ranks × GiB, or GiB for one rank."""
    gib = f"{sized.decode_bytes / GIB:.1f}"
    return gib if sized.ranks == 1 else f"{sized.ranks} × {gib}"
