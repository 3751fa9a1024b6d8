"""Tests reading gpt-oss as published: experts in MXFP4, all of a layer in one tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from deltafront.tests.numerics import row_errors
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights, quantisation_notes
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights.sources import open_weights

from ..decoder.cases import (
    CUTS,
    TOKENS,
    Case,
    Pages,
    expected_logits,
    load_stages,
    make_case,
    prefill,
    table_of,
)

EXPERTS = 8
LAYER = "model.layers.3.mlp.experts"


def write_both(plain: Path, directory: Path, values_directory: Path) -> None:
    """Write the checkpoint `plain` with random experts: in MXFP4, and these experts' values."""
    tensors = load_file(plain / "model.safetensors")
    values, draw = dict(tensors), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw).to(torch.uint8)
        scales = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=draw).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(values, values_directory / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((plain / "config.json").read_text())
    (values_directory / "config.json").write_text(json.dumps(said))
    said["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    """A case with experts in MXFP4, and the directory of the same model in 32 bits."""
    plain, directory, values = (tmp_path_factory.mktemp(name) for name in ("plain", "mxfp4", "values"))
    ids_T = make_case("gpt-oss", plain).ids_T
    write_both(plain, directory, values)
    return Case(directory, read_config(directory), ids_T, expected_logits(values, ids_T)), values


def test_logits_equal_transformers_on_dequantised_experts(both: tuple[Case, Path]) -> None:
    case, _ = both
    check_weights(case.directory, case.config)
    logits_TV = prefill(
        load_stages(case, 2), case.ids_T, CUTS["ragged"], Pages(case.config, [table_of(TOKENS)])
    )
    assert float(row_errors(logits_TV, case.logits_TV).max()) < 1e-4


def test_both_forms_of_a_checkpoint_have_the_same_tensors(both: tuple[Case, Path]) -> None:
    case, plain = both
    sources = [open_weights(directory) for directory in (case.directory, plain)]
    assert sources[0].names() == sources[1].names() == case.config.shapes().keys()
    for name, shape in case.config.shapes().items():
        found, wanted = (source.read(name) for source in sources)
        assert tuple(found.shape) == shape and torch.equal(found.float(), wanted.float()), name


def test_start_says_what_experts_are_held_in(both: tuple[Case, Path]) -> None:
    (note,) = quantisation_notes(both[0].directory, "bfloat16")
    assert "MXFP4: they are dequantised and held in bfloat16" in note


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gate_up_proj_scales", None, "lacks model.layers.3.mlp.experts.0.gate_proj.weight_scales"),
        ("down_proj_blocks", lambda x: x[:, :, :, :8].contiguous(), "weight_blocks is U8"),
        ("down_proj_bias", lambda x: x[: EXPERTS - 1].contiguous(), "lack"),
        ("down_proj_bias", lambda x: x[:, :-1].contiguous(), "down_proj.bias"),
    ],
)
def test_refuses_experts_that_do_not_fit(
    both: tuple[Case, Path], tmp_path: Path, name: str, change: Any, words: str
) -> None:
    tensors = load_file(both[0].directory / "model.safetensors")
    taken = tensors.pop(f"{LAYER}.{name}")
    tensors |= {} if change is None else {f"{LAYER}.{name}": change(taken)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((both[0].directory / "config.json").read_text())
    with pytest.raises(ModelError, match=words):
        check_weights(tmp_path, read_config(tmp_path))
