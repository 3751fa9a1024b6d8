"""Converts a GGUF file to a model directory with safetensors and tokenizer.json, as the family's authors
publish."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_files import WEIGHT_INDEX, ModelError
from deltafront.workers.model.directory.tokenizer_files import check_chat_template
from deltafront.workers.model.weights.gguf.source import GgufSource
from deltafront.workers.model.weights.gguf.tokenizer import tokenizer_config, tokenizer_json

_SHARD_BYTES = 2 << 30


def convert_gguf(path: Path, work: Path) -> None:
    """Convert a GGUF file into a model directory in the folder `work`. Raises ModelError."""
    source = GgufSource(path)
    config = source.config()
    _write_json(work / "config.json", config)
    ids: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(work / "generation_config.json", ids)
    _write_tokenizer(source, work)
    check_chat_template(work)
    read_config(work)  # refuse an unsupported model before converting its weights
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
    """Write the weights in shards, so that a model larger than memory can be converted."""
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    size = shards = 0
    names = sorted(source.names())
    for name in names:
        stored = source.family.stored_name(name)
        shard[stored] = source.read_compact(name)
        size += shard[stored].nbytes
        if size >= _SHARD_BYTES or name == names[-1]:
            shards += 1
            file = f"model-{shards:05d}.safetensors"
            save_file(shard, work / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard, size = {}, 0
    _write_json(work / WEIGHT_INDEX, {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
