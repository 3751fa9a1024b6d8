"""Compares `deltafront size` with Llama 3.1's model cards, and its choices with all possible ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from deltafront.benchmarks.engine import model as engine
from deltafront.service.cli import size
from deltafront.service.cli.size import GIB, SHAPES, sizing
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.layer_config import MixtureConfig
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.weights.stack_weights import StackSpec, read_stack
from deltafront.workers.settings import Dtype, Quantisation

from ...workers.tiny_model import HIDDEN, make_tiny_model
from .test_main import run

MIXTURE = replace(
    engine.SHAPES["30b-a3b"],
    layers=4,
    hidden=64,
    intermediate=32,
    q_heads=8,
    kv_heads=4,
    head_dim=16,
    vocab=500,
    mixture=MixtureConfig(experts=6, per_token=2, normed=True),
)
MIXED = replace(
    engine.SHAPES["air-8"],
    layers=4,
    hidden=64,
    intermediate=32,
    q_heads=8,
    kv_heads=4,
    head_dim=16,
    rotary_dim=8,
    vocab=500,
    mixture=MixtureConfig(
        experts=6,
        per_token=2,
        normed=True,
        sigmoid=True,
        shared_width=32,
        dense_layers=(0,),
        dense_width=96,
    ),
)


def test_llama_sizes_equal_the_model_cards() -> None:
    assert SHAPES["8b"].weights(range(32)) == 8_030_261_248
    assert SHAPES["70b"].weights(range(80)) == 70_553_706_496
    found = sizing("8b", SHAPES["8b"], 131_072, 1, 80)
    assert (found.kv_token_bytes, found.kv_bytes, found.pages) == (128 << 10, 16 * GIB, 8192)
    assert sizing("70b", SHAPES["70b"], 131_072, 1, 80).kv_bytes == 40 * GIB


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("gpu", [24.0, 79.6, 267.7])
@pytest.mark.parametrize("tokens", [1000, 131_072, 524_288])
@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_sizing_chooses_the_fewest_stages_and_ranks_that_fit(
    name: str, gpu: float, tokens: int, concurrency: int
) -> None:
    model, room = SHAPES[name], (gpu - size.RESERVE_GIB) * GIB
    found = sizing(name, model, tokens, concurrency, gpu)
    fitting = [
        n for n in range(1, model.layers + 1) if size.stage_bytes(model, n, tokens, "bfloat16") <= room
    ]
    assert found.stages == (fitting[0] if fitting else None)
    pages = found.pages * 16
    holding = {
        ranks: max(
            (n for n in range(1, 300) if size.rank_bytes(model, ranks, n * pages, "bfloat16") <= room),
            default=0,
        )
        for ranks in (1, 2, 4, 8)
    }
    gpus = {ranks: -(-concurrency // most) * ranks for ranks, most in holding.items() if most}
    assert found.ranks == min(gpus, key=lambda ranks: (gpus[ranks], ranks), default=8)
    most = min(holding[found.ranks], concurrency)
    assert found.contexts_per_worker == most
    if found.decode_workers is None:
        assert most == 0 and found.decode_bytes > room and found.gpus is None
    else:
        assert found.decode_bytes <= room
        assert (found.decode_workers - 1) * most < concurrency <= found.decode_workers * most
        decode = found.decode_workers * found.ranks
        assert found.gpus == (None if found.stages is None else found.stages + decode)


def test_eight_ranks_hold_70b_which_no_single_gpu_does() -> None:
    """Each GPU has an eighth of layers, output head and KV cache, and the whole embedding."""
    model, tokens = SHAPES["70b"], 131_072
    table = model.vocab * model.hidden * 2
    eighth = (model.weights(range(80)) * 2 - table) / 8 + table + 40 * GIB / 8
    assert size.rank_bytes(model, 8, tokens, "bfloat16") == pytest.approx(eighth, rel=1e-3)
    assert size.rank_bytes(model, 1, tokens, "bfloat16") == size.stage_bytes(model, 1, tokens, "bfloat16")
    found = sizing("70b", model, tokens, 1, 79, ranks=8)
    assert (found.ranks, found.contexts_per_worker, found.gpus) == (8, 1, 3 + 8)
    assert size.row(found)["decode"] == "1 × 8 × 23.1"
    with pytest.raises(ModelError, match=r"decode\.tensor_parallel: 3 ranks"):
        sizing("70b", model, tokens, 1, 79, ranks=3)


def test_each_stage_needs_less_memory_with_more_stages() -> None:
    model = SHAPES["70b"]
    stages = [size.stage_bytes(model, n, 131_072, "bfloat16") for n in (1, 2, 4, 8, 16)]
    assert stages == sorted(stages, reverse=True)
    assert size.stage_bytes(model, 1, 17, "bfloat16") == size.stage_bytes(model, 1, 32, "bfloat16")
    halves = size.stage_bytes(model, 1, 32, "float32") / size.stage_bytes(model, 1, 32, "bfloat16")
    assert halves == 2


@pytest.mark.parametrize("shape", [None, MIXTURE, MIXED])
def test_counts_exactly_the_matrices_that_workers_quantise_in_8_bits(
    tmp_path: Path, shape: ModelConfig | None
) -> None:
    """Counts the tensors of a loaded model."""
    directory = tmp_path / "tiny"
    if shape is None:
        make_tiny_model(directory)
    else:
        engine.write_model(directory, shape, torch.device("cpu"))
    config = read_config(directory)

    def loaded(quantisation: Quantisation | None, layers: range, mlps: range, ranks: int = 1) -> int:
        weights = read_stack(
            directory,
            StackSpec(
                config=config,
                layers=layers,
                mlps=mlps,
                embedding=True,
                head=True,
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
                quantisation=quantisation,
                ranks=ranks,
            ),
        )
        return sum(tensor.nbytes for tensor in {id(one): one for one in _tensors(weights)}.values())

    whole = range(config.layers)
    for kind in (None, *get_args(Quantisation)):
        assert size.weight_bytes(config, whole, "bfloat16", kind) == loaded(kind, whole, whole)
        for layers, mlps in ((range(1, 4), range(3)), (range(2), range(1)), (range(2, 4), range(1, 4))):
            counted = size.weight_bytes(config, layers, "bfloat16", kind, mlps=mlps)
            assert counted == loaded(kind, layers, mlps)
        for ranks in size.rank_counts(config):
            assert size.rank_bytes(config, ranks, 0, "bfloat16", kind) == loaded(kind, whole, whole, ranks)


@pytest.mark.parametrize("kind", [None, "fp8"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_size_reports_the_bytes_of_the_fullest_stage(stages: int, kind: Quantisation | None) -> None:
    model, room = SHAPES["8b"], 131_072 * 2
    needs = []
    for stage, share in enumerate(model.split(stages)):
        ends = {"embedding": stage == 0, "head": stage == stages - 1}
        weights = size.weight_bytes(model, share.layers, "bfloat16", kind, mlps=share.mlps, **ends)
        needs.append(weights + room * model.kv_values(len(share.layers)))
    assert size.stage_bytes(model, stages, 131_072, "bfloat16", kind) == max(needs)


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for one in held:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(held):
        yield from _tensors(list(vars(held).values()))


def test_fp8_halves_layers_but_not_embedding_head_or_kv_cache() -> None:
    plain, fp8 = (sizing("8b", SHAPES["8b"], 131_072, 1, 80, quantisation=kind) for kind in (None, "fp8"))
    ends = 2 * (2 * 128_256 + 1) * 4096
    assert fp8.weight_bytes - ends == pytest.approx((plain.weight_bytes - ends) / 2, rel=1e-3)
    assert fp8.kv_bytes == plain.kv_bytes and size.row(fp8)["model"] == "8b, fp8"
    done = run("size", "8b", "--tokens", 131_072, "--json", "--quantisation", "fp8")
    assert json.loads(done.stdout)["weight_bytes"] == fp8.weight_bytes
    for options, problem in (
        (("--quantisation", "int4"), "--quantisation int4: must be one of fp8"),
        (("--quantisation", "fp8", "--dtype", "float32"), "fp8 goes with a dtype of 16 bits, not float32"),
    ):
        failed = run("size", "8b", *options)
        assert failed.exit_code == 1 and problem in failed.stderr


def test_int8_kv_size_equals_a_real_caches() -> None:
    model, tokens = SHAPES["8b"], 131_072
    plain, narrow = (sizing("8b", model, tokens, 1, 80, kv_dtype=kind) for kind in (None, "int8"))
    cache = PagedKVCache(range(2), model.kv_heads, model.head_dim, 3, torch.bfloat16, "cpu", int8=True)
    assert size.kv_bytes(model, 2, "bfloat16", "int8") * 3 * 16 == sum(side.nbytes for side in cache.sides)
    assert narrow.kv_bytes == plain.kv_bytes * (128 + 1) // 256
    assert narrow.weight_bytes == plain.weight_bytes and size.row(narrow)["model"] == "8b, KV cache int8"
    saved = plain.kv_bytes - narrow.kv_bytes
    assert plain.decode_bytes - narrow.decode_bytes == saved
    one_layer = plain.kv_bytes // model.layers
    assert plain.stage_bytes - narrow.stage_bytes == saved - one_layer, "a layer is brought back to attend"
    done = run("size", "8b", "--tokens", tokens, "--json", "--kv-dtype", "int8")
    assert json.loads(done.stdout)["kv_bytes"] == narrow.kv_bytes
    failed = run("size", "8b", "--kv-dtype", "int4")
    assert failed.exit_code == 1 and "--kv-dtype int4: must be one of int8" in failed.stderr


def test_every_dtype_has_a_size() -> None:
    assert set(size.DTYPE_BYTES) == set(get_args(Dtype))


def test_size_command_accepts_a_model_directory(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tiny")
    done = run("size", directory, "--tokens", 4096, "--concurrency", 3, "--json", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["pages"] == 256 and found["gpus"] == 2
    assert found["weight_bytes"] > 2 * 199 * HIDDEN * 4


def test_size_command_prints_a_table() -> None:
    done = run("size", "8b", "--tokens", 131_072)
    assert done.exit_code == 0 and "131,072" in done.stdout and "128" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["9b"], "no model '9b'"),
        (["8b", "--tokens", 0], "tokens = 0"),
        (["8b", "--concurrency", -1], "concurrency = -1"),
        (["8b", "--gpu-gib", 0], "gpu_gib = 0"),
        (["8b", "--gpu-gib", "inf"], "gpu_gib = inf and reserve_gib = 8.0: must be finite"),
        (["8b", "--gpu-gib", "nan"], "gpu_gib = nan and reserve_gib = 8.0: must be finite"),
        (["8b", "--reserve-gib", "nan"], "reserve_gib = nan: must be finite"),
        (["8b", "--stages", 33], "32 layers cannot be split over 33 stages"),
        (["8b", "--dtype", "int3"], "--dtype int3"),
    ],
)
def test_error_names_bad_input(arguments: list[object], named: str) -> None:
    done = run("size", *arguments)
    assert done.exit_code == 1
    assert named in done.stderr


def test_refuses_zero_stages() -> None:
    with pytest.raises(ModelError):
        sizing("8b", SHAPES["8b"], 1024, 1, 80, stages=0)


def test_host_memory_size_equals_its_pages_size() -> None:
    for kind, tokens in ((None, 131_072), ("int8", 260_096)):
        found = sizing("8b", SHAPES["8b"], 131_072, 1, 80, host_cache_gib=16.0, kv_dtype=kind)  # type: ignore[arg-type]
        assert found.host_tokens == tokens, "whole pages"
        assert size.row(found)["host memory per worker"] == f"16 GiB, {found.host_tokens:,} tokens"
    assert "host memory per worker" not in size.row(sizing("8b", SHAPES["8b"], 131_072, 1, 80))
    done = run("size", "8b", "--tokens", "131072", "--json", "--host-cache-gib", "64")
    assert json.loads(done.stdout)["host_tokens"] == 524_288
    for given in ("-1", "inf", "nan"):
        failed = run("size", "8b", "--host-cache-gib", given)
        assert failed.exit_code == 1 and "host_cache_gib" in failed.stderr
