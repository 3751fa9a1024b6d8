"""Chooses a configuration for `serve` without a file, from this machine's GPUs or CPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deltafront.kernels.constants import DECODE_HEAD_DIMS, PREFILL_HEAD_DIMS
from deltafront.service.cli.planner import (
    Demand,
    HostPlan,
    best,
    configuration,
    gpus_needed,
    kept_gib,
    longest,
    rolling,
    uses,
)
from deltafront.service.cli.size import host_gib, host_reason
from deltafront.service.config import RECOMPUTED, ConfigError
from deltafront.service.local.machine import Gpu, Machine
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.settings import KVDtype, PrefillConfig

CPU_TOKENS = 32_768
"""The longest context on CPUs without --max-model-len."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The flags of `serve` that affect the choice; None: not given."""

    gpus: int | None = None
    device: Literal["cpu", "cuda"] | None = None
    stages: int | None = None
    tensor_parallel: int | None = None
    max_model_len: int | None = None


NO_WISHES = Wishes()


@dataclass(frozen=True)
class Choice:
    """A chosen configuration.

    Attributes:
        content: For `service.config.parse`, without the adapter.
        lines: Two lines to print: the choice, and the contexts that fit.
    """

    content: dict[str, Any]
    lines: tuple[str, str]


def choose(
    model: ModelConfig, path: str, machine: Machine, wishes: Wishes, blocks: int = RECOMPUTED
) -> Choice:
    """Choose how to serve a model on this machine.

    Args:
        model: The configuration in the model's directory.
        path: The model's directory, file or hub id, for the configuration.
        blocks: Recomputed blocks of a sparse prompt, which need pages of their own.

    Raises:
        ConfigError: The machine has fewer GPUs than requested, or the model does not fit them.
    """
    _check_numbers(wishes)
    dims = sorted(set(PREFILL_HEAD_DIMS) & set(DECODE_HEAD_DIMS))
    if model.head_dim not in dims:
        taken = ", ".join(map(str, dims))
        why = f"GPUs take heads of {taken} channels, this model's have {model.head_dim}"
        machine = replace(machine, gpus=(), no_gpu=machine.no_gpu or why)
    gpus = _used_gpus(machine, wishes)
    if not gpus:
        return _on_cpu(model, path, machine, wishes)
    return _on_gpus(model, path, machine, gpus, wishes, blocks)


def _check_numbers(wishes: Wishes) -> None:
    least = {"gpus": 0, "stages": 1, "tensor_parallel": 1, "max_model_len": 1}
    for name, bound in least.items():
        value = getattr(wishes, name)
        if value is not None and value < bound:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {bound}")


def _used_gpus(machine: Machine, wishes: Wishes) -> Sequence[Gpu]:
    if wishes.device == "cpu" or wishes.gpus == 0:
        return ()
    if machine.no_gpu and (wishes.device or wishes.gpus):
        raise ConfigError(f"no GPU can be used: {machine.no_gpu}; --device cpu serves on the CPUs")
    if wishes.gpus is not None and wishes.gpus > len(machine.gpus):
        raise ConfigError(f"--gpus {wishes.gpus}: this machine has {len(machine.gpus)}")
    return machine.gpus[: wishes.gpus]


def _on_cpu(model: ModelConfig, path: str, machine: Machine, wishes: Wishes) -> Choice:
    tokens = wishes.max_model_len or min(model.positions, CPU_TOKENS)
    room = max(pages_for(tokens) * PAGE_TOKENS, PrefillConfig.chunk_tokens)
    prefill = {"cache_tokens": room} | _given(stages=wishes.stages)
    decode = {"page_selection": "full", "cache_tokens": 2 * room}
    decode |= _given(tensor_parallel=wishes.tensor_parallel)
    content = {
        "model": {"path": path, "max_position_embeddings": tokens},
        "prefill": prefill,
        "decode": decode,
    }
    why = "as requested" if machine.gpus else machine.no_gpu
    return Choice(content, (f"CPUs, {why}", f"{tokens:,} tokens of prompt and answer"))


def _given(**keys: int | None) -> dict[str, int]:
    return {key: value for key, value in keys.items() if value is not None}


def _on_gpus(
    model: ModelConfig, path: str, machine: Machine, gpus: Sequence[Gpu], wishes: Wishes, blocks: int
) -> Choice:
    demand = Demand(
        model=model,
        gpus=len(gpus),
        gpu_gib=min(gpu.gib for gpu in gpus),
        tokens=wishes.max_model_len or model.positions,
        stages=wishes.stages,
        ranks=wishes.tensor_parallel,
        recompute_blocks=max(blocks, RECOMPUTED),
    )
    if next(uses(demand), None) is None:
        raise ConfigError(
            f"{len(gpus)} × {gpus[0].name} cannot be used with such --stages and --tensor-parallel"
        )
    demand, plan = _plan(demand, asked=wishes.max_model_len is not None)
    demand = replace(demand, host_cache_gib=host_gib(machine.free_gib, kept_gib(demand, plan)))
    content = configuration(demand, plan, path)
    content["model"]["max_position_embeddings"] = plan.tokens
    return Choice(content, (_described(gpus, demand, plan, machine.free_gib), _lengths(model, plan)))


def _plan(demand: Demand, asked: bool) -> tuple[Demand, HostPlan]:
    """Plan for the whole context with a 16-bit KV cache, else with 8 bits, else for the longest context that
    fits. If keys have biases, 8 bits are not tried (docs/experiments/0012). asked: the caller requested this
    length, so a shorter context is an error."""
    kinds: tuple[KVDtype | None, ...] = (None,) if demand.model.qkv_bias else (None, "int8")
    for kv_dtype in kinds:
        tried = rolling(replace(demand, kv_dtype=kv_dtype))
        if (found := best(tried)) is not None:
            return tried, found
    found = longest(tried)
    if found is not None and not asked:
        return replace(tried, tokens=found.tokens), found
    at_most = f"; {found.tokens:,} fit: --max-model-len {found.tokens}" if found else ""
    more = gpus_needed(tried)
    needed = f"; {more} such GPUs are enough" if more else ""
    raise ConfigError(
        f"{demand.tokens:,} tokens of this model do not fit {demand.gpus} × {demand.gpu_gib:.0f} GiB, "
        f"with the KV cache in {8 if tried.kv_dtype else 16} bits{at_most}{needed}"
    )


def _described(gpus: Sequence[Gpu], demand: Demand, plan: HostPlan, free_gib: float) -> str:
    use, count = plan.use, len(gpus)
    weights, kv = use.quantisation or demand.dtype, demand.kv_dtype or demand.dtype
    parts = [f"{count} × {gpus[0].name}", _shared(plan), f"weights {weights}", f"KV cache {kv}"]
    if demand.host_cache_gib:
        why = host_reason(free_gib, kept_gib(demand, plan))
        parts.append(f"{demand.host_cache_gib:g} GiB of host memory for the prefix cache ({why})")
    return ", ".join(parts)


def _shared(plan: HostPlan) -> str:
    use = plan.use
    if use.mapped:
        return "prefill and decode share it"
    where = "on the same GPUs" if use.beside else "on separate GPUs"
    return f"{use.stages} prefill stages, tensor-parallel decode of {use.ranks} {where}"


def _lengths(model: ModelConfig, plan: HostPlan) -> str:
    less = f" (the model has {model.positions:,})" if plan.tokens < model.positions else ""
    return f"{plan.tokens:,} tokens of prompt and answer{less}; KV cache for {plan.decode_tokens:,} tokens"
