"""The language model of a multimodal checkpoint. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .json_files import ModelError

WRAPPERS = ("Mistral3ForConditionalGeneration",)
"""Architectures whose language model is one of ours, beside parts for images."""
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""How names of the language model's tensors begin → how they begin by itself. transformers 4 and 5 write
different ones."""


def is_wrapped(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and bool(named) and named[0] in WRAPPERS


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's own config.json. Raises ModelError without one."""
    if not is_wrapped(config):
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"config.json: {config['architectures'][0]} has no section text_config")
    outer = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    own = {key: value for key, value in text.items() if value is not None}
    tied = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}  # which transformers goes by
    return outer | own | tied


def text_names(names: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Map the language model's tensors to their names in a checkpoint. Tensors for images have no place."""
    if not is_wrapped(config):
        return {name: name for name in names}
    found = {name: name for name in names if name.startswith("lm_head.")}
    for name in names:
        for prefix, own in _PREFIXES.items():
            if name.startswith(prefix):
                found[own + name.removeprefix(prefix)] = name
    return found
