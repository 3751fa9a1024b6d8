"""Converts a GGUF file to a safetensors directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from ..directory.json_files import WEIGHT_INDEX, ModelError
from ..directory.model_config import read_config
from .gguf_source import GgufSource
from .gguf_tokenizer import tokenizer_config, tokenizer_json

_SHARD_BYTES = 2 << 30


def convert_gguf(path: Path, work: Path) -> None:
    """Fill the folder `work`. Raises ModelError."""
    source = GgufSource(path)
    config = source.config()
    _write_json(work / "config.json", config)
    ids: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(work / "generation_config.json", ids)
    _write_tokenizer(source, work)
    read_config(work)  # refuse a model before the long part
    _write_weights(source, work)


def _write_tokenizer(source: GgufSource, work: Path) -> None:
    _write_json(work / "tokenizer.json", tokenizer_json(source))
    positions = {"model_max_length": source.model_field("context_length")}
    _write_json(work / "tokenizer_config.json", tokenizer_config(source) | positions)
    try:
        Tokenizer.from_file(str(work / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the tokenizer in {source.path} cannot be rebuilt: {error}") from error


def _write_weights(source: GgufSource, work: Path) -> None:
    """Shards are bounded: a model larger than memory can be converted."""
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    size = shards = 0
    names = sorted(source.names())
    for name in names:
        shard[name] = source.read_compact(name)
        size += shard[name].nbytes
        if size >= _SHARD_BYTES or name == names[-1]:
            shards += 1
            file = f"model-{shards:05d}.safetensors"
            save_file(shard, work / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard, size = {}, 0
    _write_json(work / WEIGHT_INDEX, {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
