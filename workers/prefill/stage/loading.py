from __future__ import annotations

from collections.abc import Callable

from ...kv.cache import PagedKVCache
from ...kv.fetch import KVSource
from ...kv.handoff.protocols import KVSender
from ...kv.pages.pool import pages_for
from ...messages.methods import load_methods
from ...model.calibrated.profile import load_profile
from ...model.decoder.load import load_model
from ...progress import Tell, silent
from ...settings import ModelSpec, PrefillConfig
from ...tracing import NO_TRACER, Tracer
from .activations import Activations, NoActivations
from .stage import PrefillStage
from .warm_up import warm_up


def load_stage(
    model: ModelSpec,
    config: PrefillConfig,
    stage: int,
    activations: Activations | None,
    sender: Callable[[PagedKVCache], KVSender],
    *,
    source: KVSource | None = None,
    tell: Tell = silent,
    tracer: Tracer = NO_TRACER,
) -> PrefillStage:
    """Load a stage and warm it up.

    Args:
        activations: None in a group of one stage.
        sender: makes the hand-off's end for the stage's cache.
        source: of a resumed prompt's K/V; None where none is resumed.
    """
    for module in config.method_modules:
        load_methods(module)
    profile = load_profile(model)
    stack = load_model(model, config.device, stage, config.stages, tell)
    shape, pages = stack.config, pages_for(config.cache_tokens)
    methods = [config.method(name, options) for name, options in config.warmed_up]
    longest = min(config.cache_tokens, shape.positions)
    warm_up(stack, methods, config.chunk_tokens, profile, longest, tell)
    cache = PagedKVCache(stack.layers, shape.kv_heads, shape.head_dim, pages, stack.dtype, stack.device)
    ends = activations or NoActivations()
    return PrefillStage(
        stack,
        cache,
        sender(cache),
        ends,
        stage=stage,
        stages=config.stages,
        profile=profile,
        source=source,
        tracer=tracer,
    )
