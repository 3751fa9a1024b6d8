"""Finds a model's family. Modules outside the package may register further families."""

import importlib
from collections.abc import Mapping
from typing import Any

from deltafront.workers.model.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from deltafront.workers.model.families.exaone import EXAONE, EXAONE4, EXAONE_MOE
from deltafront.workers.model.families.family import Family, GgufNames
from deltafront.workers.model.families.gemma3 import GEMMA3
from deltafront.workers.model.families.glm import DOTS1, GLM, GLM4, GLM4_MOE, SOLAR_OPEN
from deltafront.workers.model.families.granite import GRANITE, GRANITE4, HYPERCLOVAX
from deltafront.workers.model.families.hunyuan import HUNYUAN, HUNYUAN_MOE, HY3
from deltafront.workers.model.families.layer_norms import COHERE, COHERE2, JAIS2, NEMOTRON, STARCODER2
from deltafront.workers.model.families.llama import AFMOE, APERTUS, ARCEE, CWM, LLAMA, PHI3, SEED_OSS, SMOLLM3
from deltafront.workers.model.families.mistral import GPT_OSS, MINIMAX_M2, MINISTRAL3, MISTRAL, MIXTRAL
from deltafront.workers.model.families.olmo2 import OLMO2, OLMO3, OLMOE
from deltafront.workers.model.families.qwen import (
    MELLUM,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
)

_OURS = (
    *(LLAMA, MISTRAL, MINISTRAL3, QWEN2, QWEN3, QWEN3_MOE, SEED_OSS, PHI3, GRANITE, SMOLLM3, OLMO2),
    *(GRANITE4, GLM, GLM4, GLM4_MOE, EXAONE, EXAONE4, ARCEE, GEMMA3, OLMO3),
    *(MIXTRAL, QWEN2_MOE, MINIMAX_M2, ERNIE4_5, ERNIE4_5_MOE, OLMOE),
    *(STARCODER2, COHERE, COHERE2, APERTUS, HUNYUAN),
    *(HUNYUAN_MOE, HY3, DOTS1, SOLAR_OPEN, EXAONE_MOE, MELLUM, CWM, AFMOE),
    *(NEMOTRON, JAIS2, HYPERCLOVAX, QWEN3_VL, GPT_OSS),
    *(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT),
)

FAMILIES: dict[str, Family] = {}
"""Families by architecture."""


_ARCHITECTURES: Mapping[str, str] = {
    "Cohere2Moe": "experts in parallel layers",
    "Gemma3n": "layers that share their KV cache",
    "Gemma4": "heads of other sizes in layers without windows",
    "GPTNeoX": "heads' queries, keys and values in one matrix",
    "GraniteMoeFor": "experts stored in one tensor",
    "GraniteMoeShared": "experts stored in one tensor",
    "GraniteMoeSWA": "attention sinks",
    "GraniteSWA": "attention sinks",
    "JetMoe": "experts of attention",
    "Laguna": "layers with other numbers of heads",
    "Llama4": "attention by chunks",
    "MiMoV2": "attention sinks",
    "MiniMaxFor": "linear attention",
    "MiniMaxM3": "an indexer that chooses blocks of keys",
    "OlmoFor": "norms without weights",
    "PhiFor": "an output head with a bias",
    "PhiMoE": "a router with sparsemixer",
    "Qwen3VLMoe": "experts stored in one tensor",
}
"""First parts of unsupported architectures' names, each with the feature that is not supported."""
_SIGNS: Mapping[str, str] = {
    "kv_lora_rank": "latent attention (MLA)",
    "index_topk": "an indexer that chooses keys (DSA)",
    "linear_num_value_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "state_size": "state-space layers",
    "conv_L_cache": "convolutions",
    "attn_logit_softcapping": "capped scores",
    "final_logit_softcapping": "capped logits",
    "block_configs": "layers of different shapes",
    "is_encoder_decoder": "an encoder",
    "vision_config": "images",
    "audio_config": "sound",
}
"""Keys in the config.json of unsupported families, each with the feature that it shows."""
_LAYERS = {"linear_attention": "linear attention", "chunked_attention": "attention by chunks"}
"""Unsupported values of `layer_types`."""


class FamilyError(ValueError):
    """A family cannot be registered."""


def register(family: Family) -> None:
    """Register a family. Raises FamilyError if another family has its architecture."""
    if FAMILIES.setdefault(family.architecture, family) != family:
        raise FamilyError(f"architecture {family.architecture!r} is another family's already")


def load_families(module: str) -> None:
    """Import a module that registers families. Raises FamilyError."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a foreign module may raise anything
        raise FamilyError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config.json, by architecture or else by `model_type`; None if there is none."""
    named = config.get("architectures")
    if named:
        return FAMILIES.get(named[0]) if isinstance(named, list) else None
    return next((one for one in FAMILIES.values() if one.model_type == config.get("model_type")), None)


def gguf_families() -> dict[str, list[tuple[Family, GgufNames]]]:
    """Return the families with GGUF names, by llama.cpp's architecture. Those with `told_by` come first."""
    found: dict[str, list[tuple[Family, GgufNames]]] = {}
    for one in FAMILIES.values():
        if one.gguf is not None:
            found.setdefault(one.gguf.architecture, []).append((one, one.gguf))
    return {name: sorted(each, key=lambda pair: not pair[1].told_by) for name, each in found.items()}


def unserved_features(config: Mapping[str, Any]) -> list[str]:
    """List the unsupported features that a model's config.json shows."""
    text = config.get("text_config")
    told = {**config, **(text if isinstance(text, dict) else {})}
    named, kinds = str(config.get("architectures")), told.get("layer_types")
    found = [feature for name, feature in _ARCHITECTURES.items() if f"'{name}" in named]
    found += [feature for kind, feature in _LAYERS.items() if isinstance(kinds, list) and kind in kinds]
    found += [feature for key, feature in _SIGNS.items() if told.get(key)]
    return list(dict.fromkeys(found))


def wrapped_architectures() -> frozenset[str]:
    """Return the multimodal architectures whose language model is supported."""
    return frozenset(name for family in FAMILIES.values() for name in family.wrappers)


for _family in _OURS:
    register(_family)
