"""From a configuration to a decode engine: finds the model, loads all of it, allocates the cache."""

from __future__ import annotations

import torch

from ..kv.transports import KVReceiver
from ..model.config import read_config
from ..model.decoder import LayerStack, load_stack
from ..model.store import adapter_directory, model_directory
from ..prefill.stage import torch_dtype
from ..settings import DecodeConfig, ModelSpec
from .engine import DecodeEngine


def load_engine(name: str, model: ModelSpec, config: DecodeConfig) -> DecodeEngine:
    """An engine that is loaded but not started. Sets this process's torch threads.

    Raises ModelError for a model that cannot be loaded, SelectionError or ValueError for a configuration
    that does not fit it.
    """
    torch.set_num_threads(config.threads)
    stack = load_whole_model(model, config.device)
    shape = stack.config
    return DecodeEngine(name, stack, config, KVReceiver(shape.kv_heads, shape.head_dim, stack.dtype))


def load_whole_model(model: ModelSpec, device: str) -> LayerStack:
    """Every layer of a model, with embedding and head. Raises ModelError."""
    directory = model_directory(model.path)
    shape = read_config(directory, model.overrides)
    return load_stack(
        directory,
        shape,
        range(shape.layers),
        embedding=True,
        head=True,
        dtype=torch_dtype(model),
        device=device,
        adapter=None if model.adapter is None else adapter_directory(model.adapter),
    )
