"""Tests reading quantised checkpoints in each published format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafront.kernels.layers.fp8 import cpu_quantise_rows
from deltafront.tests.numerics import row_errors
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights, quantisation_notes
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.quantised import quantised_form
from deltafront.workers.model.weights.sources import open_weights
from deltafront.workers.model.weights.stack_weights import StackSpec, read_stack

from ...tiny_model import VOCAB, make_tiny_model
from ..decoder.cases import Case, Pages, expected_logits, likeliest, load_stages, prefill, table_of
from .quantised_checkpoints import (
    AWQ,
    DOWN,
    FORMS,
    GPTQ,
    OLD_AWQ,
    QUERY,
    channel_scales,
    configure,
    edit,
    groups,
    one_scale,
    w4a16,
    write,
)


@pytest.mark.parametrize("form", FORMS)
def test_reads_quantised_matrices_as_values_times_scales(tmp_path: Path, form: str) -> None:
    meant = write(tmp_path, form)
    check_weights(tmp_path, read_config(tmp_path))
    source = open_weights(tmp_path)
    assert source.names() == meant.keys()
    for name, expected in meant.items():
        assert torch.equal(source.read(name).float(), expected), name


@pytest.mark.parametrize("form", FORMS)
def test_quantised_model_equals_transformers_on_dequantised_weights(tmp_path: Path, form: str) -> None:
    """The test prefills through two stages, decodes, extends by a chunk, and decodes 64 tokens."""
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
    assert found == likeliest(tmp_path / "plain", ids_T, found)


def test_reads_quantised_multimodal_checkpoints(tmp_path: Path) -> None:
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
def test_each_rank_loads_its_part_of_the_dequantised_weights(tmp_path: Path, form: str) -> None:
    meant = write(tmp_path, form)
    config, half = read_config(tmp_path), slice(32, 64)
    cpu, layers = torch.device("cpu"), range(config.layers)
    ends = {"embedding": True, "head": True, "rank": 1, "ranks": 2}
    spec = StackSpec(config=config, layers=layers, dtype=torch.float32, device=cpu, **ends)
    weights = read_stack(tmp_path, spec)
    assert torch.equal(weights.mlps[1].down.weight_OI, meant[DOWN + "weight"][:, 48:])
    assert torch.equal(weights.attentions[1].qkv.weight_OI[half], meant[QUERY + "weight"][128:][half])


def test_reads_modelopt_settings_from_hf_quant_config(tmp_path: Path) -> None:
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
def test_error_names_missing_misshapen_and_unexpected_tensors(
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


def test_refuses_plain_weights_with_a_quantization_config(tmp_path: Path) -> None:
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
def test_error_names_quantisation_settings_that_contradict_shapes(
    tmp_path: Path, form: str, part: str, tensor: torch.Tensor, says: str
) -> None:
    write(tmp_path, form)
    edit(tmp_path, {DOWN + part: tensor})
    with pytest.raises(ModelError) as caught:
        open_weights(tmp_path).read(DOWN + "weight")
    assert f"'{DOWN}weight' cannot be computed" in str(caught.value) and says in str(caught.value)


def test_load_notes_say_in_which_dtype_quantised_weights_are_held(tmp_path: Path) -> None:
    write(tmp_path, "GPTQ")
    weights, scales = quantisation_notes(tmp_path, "bfloat16")
    assert weights == (
        f"{tmp_path} holds weights in GPTQ of 4 bits: they are dequantised and held in bfloat16; "
        "model.quantisation: fp8 holds 8 bits"
    )
    assert scales == (
        f"{tmp_path} holds scales of KV, which nothing uses: KV has 16 bits, or with decode.kv_dtype: "
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
def test_requantising_fp8_by_rows_has_the_error_that_notes_state(form: str, grows: bool) -> None:
    """Errors are relative root mean squares over a matrix of normal numbers with 2,048 inputs."""
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
def test_reads_gptq_and_awq_settings_from_their_own_files(
    tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
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
def test_refuses_unknown_quantisation_and_names_supported_ones(
    tmp_path: Path, given: object, says: str
) -> None:
    make_tiny_model(tmp_path)
    configure(tmp_path, given)
    with pytest.raises(ModelError, match=rf"{says}.*: take the model in 16 bits, or in FP8 \(compressed"):
        read_config(tmp_path)


def test_error_names_malformed_quantisation_settings(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'fp8' is not a section of keys"):
        quantised_form(tmp_path, {"quantization_config": "fp8"})
    with pytest.raises(ModelError, match=r"\[128\] is no size of blocks"):
        quantised_form(tmp_path, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}})
    with pytest.raises(ModelError, match="is not understood"):
        quantised_form(tmp_path, {"quantization_config": w4a16() | {"config_groups": ["W4A16"]}})
    with pytest.raises(ModelError, match="group_size = 0 is no number of weights"):
        quantised_form(tmp_path, {"quantization_config": AWQ | {"group_size": 0}})
