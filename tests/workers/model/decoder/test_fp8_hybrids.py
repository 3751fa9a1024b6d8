"""Tests hybrid models in FP8: against transformers with the same matrices and inputs rounded, from FP8 files,
and on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from deltafront.kernels.layers.fp8 import cpu_quantise_rows
from deltafront.tests.numerics import row_errors
from deltafront.tests.workers.model.weights.quantised_checkpoints import BLOCK, block_scales, fp8
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights

from .cases import (
    CUTS,
    TOKENS,
    Case,
    Pages,
    expected_logits,
    load_stages,
    make_case,
    prefill,
    table_of,
    transformers_model,
)

HYBRIDS = "qwen3.5", "qwen3.5-ends-linear", "qwen3.5-moe", "qwen3-next", "qwen3-next-mixed"
KEPT = "lm_head", "mlp.gate", "shared_expert_gate", "in_proj_ba", "in_proj_b", "in_proj_a"
"""The modules of transformers whose matrices keep their dtype."""


@pytest.fixture(scope="module", params=HYBRIDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


def rounded_logits(case: Case) -> torch.Tensor:
    """Return the logits of transformers' model, in which all linear layers but KEPT round rows of weights and
    inputs to FP8."""
    model = transformers_model(case.directory, torch.float32)
    kept = {module.weight.data_ptr() for name, module in model.named_modules() if name.endswith(KEPT)}
    model.set_experts_implementation("eager")
    plain = F.linear

    def linear(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if weight_OI.data_ptr() in kept:
            return plain(x, weight_OI, bias_O)
        x_TI, rounded_OI = x.flatten(0, -2), cpu_quantise_rows(weight_OI).dequantised(torch.float32)
        rounded_TI = cpu_quantise_rows(x_TI).dequantised(torch.float32)
        return plain(rounded_TI, rounded_OI, bias_O).view(*x.shape[:-1], -1)

    with torch.no_grad(), mock.patch.object(F, "linear", linear):
        logits: torch.Tensor = model(case.ids_T[None]).logits[0]
    return logits


def assert_is_rounded(logits_TV: torch.Tensor, case: Case, rows: Sequence[int]) -> None:
    """Assert that logits are far closer to `rounded_logits` than those are to logits without rounding.

    Both sides compute in float32. Where their sums differ, some inputs are rounded to another e4m3 number,
    and later rows and layers inherit that: up to 0.17 of FP8's error was measured. Another rounded matrix
    per layer gives 0.55.
    """
    rounded_TV = rounded_logits(case)
    errors_T = row_errors(rounded_TV, case.logits_TV)
    assert float(row_errors(logits_TV, rounded_TV[rows]).mean()) < 0.3 * float(errors_T.mean())


@pytest.mark.parametrize(("stages", "cuts"), [(1, "whole"), (1, "ragged"), (2, "chunks")])
def test_fp8_logits_equal_transformers_with_rounded_products(case: Case, stages: int, cuts: str) -> None:
    loaded = load_stages(case, stages, quantisation="fp8")
    assert all(stack.quantised for stack in loaded)
    logits_TV = prefill(loaded, case.ids_T, CUTS[cuts], Pages(case.config, [table_of(TOKENS)]))
    assert_is_rounded(logits_TV, case, range(TOKENS))


def test_fp8_decode_steps_equal_transformers_with_rounded_products(case: Case) -> None:
    """Steps through two stages, from the states that prefill left."""
    stages, pages = load_stages(case, 2, quantisation="fp8"), Pages(case.config, [table_of(TOKENS)])
    rows = range(120, TOKENS)
    prefill(stages, case.ids_T[:120], (120,), pages)
    logits = []
    for position in rows:
        hidden_TC = stages[0].embed(case.ids_T[position : position + 1])
        for stage in stages:
            given = hidden_TC, torch.tensor([position]), pages.step([position])
            hidden_TC = stage.forward(*given, row_states=pages.step_states())
        logits.append(stages[-1].logits(hidden_TC))
    assert_is_rounded(torch.cat(logits), case, rows)


def test_fp8_errors_are_to_those_of_bf16_as_their_epsilons(case: Case) -> None:
    """e4m3's epsilon is 16 times bf16's."""
    pages, stages = Pages(case.config, [table_of(TOKENS)]), load_stages(case, 2, quantisation="fp8")
    fp8_TV = prefill(stages, case.ids_T, CUTS["chunks"], pages)
    bf16_TV = expected_logits(case.directory, case.ids_T, torch.bfloat16)
    bf16_T, fp8_T = (row_errors(x_TV, case.logits_TV) for x_TV in (bf16_TV, fp8_TV))
    assert float(fp8_T.mean()) < 16 * float(bf16_T.mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_in_fp8_compute_the_same_bits_as_one(case: Case, dtype: torch.dtype) -> None:
    logits = [
        prefill(stages, case.ids_T, CUTS["ragged"], Pages(case.config, [table_of(TOKENS)], dtype))
        for stages in (load_stages(case, count, dtype, quantisation="fp8") for count in (1, 2))
    ]
    assert torch.equal(*logits)


# --- checkpoints in FP8


def in_blocks(plain: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Store tensors as in Qwen's FP8 checkpoints. Returns the files' tensors, and those that they mean."""
    stored, meant = dict(plain), dict(plain)
    for name, tensor in plain.items():
        stem = name.removesuffix(".weight")
        if ".layers." in name and tensor.dim() == 2 and not stem.endswith(KEPT):
            parts, meant[name] = fp8("weight_scale_inv", block_scales)(tensor)
            stored |= {f"{stem}.{part}": parts[part] for part in ("weight", "weight_scale_inv")}
    further = {"mtp.layers.0.mlp.down_proj.weight": torch.zeros(96, 96, dtype=torch.float8_e4m3fn)}
    return stored | further | {"mtp.layers.0.mlp.down_proj.weight_scale_inv": torch.ones(2, 2)}, meant


@pytest.mark.parametrize(
    "family", ["qwen3.5", "qwen3.5-multimodal", "qwen3.5-moe-multimodal", "qwen3-next-mixed"]
)
def test_reads_hybrids_in_block_scaled_fp8(tmp_path: Path, family: str) -> None:
    """Some matrices of a layer have scales, others 16 bits; layers that predict further tokens are unread."""
    case = make_case(family, tmp_path / "plain")
    raw = json.loads((case.directory / "config.json").read_text())
    stored, meant = in_blocks(load_file(case.directory / "model.safetensors"))
    scaled = {name.split(".")[-2] for name in stored if name.endswith("_scale_inv")}
    assert {"q_proj", "o_proj", "out_proj", "down_proj"} < scaled
    assert scaled & {"in_proj_qkv", "in_proj_qkvz"} and scaled.isdisjoint({"gate", *KEPT})
    kept = [name.removesuffix(".weight") for name in stored if name.removesuffix(".weight").endswith(KEPT)]
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    method |= {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": kept}
    logits: dict[str, list[torch.Tensor]] = {}
    for kind, tensors in (("meant", meant), ("stored", stored)):
        (directory := tmp_path / kind).mkdir()
        said = {"quantization_config": method} if kind == "stored" else {}
        (directory / "config.json").write_text(json.dumps(raw | said))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config = read_config(directory)
        check_weights(directory, config)
        found = replace(case, directory=directory, config=config)
        for held in (None, "fp8"):
            stages, pages = load_stages(found, 2, quantisation=held), Pages(config, [table_of(TOKENS)])
            logits.setdefault(str(held), []).append(prefill(stages, case.ids_T, CUTS["chunks"], pages))
    for pair in logits.values():
        assert torch.equal(*pair)
    assert not torch.equal(*(pair[0] for pair in logits.values()))


# --- on a GPU


def layer_outputs(stack: LayerStack, inputs: Sequence[torch.Tensor], case: Case) -> list[torch.Tensor]:
    """Return each layer's output for an input of its own, on the CPU."""
    pages = Pages(case.config, [table_of(TOKENS)], torch.bfloat16, stack.device.type)
    return [
        stack.forward(
            hidden_TC.to(stack.device), torch.arange(TOKENS), pages.chunk(0, 0), range(layer, layer + 1)
        ).cpu()
        for layer, hidden_TC in enumerate(inputs)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_fp8_layers_equal_those_of_the_cpu(case: Case) -> None:
    """Every layer gets the same input on both. The differences of bf16 that FP8 rounds are below FP8's own
    error: inputs that differ by a unit in the last place give 0.6 of it.

    The median row is compared: in a mixture, rounding may choose another expert.
    """
    plain, cpu, gpu = (
        load_stages(case, 1, torch.bfloat16, device, kind)[0]
        for device, kind in (("cpu", None), ("cpu", "fp8"), ("cuda", "fp8"))
    )
    inputs = [plain.embed(case.ids_T)]
    for _layer in range(case.config.layers):
        inputs += layer_outputs(cpu, inputs, case)[-1:]
    wanted, wide, found = (layer_outputs(stack, inputs[:-1], case) for stack in (cpu, plain, gpu))
    for layer, (ours_TC, wanted_TC, wide_TC) in enumerate(zip(found, wanted, wide, strict=True)):
        own_T, fp8_T = row_errors(ours_TC, wanted_TC), row_errors(wide_TC, wanted_TC)
        assert float(own_T.median()) < float(fp8_T.median()), layer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_fp8_logits_are_no_worse_than_on_the_cpu(case: Case) -> None:
    def errors(device: str) -> float:
        pages = Pages(case.config, [table_of(TOKENS)], torch.bfloat16, device)
        stages = load_stages(case, 2, torch.bfloat16, device, "fp8")
        logits_TV = prefill(stages, case.ids_T, CUTS["chunks"], pages)
        return float(row_errors(logits_TV.cpu(), case.logits_TV).median())

    assert errors("cuda") < 1.3 * errors("cpu")
