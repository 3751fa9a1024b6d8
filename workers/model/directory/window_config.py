"""Reads from config.json which layers attend to a window of the last tokens."""

from collections.abc import Mapping
from typing import Any

from deltafront.workers.model.directory.model_files import ModelError, positive_int
from deltafront.workers.model.families.family import Family

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_windows(
    raw: Mapping[str, Any], family: Family, layers: int, positions: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return a window's tokens, a row's own included, and the layers that have it; None and () if there is
    none.

    Raises:
        ModelError: The family has no windows in transformers, or not these.
    """
    window, implied = raw.get("sliding_window"), family.implied
    is_read = "use_sliding_window" in implied or "sliding_window" not in implied  # others' windows stay
    if not window or (is_read and not raw.get("use_sliding_window", True)):
        return None, ()
    if positive_int(raw, "sliding_window") >= positions:
        return None, ()
    if "sliding_window" not in implied:
        raise ModelError(
            f"sliding-window attention ({window} of {positions} positions) is not supported for "
            f"{family.architecture}: use a model with full attention, or set max_position_embeddings to the "
            "window"
        )
    sliding = tuple(n for n, kind in enumerate(_kinds(raw, family, layers)) if kind == _SLIDING)
    return (window, sliding) if sliding else (None, ())


def _kinds(raw: Mapping[str, Any], family: Family, layers: int) -> list[str]:
    named = raw.get("layer_types") if "layer_types" in family.implied else None
    if named is not None:
        if not isinstance(named, list) or len(named) != layers or not {_SLIDING, _FULL}.issuperset(named):
            raise ModelError(
                f"config.json: layer_types = {named!r} must be {layers} of {_SLIDING} and {_FULL}"
            )
        return named
    every, first = raw.get("sliding_window_pattern"), raw.get("max_window_layers", 0)
    if every is not None and not isinstance(every, int):
        raise ModelError(f"config.json: sliding_window_pattern = {every!r}: name all layers in layer_types")
    slides = [n >= first and not (every and (n + 1) % every == 0) for n in range(layers)]
    return [_SLIDING if slide else _FULL for slide in slides]
