"""Tests loading experts: shared among ranks, quantised to FP8, and from FP8 checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.kernels.experts.routing import Router
from deltafront.tests.numerics import assert_rows_close, row_errors
from deltafront.tests.reference.experts import mixture as reference_mixture
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.headers import check_weights
from deltafront.workers.model.directory.layer_config import MixtureConfig
from deltafront.workers.model.directory.model_files import WEIGHT_INDEX, ModelError
from deltafront.workers.model.weights.gguf.source import GgufSource
from deltafront.workers.model.weights.mixture_weights import MixtureWeights
from deltafront.workers.model.weights.projections import Fp8Linear
from deltafront.workers.model.weights.stack_weights import StackSpec, read_stack

SHAPE = replace(
    SHAPES["30b-a3b"],
    layers=2,
    hidden=64,
    intermediate=96,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=99,
    positions=512,
    mixture=MixtureConfig(experts=6, per_token=2, normed=True),
)
BLOCK = 32
QWEN = Router(per_token=2, normed=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_model(tmp_path, SHAPE, torch.device("cpu"))
    return tmp_path


def read(directory: Path, **more: Any) -> MixtureWeights:
    """Read the mixture weights of layer 1."""
    spec = StackSpec(
        config=read_config(directory),
        layers=range(1, 2),
        embedding=False,
        head=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    (weights,) = read_stack(directory, replace(spec, **more)).mlps
    assert isinstance(weights, MixtureWeights)
    return weights


def stored(directory: Path) -> dict[str, torch.Tensor]:
    prefix = "model.layers.1.mlp."
    tensors = load_file(directory / "model-1.safetensors")
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def wanted(directory: Path, x_TC: torch.Tensor, router: Router = QWEN) -> torch.Tensor:
    tensors = {name: x.float() for name, x in stored(directory).items()}

    def stacked(*modules: str) -> torch.Tensor:
        return torch.stack(
            [torch.cat([tensors[f"experts.{e}.{module}.weight"] for module in modules]) for e in range(6)]
        )

    logits_TE = x_TC @ tensors["gate.weight"].T
    experts = stacked("gate_proj", "up_proj"), stacked("down_proj")
    return reference_mixture(x_TC, logits_TE, *experts, router)


def test_each_rank_loads_its_part_of_every_expert(directory: Path) -> None:
    x_TC = torch.randn(9, 64)
    wanted_TC = wanted(directory, x_TC)
    assert_rows_close(read(directory)(x_TC).double(), wanted_TC, dtype=torch.float32)
    parts = [read(directory, rank=rank, ranks=2) for rank in range(2)]
    assert parts[0].gate_up.weight_OI.shape == (6 * 96, 64) and parts[0].down.weight_OI.shape == (6 * 64, 48)
    assert torch.equal(parts[0].router_EC, parts[1].router_EC)
    summed_TC = parts[0](x_TC) + parts[1](x_TC)
    assert_rows_close(summed_TC.double(), wanted_TC, dtype=torch.float32)


def test_fp8_experts_keep_an_unquantised_router(directory: Path) -> None:
    plain, fp8, x_TC = read(directory), read(directory, quantisation="fp8"), torch.randn(40, 64)
    assert isinstance(fp8.gate_up, Fp8Linear) and isinstance(fp8.down, Fp8Linear)
    assert torch.equal(fp8.router_EC, plain.router_EC)
    errors_T = row_errors(fp8(x_TC), plain(x_TC))
    assert 0.005 < float(errors_T.mean()) < 0.1, "experts, not routes, are rounded"


def test_reads_experts_in_block_scaled_fp8(directory: Path) -> None:
    """In Qwen's published checkpoints each expert's matrix has scales, but the router has none."""
    path, index = directory / "model-1.safetensors", json.loads((directory / WEIGHT_INDEX).read_text())
    tensors, meant = load_file(path), dict[str, torch.Tensor]()
    for name, weight_OI in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        scale = 1 + torch.rand([-(-size // BLOCK) for size in weight_OI.shape])
        tensors[name] = weight_OI.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        index["weight_map"][f"{name}_scale_inv"] = path.name
        spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        meant[name] = tensors[name].float() * spread[: weight_OI.shape[0], : weight_OI.shape[1]]
    save_file(tensors, path)
    (directory / WEIGHT_INDEX).write_text(json.dumps(index))
    raw = json.loads((directory / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": method}))
    names = [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(6)]
    weights = read(directory)
    assert torch.equal(weights.down.weight_OI, torch.cat([meant[name] for name in names]))
    assert torch.equal(weights.router_EC, tensors["model.layers.1.mlp.gate.weight"].float())


GLM = replace(
    SHAPE,
    architecture="Glm4MoeForCausalLM",
    qk_norm=False,
    qkv_bias=True,
    rotary_dim=8,
    mixture=MixtureConfig(
        experts=6,
        per_token=2,
        normed=True,
        sigmoid=True,
        shared_width=96,
        dense_layers=(0,),
        dense_width=160,
    ),
)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Write a model with experts and a shared MLP in all layers but the first."""
    write_model(tmp_path, GLM, torch.device("cpu"))
    return tmp_path


def wanted_beside(directory: Path, x_TC: torch.Tensor) -> torch.Tensor:
    tensors = {name: x.double() for name, x in stored(directory).items()}
    router = Router(per_token=2, normed=True, bias_E=tensors["gate.e_score_correction_bias"])
    gate, up, down = (tensors[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    shared_TC = (torch.nn.functional.silu(x_TC.double() @ gate.T) * (x_TC.double() @ up.T)) @ down.T
    return wanted(directory, x_TC, router) + shared_TC


def test_all_tokens_use_the_shared_expert(beside: Path) -> None:
    x_TC = torch.randn(9, 64)
    wanted_TC = wanted_beside(beside, x_TC)
    assert_rows_close(read(beside)(x_TC).double(), wanted_TC, dtype=torch.float32)
    parts = [read(beside, rank=rank, ranks=2) for rank in range(2)]
    assert_rows_close((parts[0](x_TC) + parts[1](x_TC)).double(), wanted_TC, dtype=torch.float32)
    fp8 = read(beside, quantisation="fp8")
    assert isinstance(fp8.shared_gate_up, Fp8Linear) and isinstance(fp8.shared_down, Fp8Linear)
    errors_T = row_errors(fp8(x_TC), wanted_TC.float())
    assert 0.005 < float(errors_T.mean()) < 0.1


def test_sigmoid_router_stays_in_float32(beside: Path) -> None:
    """Biases differ little compared with their size, so they would be equal in 16 bits."""
    path = beside / "model-1.safetensors"
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias_E = 30 + torch.arange(6) / 1000
    save_file(load_file(path) | {name: bias_E}, path)
    weights = read(beside, dtype=torch.bfloat16)
    assert weights.bias_E is not None and torch.equal(weights.bias_E, bias_E)
    assert weights.router_EC.dtype == torch.float32 and weights.gate_up.weight_OI.dtype == torch.bfloat16
    weights(torch.randn(3, 64, dtype=torch.bfloat16))


def test_error_names_a_missing_expert(directory: Path) -> None:
    index = json.loads((directory / WEIGHT_INDEX).read_text())
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    del index["weight_map"][name]
    (directory / WEIGHT_INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"experts\.4\.up_proj"):
        check_weights(directory, read_config(directory))
    with pytest.raises(ModelError, match=r"experts\.4\.up_proj"):
        read(directory)


def test_quantised_gguf_experts_are_dequantised_one_by_one(tmp_path: Path) -> None:
    rows_EOI = torch.randn(3, 8, 64).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    data = gguf.quants.quantize(rows_EOI, kind)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    writer.add_tensor("blk.0.ffn_up_exps.weight", data, raw_dtype=kind)
    writer.add_tensor("token_embd.weight", rows_EOI[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source, wanted_EOI = GgufSource(tmp_path / "model.gguf"), gguf.quants.dequantize(data, kind)
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(3)]
    assert source.names() == {"model.embed_tokens.weight", *names}
    for expert, name in enumerate(names):
        assert torch.equal(source.read(name), torch.from_numpy(wanted_EOI[expert]))
