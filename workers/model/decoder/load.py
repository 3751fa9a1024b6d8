"""Load a model, or one stage's share of it, from its directory into a `LayerStack`."""

from __future__ import annotations

from pathlib import Path

import torch

from ...progress import Tell, silent
from ...settings import ModelSpec, Quantisation
from ..directory.json_files import ModelError
from ..directory.model_config import ModelConfig, read_config
from ..directory.store import adapter_directory, model_directory
from ..weights.stack_weights import read_stack
from .stack import LayerStack


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
