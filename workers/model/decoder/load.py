import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import torch

from deltafront.workers.model.decoder.collectives import SINGLE_RANK, Collectives
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.digest import checked_model
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import adapter_directory, config_of
from deltafront.workers.model.weights.stack_weights import StackSpec, read_stack
from deltafront.workers.progress import Tell, silent
from deltafront.workers.settings import ModelSpec

_YIELD = 5
"""Niceness added to a compute thread, which then gets a third of an ordinary thread's CPU time."""
_LOWEST = 19


def load_stack(
    directory: str | Path, spec: StackSpec, tell: Tell = silent, collectives: Collectives = SINGLE_RANK
) -> LayerStack:
    return LayerStack(spec, read_stack(directory, spec, tell), collectives)


def load_model(
    model: ModelSpec,
    device: torch.device | str,
    stage: int = 0,
    stages: int = 1,
    *,
    collectives: Collectives = SINGLE_RANK,
    tell: Tell = silent,
) -> LayerStack:
    """Load a pipeline stage's share of a model's layers, or a tensor-parallel rank's part of all layers.

    Raises:
        ModelError: The model cannot be loaded, or cannot be split or quantised in this way.
        ValueError: The dtype is unknown.
    """
    _check_quantisation(model, torch.device(device))
    model = checked_model(model)
    config = config_of(model)
    _check_linear_attention(config, torch.device(device))
    share = config.split(stages)[stage]
    spec = StackSpec(
        config=config,
        layers=share.layers,
        mlps=share.mlps,
        embedding=stage == 0,
        head=stage == stages - 1,
        dtype=torch_dtype(model),
        device=torch.device(device),
        adapter=None if model.adapter is None else adapter_directory(model.adapter),
        quantisation=model.quantisation,
        rank=collectives.rank,
        ranks=collectives.ranks,
    )
    return load_stack(model.path, spec, tell, collectives)


def _check_quantisation(model: ModelSpec, device: torch.device) -> None:
    kind = model.quantisation
    if kind is None:
        return
    if device.type != "cuda":
        raise ModelError(f"model.quantisation: {kind} needs a GPU, not {device.type}")
    if torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ModelError(f"model.quantisation: {kind} needs a GPU that multiplies 8-bit floats, not {name}")


def _check_linear_attention(config: ModelConfig, device: torch.device) -> None:
    if config.linear is not None and device.type == "cuda" and find_spec("fla") is None:
        raise ModelError(
            f"{config.architecture} has linear attention, which needs flash-linear-attention on a GPU: pip "
            "install flash-linear-attention"
        )


def torch_dtype(model: ModelSpec) -> torch.dtype:
    """Return the model's dtype. Raises ValueError if it is unknown."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if model.dtype not in known:
        raise ValueError(f"model dtype {model.dtype!r} is unknown; known: {', '.join(known)}")
    return known[model.dtype]


def set_up_compute_thread(threads: int, device: str) -> None:
    """Set this thread's number of torch threads and its GPU. On a CPU, lower its priority, so that
    computation does not delay the event loop."""
    torch.set_num_threads(threads)
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)
    if device == "cpu" and sys.platform == "linux":  # only Linux has niceness per thread
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(nice + _YIELD, _LOWEST))
