"""Plans prefill stages, tensor-parallel decode ranks and KV cache sizes for a model on one host's GPUs.
Memory is counted as in `size`."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltafront.service.cli.size import (
    DTYPE_BYTES,
    GIB,
    RESERVE_GIB,
    STAGE_STATES,
    brought_back_bytes,
    host_tokens,
    kv_bytes,
    rank_bytes,
    rank_counts,
    stage_bytes,
    state_slots,
    state_spacing,
    with_rolling_buffers,
)
from deltafront.service.config import RECOMPUTED
from deltafront.service.settings import DoorConfig
from deltafront.workers.kv.pages.host_states import state_share
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.messages.requests import recompute_pages
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.rope_config import proposed_yarn
from deltafront.workers.settings import Dtype, KVDtype, Quantisation

MOST_GPUS = 16
"""The most GPUs of a host."""
_LEAST_TOKENS = 256
"""The smallest KV cache in tokens, which `decode.warm_up` needs."""
_CHUNK_TOKENS = 8_192
_APPEND_CHUNK_TOKENS = 512
_DENSE_TOKENS = 20_480
"""Prompts of at most this many tokens are prefilled densely: with recomputed blocks `dpxa` would be slower
(docs/decisions/0053)."""
_THREADS = 4
_CPUS = 1
_TILE_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The requirements of a plan. Each of the host's GPUs has `gpu_gib`.

    Attributes:
        quantisations: Weight formats to choose from, the best first.
        kv_dtype: The requested format of the KV cache.
        stages, ranks: Required numbers; None: any.
    """

    model: ModelConfig
    gpus: int
    gpu_gib: float
    tokens: int
    concurrency: int = 1
    dtype: Dtype = "bfloat16"
    quantisations: Sequence[Quantisation | None] = (None, "fp8")
    kv_dtype: KVDtype | None = None
    stages: int | None = None
    ranks: int | None = None
    reserve_gib: float = RESERVE_GIB
    host_cache_gib: float = 0.0
    recompute_blocks: int = RECOMPUTED

    @property
    def room(self) -> int:
        """Bytes of GPU memory that one process may fill."""
        return int((self.gpu_gib - self.reserve_gib) * GIB)


@dataclass(frozen=True)
class HostUse:
    """The assignment of GPUs to prefill stages and to the decode worker's ranks. beside: ranks share the
    stages' GPUs; otherwise they have separate GPUs."""

    quantisation: Quantisation | None
    stages: int
    ranks: int
    beside: bool

    @property
    def mapped(self) -> bool:
        """True if the only stage maps weights and KV cache of the one-rank decode worker on its GPU, instead
        of allocating its own."""
        return self.beside and self.stages == self.ranks == 1


@dataclass(frozen=True)
class HostPlan:
    """A `HostUse` with sizes.

    Attributes:
        prefill_tokens, decode_tokens: The settings `prefill.cache_tokens` and `decode.cache_tokens`.
        stage_bytes, rank_bytes: Bytes of one stage and one rank on its GPU, with weights and KV cache, but
            without memory that the stage maps from the decode worker.
        state_slots: decode.state_slots.
    """

    use: HostUse
    tokens: int
    prefill_tokens: int
    decode_tokens: int
    stage_bytes: int
    rank_bytes: int
    state_slots: int


def uses(demand: Demand) -> Iterator[HostUse]:
    """Yield the possible assignments of GPUs, the best first: the best weight format, then more stages (for a
    lower TTFT), then more ranks, or fewer if layers have states.

    Ranks have separate GPUs if there are enough for both.
    """
    most = min(demand.gpus, demand.model.layers)
    counts = [
        n for n in range(most, 0, -1) if demand.stages in (None, n) and _all_have_pages(demand.model, n)
    ]
    cuts = [n for n in rank_counts(demand.model) if demand.ranks in (None, n) and n <= demand.gpus]
    if not demand.model.state_layers:  # nobody has measured several ranks with states: one comes first
        cuts.reverse()
    for kind, stages, ranks in itertools.product(demand.quantisations, counts, cuts):
        if kind is None or not any(width % 16 for width in demand.model.matrix_widths(ranks)):
            yield HostUse(kind, stages, ranks, beside=stages + ranks > demand.gpus)


def _all_have_pages(model: ModelConfig, stages: int) -> bool:
    """Return whether each stage has a layer with pages."""
    return all(model.page_layers(share.layers) for share in model.split(stages))


def rolling(demand: Demand) -> Demand:
    """Return the demand with rolling buffers, if the model can have them and several ranks are not better."""
    model = with_rolling_buffers(demand.model)
    if model is demand.model or demand.ranks not in (None, 1):
        return demand
    without, wanted = best(demand), replace(demand, model=model)
    if without is not None:
        return demand if without.use.ranks > 1 else wanted
    lengths = [0 if (found := longest(one)) is None else found.tokens for one in (demand, wanted)]
    return wanted if lengths[1] > lengths[0] else demand


def best(demand: Demand) -> HostPlan | None:
    """Plan the first of `uses` that fits, with KV cache for two contexts if both stages and decode workers
    can hold them, else for one.
    """
    plans = (plan(demand, use, held) for use in uses(demand) for held in (2, 1))
    return next((found for found in plans if found is not None), None)


def plan(demand: Demand, use: HostUse, prompts: int) -> HostPlan | None:
    """Size the stages' KV cache for `prompts` contexts, and the decode worker's KV cache to fill its GPUs.
    Returns None if something does not fit.
    """
    context = cache_tokens(demand.tokens)
    how = demand.dtype, use.quantisation, demand.kv_dtype
    stage = _stage_bytes(demand, use, prompts * context)
    weights = rank_bytes(demand.model, use.ranks, 0, *how)
    page = rank_bytes(demand.model, use.ranks, PAGE_TOKENS, *how) - weights
    left = demand.room - weights
    if use.beside:
        left += demand.room - stage - int(demand.gpu_gib * GIB)
    part = demand.model.of_rank(use.ranks)
    slots = state_slots(part, demand.dtype, left, demand.concurrency)
    weights += (states := slots * part.state_bytes(range(part.layers), DTYPE_BYTES[demand.dtype]))
    left -= states
    pages = max(left, 0) // page
    held = max(prompts, demand.concurrency) * (context + recomputed_tokens(demand))
    if stage > demand.room or pages * PAGE_TOKENS < held:
        return None
    tokens = pages * PAGE_TOKENS
    prefill_tokens = tokens if use.mapped else prompts * context
    return HostPlan(use, demand.tokens, prefill_tokens, tokens, stage, weights + pages * page, slots)


def _stage_bytes(demand: Demand, use: HostUse, cache_tokens: int) -> int:
    if use.mapped:
        brought_back = brought_back_bytes(demand.model, cache_tokens, demand.dtype, demand.kv_dtype)
        return brought_back + STAGE_STATES * _state_bytes(demand)
    how = demand.dtype, use.quantisation, demand.kv_dtype
    return stage_bytes(demand.model, use.stages, cache_tokens, *how)


def _state_bytes(demand: Demand) -> int:
    return demand.model.state_bytes(range(demand.model.layers), DTYPE_BYTES[demand.dtype])


def longest(demand: Demand) -> HostPlan | None:
    """Return the plan for the longest context that fits, up to `demand.tokens`; None if not even one page
    fits."""
    held: HostPlan | None = None
    low, high = 0, pages_for(demand.tokens)
    while low < high:
        pages = (low + high + 1) // 2
        found = best(replace(demand, tokens=pages * PAGE_TOKENS))
        held = found or held
        low, high = (pages, high) if found else (low, pages - 1)
    return held


def gpus_needed(demand: Demand) -> int | None:
    """Return the fewest GPUs with `demand.gpu_gib` each on one host; None if MOST_GPUS are not enough."""
    counts = range(1, MOST_GPUS + 1)
    return next((count for count in counts if best(replace(demand, gpus=count))), None)


def kept_gib(demand: Demand, found: HostPlan) -> float:
    """Return the size in GiB of the decode worker's KV cache and states, summed over its ranks."""
    return (_token_bytes(demand) * found.decode_tokens + found.state_slots * _state_bytes(demand)) / GIB


def _token_bytes(demand: Demand) -> int:
    return kv_bytes(demand.model, demand.model.kv_layers, demand.dtype, demand.kv_dtype)


def cache_tokens(tokens: int) -> int:
    """Round a cache size up to full pages, and to the minimum of warm-up."""
    return max(pages_for(tokens) * PAGE_TOKENS, _LEAST_TOKENS)


def recomputed_tokens(demand: Demand) -> int:
    """Return the cache tokens needed for the recomputed blocks of a sparse prompt."""
    blocks = 0 if demand.model.state_layers else demand.recompute_blocks
    return PAGE_TOKENS * recompute_pages(blocks, demand.tokens, appended=False)


def missing_bytes(demand: Demand) -> int:
    """Return the bytes that the fullest GPU lacks in the `HostUse` closest to fitting; 0 if a `HostUse`
    fits."""
    return min((max(_excess(demand, use), 0) for use in uses(demand)), default=0)


def _excess(demand: Demand, use: HostUse) -> int:
    context, how = cache_tokens(demand.tokens), (demand.dtype, use.quantisation, demand.kv_dtype)
    stage = _stage_bytes(demand, use, context) - demand.room
    held = demand.concurrency * (context + recomputed_tokens(demand))
    slots = state_slots(demand.model.of_rank(use.ranks), demand.dtype, 0, demand.concurrency)
    rank = rank_bytes(demand.model, use.ranks, held, *how, slots) - demand.room
    return stage + rank + int(demand.gpu_gib * GIB) if use.beside else max(stage, rank)


def configuration(demand: Demand, found: HostPlan, path: str) -> dict[str, Any]:
    """Make the configuration for `service.config.parse`. path: the model's path."""
    use, stretched = found.use, demand.tokens > demand.model.positions
    chunk = min(_CHUNK_TOKENS, found.prefill_tokens // _TILE_TOKENS * _TILE_TOKENS)
    model: dict[str, Any] = {"path": path, "dtype": demand.dtype}
    model |= {"quantisation": use.quantisation} if use.quantisation else {}
    model |= {"max_position_embeddings": demand.tokens} if stretched else {}
    model |= {"rolling_buffer": True} if demand.model.rolling_buffer else {}
    prefill = {
        "stages": use.stages,
        "chunk_tokens": chunk,
        "cache_tokens": found.prefill_tokens,
        "device": "cuda",
        "threads": _THREADS,
        "cpus_per_stage": _CPUS,
        "gpus_per_stage": 0.5 if use.mapped else 1,
        "warm_up": _warm_up(demand.model),
        "method_options": {"dpxa": {"min_tokens": _DENSE_TOKENS}},
    }
    decode = {
        "tensor_parallel": use.ranks,
        "cache_tokens": found.decode_tokens,
        "append_chunk_tokens": _APPEND_CHUNK_TOKENS,
        **({"kv_dtype": demand.kv_dtype} if demand.kv_dtype else {}),
        **({"host_cache_gib": demand.host_cache_gib} if demand.host_cache_gib else {}),
        **({"state_slots": found.state_slots} if demand.model.state_layers else {}),
        "page_selection": "full",
        "device": "cuda",
        "threads": _THREADS,
        "cpus": _CPUS,
        "gpus": 0.5 if use.mapped else int(not use.beside),
        "warm_up": True,
    }
    transport = "mapped" if use.mapped else "cuda_ipc"
    content = {"model": model, "prefill": prefill, "decode": decode, "handoff": {"transport": transport}}
    spacing = state_spacing(demand.model, demand.dtype, demand.kv_dtype)
    return content | ({"door": {"state_spacing": spacing}} if spacing != DoorConfig.state_spacing else {})


def _warm_up(model: ModelConfig) -> list[Any]:
    if model.linear is not None:
        return ["dense"]
    return ["dense", "dpxa", {"dpxa+delta": {"share": 0.1}}]  # rules by threshold and by share


def explained(demand: Demand, found: HostPlan, host_reason: str = "") -> list[str]:
    """Explain each choice in a line.

    Args:
        host_reason: The reason for the size of the host memory; empty: the user gave it.
    """
    use, context, kept = found.use, cache_tokens(found.tokens), demand.reserve_gib
    stage, rank = (size / GIB for size in (found.stage_bytes, found.rank_bytes))
    weights = rank_bytes(demand.model, use.ranks, 0, demand.dtype, use.quantisation) / GIB
    kind, where, most = f"none: weights fit in {demand.dtype}", "1: ranks have separate GPUs", "or"
    if use.quantisation:
        tried = "they do not fit in 16 bits" if None in demand.quantisations else "as requested"
        kind = f"{use.quantisation}: the layers' matrices in 8 bits, {tried}"
    if use.mapped:
        where = "0.5: the stage has the other half, and maps the decode worker's weights and KV cache"
        kept, most = 2 * kept, "+"
    elif use.beside:
        where = f"0: ranks share the stages' GPUs, which hold {weights:.1f} GiB of weights more for them"
        kept, most = 2 * kept, "+"
    prompts, contexts = (tokens // context for tokens in (found.prefill_tokens, found.decode_tokens))
    host = f"one host, {demand.gpus} × {demand.gpu_gib:.1f} GiB"
    how_many = "fewest" if demand.model.state_layers else "most"
    lines = [
        f"contexts of {found.tokens:,} tokens (prompt and answer); {host}",
        f"model.quantisation {kind}",
        f"prefill.stages {use.stages}: the most that fit, for a fast first token",
        f"prefill.cache_tokens {found.prefill_tokens:,}: {prompts} such prompts at once",
        f"decode.tensor_parallel {use.ranks}: the {how_many} ranks that fit and divide the KV heads",
        f"decode.gpus {where}",
        f"decode.cache_tokens {found.decode_tokens:,}: all remaining memory, {contexts} such contexts",
        f"fullest GPU: {stage:.1f} GiB (stage) {most} {rank:.1f} (rank), and {kept:g} kept free",
    ]
    if demand.model.state_layers:
        size = _state_bytes(demand) / GIB
        lines.append(
            f"decode.state_slots {found.state_slots}: states of {size:.2f} GiB, two for each running request"
        )
    if demand.model.rolling_buffer:
        lines.append("model.rolling_buffer true: layers with windows keep the KV of their window alone")
    if demand.host_cache_gib:
        token = _token_bytes(demand)
        share = state_share(token * found.decode_tokens, found.state_slots * _state_bytes(demand))
        tokens = host_tokens(token, demand.host_cache_gib, share)
        lines.append(
            f"decode.host_cache_gib {demand.host_cache_gib:g}: pinned host memory for {tokens:,} cached "
            "tokens, including those on the GPUs" + (f"; {host_reason}" if host_reason else "")
        )
    elif host_reason:
        lines.append(f"decode.host_cache_gib 0: it would hold no more than the pages; {host_reason}")
    if demand.kv_dtype:
        lines.insert(2, f"decode.kv_dtype {demand.kv_dtype}: KV cache in 8 bits, as requested")
    lines[1:1] = beyond_training(demand.model, demand.tokens)
    return lines


def beyond_training(model: ModelConfig, tokens: int) -> list[str]:
    """Return a list with one warning if contexts are longer than the model's positions; otherwise an empty
    list."""
    if tokens <= model.positions:
        return []
    scaling = proposed_yarn(tokens, model.positions, model.architecture)
    needs = f"such as {scaling}, if its makers' card recommends it" if scaling else "or another rope_theta"
    return [
        f"model.max_position_embeddings {tokens}: the model has {model.positions:,}; for more, serve "
        f"requires YaRN (model.rope_scaling), {needs}; the quality of answers is unknown"
    ]
