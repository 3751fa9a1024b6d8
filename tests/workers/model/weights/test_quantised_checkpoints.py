"""Quantised checkpoints are what their numbers and scales say, in each published form."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafront.benchmarks.testing import row_errors
from deltafront.kernels.layers.fp8 import cpu_quantise_rows
from deltafront.workers.model.directory.headers import check_weights, quantisation_notes
from deltafront.workers.model.directory.json_files import ModelError
from deltafront.workers.model.directory.model_config import read_config
from deltafront.workers.model.directory.quantised import quantised_form
from deltafront.workers.model.weights.sources import open_weights
from deltafront.workers.model.weights.stack_weights import StackSpec, read_stack

from ...tiny_model import VOCAB, make_tiny_model
from ..decoder.test_stack import (
    Case,
    Pages,
    expected_logits,
    greedy_tokens,
    load_stages,
    prefill,
    table_of,
)

GROUP, NF4_BLOCK = 32, 64
BLOCK = 48
"""It divides neither 64 nor 256, and divides 96."""
DOWN = "model.layers.1.mlp.down_proj."
QUERY = "model.layers.1.self_attn.q_proj."

Tensors = dict[str, torch.Tensor]
Rows = list[list[int]]
Store = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""weight_OI → its parts, and what they stand for."""


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


def fp8(scale_name: str, make_scales: Callable[[torch.Tensor], torch.Tensor]) -> Store:
    def store(weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = make_scales(weight_OI)
        wide = spread(scales, weight_OI.shape)
        number = (weight_OI / wide).to(torch.float8_e4m3fn)
        return {"weight": number, scale_name: scales, "input_scale": torch.ones(1)}, number.float() * wide

    return store


def packed(rows: Rows, bits: int, places: Sequence[int] = range(32)) -> torch.Tensor:
    """Each row's numbers in words of 32 bits. places: which place a word's first, second … number takes."""
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
    """numbers_OI, zeros_ON and scales_ON near a matrix, and what they stand for. groups_I: each input's."""

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
    """AutoAWQ's gemm: words run along outputs, and hold the outputs 0, 2, 4, 6, 1, 3, 5, 7 from below."""
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
    """AutoGPTQ: numbers are packed along inputs, zero points along outputs, in version 1 less one."""

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
    """compressed-tensors: zero points are packed along outputs; old versions have them in int8."""

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
    """bitsandbytes: two numbers a byte, the first above; blocks of 64 numbers have a scale."""

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
            scales = torch.stack([map_[one] * most[n // 256] + 0.25 for n, one in enumerate(indices)])
            parts |= {"weight.absmax": indices.to(torch.uint8), "weight.nested_absmax": most}
            parts["weight.nested_quant_map"] = map_
        numbers = torch.randint(16, (weight_OI.numel(),), generator=draw).tolist()
        pairs = [16 * first + second for first, second in zip(numbers[::2], numbers[1::2], strict=True)]
        meant = torch.stack([codes[one] * scales[n // NF4_BLOCK] for n, one in enumerate(numbers)])
        parts["weight"] = torch.tensor(pairs, dtype=torch.uint8).reshape(-1, 1)
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
    """The tensors of a tiny quantised model, and what they stand for."""
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
    """Returns what the tensors stand for."""
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


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_is_its_numbers_times_their_scales(tmp_path: Path, form: str) -> None:
    meant = write(tmp_path, form)
    check_weights(tmp_path, read_config(tmp_path))
    source = open_weights(tmp_path)
    assert source.names() == meant.keys()
    for name, expected in meant.items():
        assert torch.equal(source.read(name).float(), expected), name


@pytest.mark.parametrize("form", FORMS)
def test_a_model_computes_with_what_is_meant(tmp_path: Path, form: str) -> None:
    """In chunks through two stages, then single tokens, a chunk that is appended, and 64 greedy tokens."""
    meant, tokens = write(tmp_path / "quantised", form), 64
    save_file(meant, make_tiny_model(tmp_path / "plain") / "model.safetensors", metadata={"format": "pt"})
    ids_T = torch.randint(0, VOCAB, (80,), generator=torch.Generator().manual_seed(1))
    wanted_TV = expected_logits(tmp_path / "plain", ids_T)
    case = Case(tmp_path / "quantised", read_config(tmp_path / "quantised"), ids_T, wanted_TV)
    stages, pages = load_stages(case, 2), Pages(case.config, [table_of(80 + tokens)])

    def step(token: int, position: int) -> torch.Tensor:
        hidden_TC = stages[0].embed(torch.tensor([token]))
        for stage in stages:
            hidden_TC = stage.forward(hidden_TC, torch.tensor([position]), pages.step([position]))
        return stages[-1].logits(hidden_TC)

    logits = [prefill(stages, ids_T, (32, 20), pages)]
    logits += [step(int(ids_T[position]), position) for position in range(52, 58)]
    hidden_TC = stages[0].embed(ids_T[58:])
    for stage in stages:
        hidden_TC = stage.forward(hidden_TC, torch.arange(58, 80), pages.chunk(0, 58))
    logits.append(stages[-1].logits(hidden_TC))
    assert float(row_errors(torch.cat(logits), wanted_TV).max()) < 1e-4
    found = [int(logits[-1][-1].argmax())]
    while len(found) < tokens:
        found.append(int(step(found[-1], 79 + len(found)).argmax()))
    assert found == greedy_tokens(tmp_path / "plain", ids_T, tokens)


def test_a_multimodal_checkpoint_may_be_quantised(tmp_path: Path) -> None:
    meant = write(tmp_path, "W4A16")
    stored = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": one for name, one in stored.items()}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "mistral"}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    outer["quantization_config"] = text.pop("quantization_config")
    text["architectures"] = ["MistralForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(outer))
    check_weights(tmp_path, read_config(tmp_path))
    assert torch.equal(open_weights(tmp_path).read(DOWN + "weight"), meant[DOWN + "weight"])


@pytest.mark.parametrize("form", ["AWQ", "W4A16, asymmetric, act-order"])
def test_a_rank_has_its_part_of_what_is_meant(tmp_path: Path, form: str) -> None:
    meant = write(tmp_path, form)
    config, half = read_config(tmp_path), slice(32, 64)
    cpu, layers = torch.device("cpu"), range(config.layers)
    ends = {"embedding": True, "head": True, "rank": 1, "ranks": 2}
    spec = StackSpec(config=config, layers=layers, dtype=torch.float32, device=cpu, **ends)
    weights = read_stack(tmp_path, spec)
    assert torch.equal(weights.mlps[1].down.weight_OI, meant[DOWN + "weight"][:, 48:])
    assert torch.equal(weights.attentions[1].qkv.weight_OI[half], meant[QUERY + "weight"][128:][half])


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    meant = write(tmp_path, "ModelOpt")
    configure(tmp_path, None)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    check_weights(tmp_path, read_config(tmp_path))
    assert torch.equal(open_weights(tmp_path).read(DOWN + "weight"), meant[DOWN + "weight"])


INTS = torch.zeros(64, 12, dtype=torch.int32)
CHANNELS, ACT_ORDER = "compressed-tensors, channels", "GPTQ, 8 bits, act-order"
BROKEN: list[tuple[str, object, dict[str, torch.Tensor | None], str]] = [
    (
        CHANNELS,
        None,
        {"weight_scale": None},
        "lacks {}weight_scale, without which {}weight cannot be computed",
    ),
    (
        CHANNELS,
        None,
        {"weight_scale": torch.ones(7, 1)},
        "{}weight_scale is F32 (7, 1) instead of floats (64, 1)",
    ),
    (
        CHANNELS,
        None,
        {"weight": torch.zeros(64, 96, dtype=torch.float8_e5m2)},
        "{}weight is F8_E5M2 (64, 96)",
    ),
    (CHANNELS, None, {"weight": None}, "lacks {}weight, without which"),
    ("fp8, blocks", None, {"weight_scale_inv": torch.ones(2, 1)}, "is F32 (2, 1) instead of floats (2, 2)"),
    (CHANNELS, AWQ, {}, "lacks model.layers.0.self_attn.q_proj.qweight, without which"),
    (
        "AWQ",
        None,
        {"qzeros": None},
        "lacks {}qzeros, without which {}weight cannot be computed (AWQ of 4 bits)",
    ),
    ("AWQ", AWQ | {"group_size": 48}, {}, "o_proj.qzeros is I32 (8, 8) instead of I32 (6, 8) for (64, 256)"),
    ("AWQ", GPTQ, {}, "qweight is I32 (64, 32) instead of I32 (8, 256) for (256, 64) in GPTQ of 4 bits"),
    ("AWQ", w4a16(), {}, "says compressed-tensors of 4 bits, but the weights hold 70 tensors such as"),
    ("AWQ", None, {"weight": torch.ones(64, 96)}, "{}weight is given twice"),
    ("GPTQ", AWQ, {}, "instead of I32 (64, 32) for (256, 64) in AWQ of 4 bits"),
    ("GPTQ", GPTQ | {"bits": 8}, {}, "qweight is I32 (8, 256) instead of I32 (16, 256)"),
    ("GPTQ", None, {"bias": torch.ones(64)}, "the decoder has no place for {}bias"),
    ("GPTQ", None, {"qweight": INTS[:, :3].long()}, "qweight is I64 (64, 3) instead of I32 (12, 64)"),
    ("GPTQ", None, {"scales": INTS}, "scales is I32 (64, 12) instead of floats (3, 64)"),
    ("GPTQ", None, {"qweight": None, "scales": None, "g_idx": None, "bias": None}, "lacks {}qweight"),
    (ACT_ORDER, None, {"g_idx": None}, "lacks {}g_idx, without which"),
    ("W4A16", None, {"weight_scale": None}, "lacks {}weight_scale"),
    ("W4A16", w4a16(symmetric=False), {}, "lacks model.layers.0.self_attn.q_proj.weight_zero_point"),
    ("W4A16, zero points in int8", None, {"weight_zero_point": INTS}, "instead of I32 (8, 3)"),
    ("W4A16", w4a16(actorder="group"), {}, "lacks model.layers.0.self_attn.q_proj.weight_g_idx"),
    (
        "nf4",
        None,
        {"weight.quant_state.bitsandbytes__nf4": None},
        "lacks {}weight.quant_state.bitsandbytes__nf4",
    ),
    ("nf4", None, {"weight.absmax": torch.ones(48)}, "absmax is F32 (48,) instead of F32 (96,)"),
    ("nf4", FORMS["nf4, nested"][0], {}, "absmax is F32 (256,) instead of U8 (256,)"),
    ("nf4, nested", None, {"weight.nested_absmax": None}, "lacks {}weight.nested_absmax"),
]


@pytest.mark.parametrize(("form", "config", "change", "says"), BROKEN)
def test_a_part_that_is_missing_misshapen_or_foreign_is_named(
    tmp_path: Path, form: str, config: object, change: dict[str, torch.Tensor | None], says: str
) -> None:
    write(tmp_path, form)
    edit(tmp_path, {DOWN + part: tensor for part, tensor in change.items()})
    if config is not None:
        configure(tmp_path, config)
    with pytest.raises(ModelError) as caught:
        check_weights(tmp_path, read_config(tmp_path))
    said = str(caught.value)
    assert says.replace("{}", DOWN) in said and said.startswith(str(tmp_path)) and "\n" not in said


def test_a_model_that_is_quantised_in_its_config_alone_is_refused(tmp_path: Path) -> None:
    configure(make_tiny_model(tmp_path), GPTQ)
    with pytest.raises(
        ModelError,
        match=r"model\.safetensors: config\.json says GPTQ of 4 bits, but the weights hold no quant",
    ):
        check_weights(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize(
    ("form", "part", "tensor", "says"),
    [
        (
            ACT_ORDER,
            "g_idx",
            torch.full((96,), 3, dtype=torch.int32),
            "g_idx names groups that there are not",
        ),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            torch.tensor([*b'{"shape": [96, 64], "blocksize": 64}'], dtype=torch.uint8),
            "its state says shape [96, 64] in blocks of 64",
        ),
    ],
)
def test_numbers_that_contradict_the_shapes_are_named(
    tmp_path: Path, form: str, part: str, tensor: torch.Tensor, says: str
) -> None:
    write(tmp_path, form)
    edit(tmp_path, {DOWN + part: tensor})
    with pytest.raises(ModelError) as caught:
        open_weights(tmp_path).read(DOWN + "weight")
    assert f"'{DOWN}weight' cannot be computed" in str(caught.value) and says in str(caught.value)


def test_what_becomes_of_quantised_weights_is_said(tmp_path: Path) -> None:
    write(tmp_path, "GPTQ")
    weights, scales = quantisation_notes(tmp_path, "bfloat16")
    assert weights == (
        f"{tmp_path} holds weights in GPTQ of 4 bits: they are dequantised and held in bfloat16; "
        "model.quantisation: fp8 holds 8 bits"
    )
    assert scales == (
        f"{tmp_path} holds scales of K/V, which nothing uses: K/V has 16 bits, or with decode.kv_dtype: "
        "int8 a scale of its own for each row"
    )
    assert next(iter(quantisation_notes(tmp_path, "fp8"))).endswith("they are dequantised and held in fp8")
    write(tmp_path, "compressed-tensors, channels")
    assert list(quantisation_notes(tmp_path, "fp8")) == [scales]
    again = "they are rounded again, to one for each output, by which their error grows from 2.6% to 3.7%"
    for form in ("ModelOpt", "fp8, blocks"):
        write(tmp_path, form)
        said, last = quantisation_notes(tmp_path, "fp8")
        assert said.endswith(again) and last == scales
    assert not list(quantisation_notes(make_tiny_model(tmp_path / "plain"), "bfloat16"))


@pytest.mark.parametrize(("form", "grows"), [("channel", False), ("tensor", True), ("block", True)])
def test_what_is_said_of_rounding_again_is_measured(form: str, grows: bool) -> None:
    """Root mean squares over a matrix of normal numbers, of which an output has 2,048."""
    weight_OI = torch.randn(512, 2048, generator=torch.Generator().manual_seed(1))
    largest = weight_OI.view(4, 128, 16, 128).abs().amax((1, 3)).repeat_interleave(128, 0)
    scales = {
        "channel": channel_scales(weight_OI),
        "tensor": one_scale(weight_OI),
        "block": largest.repeat_interleave(128, 1) / 448,
    }[form]
    file_OI = (weight_OI / scales).to(torch.float8_e4m3fn).float() * scales
    rows = cpu_quantise_rows(file_OI.bfloat16().float())
    held_OI = rows.values_TI.float() * rows.scale_T1
    file, held = (float((x - weight_OI).norm() / weight_OI.norm()) for x in (file_OI, held_OI))
    assert file == pytest.approx(0.0264, abs=0.0005)
    assert held == pytest.approx(0.0375 if grows else file, abs=0.003 if grows else 0.0005)


@pytest.mark.parametrize(
    ("file", "content"), [("quantize_config.json", GPTQ), ("quant_config.json", OLD_AWQ)]
)
def test_a_file_of_its_own_may_say_it(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    meant = write(tmp_path, "AWQ" if content is OLD_AWQ else "GPTQ")
    configure(tmp_path, None)
    (tmp_path / file).write_text(json.dumps({key: content[key] for key in content if key != "quant_method"}))
    check_weights(tmp_path, read_config(tmp_path))
    assert torch.equal(open_weights(tmp_path).read(DOWN + "weight"), meant[DOWN + "weight"])


MIXED = w4a16() | {"config_groups": w4a16()["config_groups"] | {"8": w4a16(8)["config_groups"]["group_0"]}}
REFUSED: list[tuple[object, str]] = [
    (AWQ | {"version": "gemv"}, r"quantised by awq \(gemv\) are not served"),
    (AWQ | {"bits": 8}, "by awq in 8 bits"),
    (GPTQ | {"bits": 3}, "by gptq in 3 bits"),
    (GPTQ | {"bits": None}, "by gptq in None bits"),
    (GPTQ | {"checkpoint_format": "marlin"}, r"by gptq \(marlin\)"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"by bitsandbytes \(int8\)"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"by bitsandbytes \(fp4\)"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"by modelopt \(NVFP4\)"),
    ({"quant_method": "mxfp4"}, "by mxfp4"),
    ({"quant_method": "aqlm"}, "by aqlm"),
    ({"quant_method": "eetq", "weights": "int8"}, "by eetq"),
    ({"quant_method": "hqq", "quant_config": {}}, "by hqq"),
    ({"quant_method": "quanto", "weights": "int4"}, "by quanto"),
    (groups("group", num_bits=4, type="int"), r"weights of 4 bits \(int, by group\)"),
    (groups("tensor_group", num_bits=4), r"weights of 4 bits \(float, by tensor_group\)"),
    (groups("channel", type="int"), r"8 bits \(int, by channel\)"),
    (w4a16(2), r"2 bits \(int, by group\)"),
    (w4a16() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse or rotated"),
    (w4a16() | {"transform_config": {"config_groups": {}}}, "sparse or rotated"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "with 0 kinds of weights"),
    (MIXED, "with 2 kinds of weights"),
    (GPTQ | {"is_marlin_format": True}, r"by gptq \(marlin\)"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_what_is_not_served_names_what_is(tmp_path: Path, given: object, says: str) -> None:
    make_tiny_model(tmp_path)
    configure(tmp_path, given)
    with pytest.raises(ModelError, match=rf"{says}.*: take the model in 16 bits, or in FP8 \(compressed"):
        read_config(tmp_path)


def test_a_section_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'fp8' is not a section of keys"):
        quantised_form(tmp_path, {"quantization_config": "fp8"})
    with pytest.raises(ModelError, match=r"\[128\] is no size of blocks"):
        quantised_form(tmp_path, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}})
    with pytest.raises(ModelError, match="is not understood"):
        quantised_form(tmp_path, {"quantization_config": w4a16() | {"config_groups": ["W4A16"]}})
    with pytest.raises(ModelError, match="group_size = 0 is no number of weights"):
        quantised_form(tmp_path, {"quantization_config": AWQ | {"group_size": 0}})
