"""Writes quantised checkpoints of a tiny model in each published format, packed by plain loops."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ...tiny_model import make_tiny_model

GROUP, NF4_BLOCK = 32, 64
BLOCK = 48
"""Side of a quantisation block. It divides 96, but neither 64 nor 256."""
DOWN = "model.layers.1.mlp.down_proj."
QUERY = "model.layers.1.self_attn.q_proj."

Tensors = dict[str, torch.Tensor]
Rows = list[list[int]]
Store = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""weight_OI → the stored tensors, and the weights that they represent."""


def groups(strategy: str, **more: Any) -> dict[str, Any]:
    """Make a quantization_config like llm-compressor's."""
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
    """Expand scales of a tensor, of rows or of blocks to one scale per weight."""
    if scales.numel() == 1:
        return scales.reshape(()).expand(shape)
    if len(scales) == shape[0]:
        return scales.reshape(-1, 1).expand(shape)
    outputs, inputs = (torch.arange(length) for length in shape)
    return scales[outputs[:, None] // BLOCK, inputs // BLOCK]


def fp8(scale_name: str, make_scales: Callable[[torch.Tensor], torch.Tensor]) -> Store:
    def store(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = make_scales(weight_OI)
        wide = spread(scales, weight_OI.shape)
        number = (weight_OI / wide).to(torch.float8_e4m3fn)
        return {"weight": number, scale_name: scales, "input_scale": torch.ones(1)}, number.float() * wide

    return store


def packed(rows: Rows, bits: int, places: Sequence[int] = range(32)) -> torch.Tensor:
    """Pack rows into 32-bit words. places: Position in a word of its first, second, … number."""
    per_word = 32 // bits
    words = [[0] * -(-len(row) // per_word) for row in rows]
    for row, out in zip(rows, words, strict=True):
        for column, number in enumerate(row):
            assert 0 <= number < 2**bits
            out[column // per_word] |= number << bits * places[column % per_word]
    return torch.tensor(words).to(torch.uint32).view(torch.int32)


def turned(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


class Integers:
    """A matrix quantised to integers: numbers_OI, zeros_ON, scales_ON, and the weights meant_OI that they
    represent. groups_I: The group of each input column."""

    def __init__(
        self, weight_OI: torch.Tensor, bits: int, group: int, *, ordered: bool, symmetric: bool
    ) -> None:
        draw, (outputs, inputs), most = random.Random(5), weight_OI.shape, 2**bits - 1
        self.groups_I = [i // group for i in range(inputs)]
        if ordered:
            draw.shuffle(self.groups_I)
        count = max(self.groups_I) + 1
        zero = (lambda: 2 ** (bits - 1)) if symmetric else (lambda: draw.randrange(most + 1))
        self.zeros_ON = [[zero() for _ in range(count)] for _ in range(outputs)]
        spans = [
            [float(weight_OI[o].abs().max()) / most * (2 + draw.random())] * count for o in range(outputs)
        ]
        self.scales_ON = torch.tensor(spans).half()
        values, scales = weight_OI.tolist(), self.scales_ON.tolist()
        self.numbers_OI = [[0] * inputs for _ in range(outputs)]
        meant = [[0.0] * inputs for _ in range(outputs)]
        for o in range(outputs):
            for i, n in enumerate(self.groups_I):
                number = round(values[o][i] / scales[o][n]) + self.zeros_ON[o][n]
                self.numbers_OI[o][i] = number = min(max(number, 0), most)
                meant[o][i] = (number - self.zeros_ON[o][n]) * scales[o][n]
        self.meant_OI = torch.tensor(meant)
        self.order = torch.tensor(self.groups_I, dtype=torch.int32)


def awq(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Store like AutoAWQ: numbers packed along outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from low bits."""
    places = [[0, 2, 4, 6, 1, 3, 5, 7].index(output) for output in range(8)]
    x = Integers(weight_OI, 4, GROUP, ordered=False, symmetric=False)
    parts = {
        "qweight": packed(turned(x.numbers_OI), 4, places),
        "qzeros": packed(turned(x.zeros_ON), 4, places),
        "scales": x.scales_ON.T.contiguous(),
    }
    return parts, x.meant_OI


def gptq(
    bits: int = 4, *, symmetric: bool = True, ordered: bool = False, index: bool = True, v2: bool = False
) -> Store:
    """Store like AutoGPTQ: numbers packed along inputs, zero points along outputs (version 1: minus 1)."""

    def store(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        x = Integers(weight_OI, bits, GROUP, ordered=ordered, symmetric=symmetric)
        zeros = [[(zero - (not v2)) % 2**bits for zero in row] for row in turned(x.zeros_ON)]
        parts = {
            "qweight": packed(x.numbers_OI, bits).T.contiguous(),
            "qzeros": packed(zeros, bits),
            "scales": x.scales_ON.T.contiguous(),
        }
        parts |= {"bias": torch.zeros(len(weight_OI))} if index else {}
        return parts | ({"g_idx": x.order} if index else {}), x.meant_OI

    return store


def pack_quantized(
    bits: int = 4, group: int = GROUP, *, symmetric: bool = True, ordered: bool = False, old: bool = False
) -> Store:
    """Store like compressed-tensors: zero points packed along outputs, in old versions int8."""

    def store(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        x = Integers(weight_OI, bits, group, ordered=ordered, symmetric=symmetric)
        parts = {
            "weight_packed": packed(x.numbers_OI, bits),
            "weight_scale": x.scales_ON,
            "weight_shape": torch.tensor(weight_OI.shape),
        }
        if old:
            parts["weight_zero_point"] = (torch.tensor(x.zeros_ON) - 2 ** (bits - 1)).to(torch.int8)
        elif not symmetric:
            parts["weight_zero_point"] = packed(turned(x.zeros_ON), bits).T.contiguous()
        return parts | ({"weight_g_idx": x.order} if ordered else {}), x.meant_OI

    return store


NF4 = """-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634
    0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1""".split()


def nf4(*, nested: bool) -> Store:
    """Store like bitsandbytes: two numbers per byte, the first in the upper half; a scale per 64 numbers."""

    def store(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        draw = torch.Generator().manual_seed(3)
        blocks, codes = weight_OI.numel() // NF4_BLOCK, torch.tensor([float(number) for number in NF4])
        state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "float32", "shape": [*weight_OI.shape]}
        scales = weight_OI.reshape(-1, NF4_BLOCK).abs().amax(1)
        parts: Tensors = {"weight.absmax": scales, "weight.quant_map": codes}
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            map_, most = torch.linspace(-1, 1, 256), torch.rand(-(-blocks // 256), generator=draw) / 5 + 0.1
            indices = torch.randint(256, (blocks,), generator=draw)
            scales = map_[indices] * most[torch.arange(blocks) // 256] + 0.25
            parts |= {"weight.absmax": indices.to(torch.uint8), "weight.nested_absmax": most}
            parts["weight.nested_quant_map"] = map_
        numbers = torch.randint(16, (weight_OI.numel(),), generator=draw)
        meant = codes[numbers] * scales[torch.arange(len(numbers)) // NF4_BLOCK]
        pairs = 16 * numbers[::2] + numbers[1::2]
        parts["weight"] = pairs.to(torch.uint8).reshape(-1, 1)
        written = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = written
        return parts, meant.view(weight_OI.shape)

    return store


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
OLD_AWQ = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def w4a16(bits: int = 4, strategy: str = "group", **more: Any) -> dict[str, Any]:
    size = {"group_size": GROUP} if strategy == "group" else {}
    return groups(strategy, num_bits=bits, type="int", **size, **more) | {"format": "pack-quantized"}


FORMS: dict[str, tuple[dict[str, Any], Store]] = {
    "compressed-tensors, channels": (groups("channel"), fp8("weight_scale", channel_scales)),
    "compressed-tensors, one scale": (groups("tensor"), fp8("weight_scale", one_scale)),
    "compressed-tensors, blocks": (
        groups("block", block_structure=[BLOCK, BLOCK]),
        fp8("weight_scale", block_scales),
    ),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"},
        fp8("weight_scale_inv", block_scales),
    ),
    "fp8, one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8("weight_scale", one_scale),
    ),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("weight_scale", one_scale)),
    "AWQ": (AWQ, awq),
    "GPTQ": (GPTQ, gptq()),
    "GPTQ without an index": (GPTQ | {"sym": False}, gptq(symmetric=False, index=False)),
    "GPTQ, 8 bits, act-order": (
        GPTQ | {"bits": 8, "desc_act": True, "sym": False},
        gptq(8, symmetric=False, ordered=True),
    ),
    "GPTQ, version 2, act-order": (
        GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True, "sym": False},
        gptq(symmetric=False, ordered=True, v2=True),
    ),
    "W4A16": (w4a16(), pack_quantized()),
    "W4A16, asymmetric, act-order": (
        w4a16(symmetric=False, actorder="group"),
        pack_quantized(symmetric=False, ordered=True),
    ),
    "W4A16, zero points in int8": (w4a16(symmetric=False), pack_quantized(symmetric=False, old=True)),
    "W8A16, channels": (w4a16(8, "channel", symmetric=False), pack_quantized(8, 1024, symmetric=False)),
    "nf4": (NF4_CONFIG, nf4(nested=False)),
    "nf4, nested": (NF4_CONFIG | {"bnb_4bit_use_double_quant": True}, nf4(nested=True)),
}


@functools.cache
def made(form: str) -> tuple[Tensors, Tensors]:
    """Make the tensors of a tiny quantised model, and the weights that they represent."""
    stored: Tensors = {}
    meant: Tensors = {}
    with tempfile.TemporaryDirectory() as directory:
        plain = load_file(make_tiny_model(Path(directory)) / "model.safetensors")
    for name, tensor in plain.items():
        stored[name] = meant[name] = tensor
        if ".layers." in name and tensor.dim() == 2:
            del stored[name]
            parts, meant[name] = FORMS[form][1](tensor)
            stored |= {name.removesuffix("weight") + part: one for part, one in parts.items()}
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    stored["model.layers.0.self_attn.v_proj.v_scale"] = torch.ones(1)
    return stored, meant


def write(directory: Path, form: str) -> Tensors:
    """Write a checkpoint in a quantised format. Return the weights that it represents."""
    stored, meant = made(form)
    save_file(stored, make_tiny_model(directory) / "model.safetensors")
    configure(directory, FORMS[form][0])
    return meant


def configure(directory: Path, quantisation: object) -> None:
    content = json.loads((directory / "config.json").read_text())
    content["quantization_config"] = quantisation
    (directory / "config.json").write_text(json.dumps(content))


def edit(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    stored = load_file(directory / "model.safetensors") | change
    save_file({name: one for name, one in stored.items() if one is not None}, directory / "model.safetensors")
