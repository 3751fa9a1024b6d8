"""The model under test in transformers, with the adapter merged by hand and the stretched rope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ADAPTER = Path(__file__).resolve().parents[2] / "deploy" / "models" / "smollm2-135m-128k"


def merged_model(model_directory: Path) -> Any:
    """SmolLM2-135M-Instruct with the 128K adapter, in fp32."""
    from transformers import AutoModelForCausalLM  # at the top it would cost every collecting process 4 s

    model = AutoModelForCausalLM.from_pretrained(str(model_directory), dtype=torch.float32).eval()
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    weights = load_file(str(ADAPTER / "adapter_model.safetensors"))
    modules = dict(model.named_modules())
    merged = 0
    for name, a in weights.items():
        if not name.endswith("lora_A.weight"):
            continue
        b = weights[name.replace("lora_A", "lora_B")]
        target = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        modules[target].weight.data += scale * (b.float() @ a.float())
        merged += 1
    assert merged == 7 * model.config.num_hidden_layers
    model.config.max_position_embeddings = 131_072
    half = torch.arange(0, 64, 2).float() / 64
    model.model.rotary_emb.inv_freq = 1.0 / (8_000_000.0**half)
    return model
