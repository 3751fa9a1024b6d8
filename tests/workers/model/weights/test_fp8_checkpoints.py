"""Checkpoints in 8-bit floats are what their numbers and scales say, in each published form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafront.workers.model.directory.fp8_checkpoint import fp8_checkpoint
from deltafront.workers.model.directory.headers import check_weights
from deltafront.workers.model.directory.json_files import ModelError
from deltafront.workers.model.directory.model_config import read_config
from deltafront.workers.model.weights.sources import open_weights

from ...tiny_model import make_tiny_model

BLOCK = 48
"""It divides neither 64 nor 256, and divides 96."""
DOWN = "model.layers.1.mlp.down_proj."
QUERY = "model.layers.1.self_attn.q_proj."

Tensors = dict[str, torch.Tensor]


def groups(strategy: str, **more: Any) -> dict[str, Any]:
    """A configuration as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True} | more
    group = {"weights": weights, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def one_scale(weight_OI: torch.Tensor) -> torch.Tensor:
    return weight_OI.abs().max() / 448


def channel_scales(weight_OI: torch.Tensor) -> torch.Tensor:
    return weight_OI.abs().amax(1, keepdim=True) / 448


def block_scales(weight_OI: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-size // BLOCK) for size in weight_OI.shape)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight_OI[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scales[row, column] = part.abs().max() / 448
    return scales


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Each weight's own scale, found by its place."""
    if scales.numel() == 1:
        return scales.reshape(()).expand(shape)
    if scales.shape[-1] == 1 or scales.dim() == 1:
        return scales.reshape(-1, 1).expand(shape)
    return torch.stack(
        [torch.stack([scales[o // BLOCK, i // BLOCK] for i in range(shape[1])]) for o in range(shape[0])]
    )


FORMS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "compressed-tensors, channels": (groups("channel"), "weight_scale", channel_scales),
    "compressed-tensors, one scale": (groups("tensor"), "weight_scale", one_scale),
    "compressed-tensors, blocks": (
        groups("block", block_structure=[BLOCK, BLOCK]),
        "weight_scale",
        block_scales,
    ),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"},
        "weight_scale_inv",
        block_scales,
    ),
    "fp8, one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", one_scale),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", one_scale),
}


def write(directory: Path, form: str) -> Tensors:
    """A tiny model in 8 bits; returns what its tensors stand for."""
    config, suffix, make_scales = FORMS[form]
    make_tiny_model(directory)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if ".layers." not in name or tensor.dim() != 2:
            continue
        scales = make_scales(tensor)
        wide = spread(scales, tensor.shape)
        stored[name] = (tensor / wide).to(torch.float8_e4m3fn)
        stored[name.removesuffix("weight") + suffix] = scales
        stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        meant[name] = stored[name].float() * wide
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    stored["model.layers.0.self_attn.v_proj.v_scale"] = torch.ones(1)
    save_file(stored, directory / "model.safetensors")
    configure(directory, config)
    return meant


def configure(directory: Path, quantisation: object) -> None:
    content = json.loads((directory / "config.json").read_text())
    content["quantization_config"] = quantisation
    (directory / "config.json").write_text(json.dumps(content))


def edit(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    stored = load_file(directory / "model.safetensors") | change
    save_file({name: one for name, one in stored.items() if one is not None}, directory / "model.safetensors")


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_is_its_numbers_times_their_scales(tmp_path: Path, form: str) -> None:
    meant = write(tmp_path, form)
    check_weights(tmp_path, read_config(tmp_path))
    source = open_weights(tmp_path)
    assert source.names() == meant.keys()
    for name, expected in meant.items():
        assert torch.equal(source.read(name).float(), expected), name


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    meant = write(tmp_path, "ModelOpt")
    configure(tmp_path, None)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    check_weights(tmp_path, read_config(tmp_path))
    assert torch.equal(open_weights(tmp_path).read(DOWN + "weight"), meant[DOWN + "weight"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({DOWN + "weight_scale": None}, f"tensor {DOWN}weight is in 8 bits and has no scale"),
        (
            {DOWN + "weight_scale": torch.ones(7, 1)},
            f"tensor {DOWN}weight_scale is (7, 1) for a matrix of (64, 96): one a channel is expected",
        ),
        ({DOWN + "weight": torch.zeros(64, 96, dtype=torch.float8_e5m2)}, "F8_E5M2"),
        ({DOWN + "weight": None}, f"lack {DOWN}weight"),
    ],
)
def test_a_scale_that_is_missing_or_misshapen_is_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], says: str
) -> None:
    write(tmp_path, "compressed-tensors, channels")
    edit(tmp_path, change)
    with pytest.raises(ModelError) as caught:
        check_weights(tmp_path, read_config(tmp_path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_blocks_of_another_size_are_named(tmp_path: Path) -> None:
    write(tmp_path, "fp8, blocks")
    edit(tmp_path, {QUERY + "weight_scale_inv": torch.ones(2, 1)})
    with pytest.raises(ModelError, match=r"q_proj.weight_scale_inv is \(2, 1\), blocks of .* need \(6, 2\)"):
        check_weights(tmp_path, read_config(tmp_path))


REFUSED: list[tuple[object, str]] = [
    ({"quant_method": "awq", "bits": 4}, "weights quantised by awq are not served"),
    ({"quant_method": "gptq", "bits": 4}, "by gptq"),
    ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, r"by bitsandbytes \(nf4\)"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"by modelopt \(NVFP4\)"),
    ({"quant_method": "mxfp4"}, "by mxfp4"),
    (groups("group", num_bits=4, type="int"), r"weights of 4 bits \(int, by group\)"),
    (groups("channel", type="int"), r"8 bits \(int, by channel\)"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "with 0 kinds of weights"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_what_is_not_served_names_what_is(tmp_path: Path, given: object, says: str) -> None:
    make_tiny_model(tmp_path)
    configure(tmp_path, given)
    with pytest.raises(ModelError, match=rf"{says}.*: take the model in 16 bits, or in FP8 \(compressed"):
        read_config(tmp_path)


def test_a_section_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'fp8' is not a section of keys"):
        fp8_checkpoint(tmp_path, {"quantization_config": "fp8"})
    with pytest.raises(ModelError, match=r"\[128\] is no size of blocks"):
        fp8_checkpoint(tmp_path, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}})
