"""From a configuration to a decode engine: finds the model, loads all of it, allocates the cache."""

from __future__ import annotations

import torch

from ..kv.transports import KVReceiver
from ..model.decoder import load_model
from ..settings import DecodeConfig, ModelSpec
from .engine import DecodeEngine


def load_engine(name: str, model: ModelSpec, config: DecodeConfig) -> DecodeEngine:
    """An engine that is loaded but not started. Sets this process's torch threads.

    Raises ModelError for a model that cannot be loaded, SelectionError or ValueError for a configuration
    that does not fit it.
    """
    torch.set_num_threads(config.threads)
    stack = load_model(model, config.device)
    shape = stack.config
    return DecodeEngine(name, stack, config, KVReceiver(shape.kv_heads, shape.head_dim, stack.dtype))
