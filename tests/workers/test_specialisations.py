"""Tests that no request waits for a compiler: warm-up compiles all kernels for prompts of any length.

It uses a GPU that computes nothing (`fake_gpu.py`), in a separate process, since Triton's interpreter cannot
be switched off once it is on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.workers.model.directory.layer_config import MixtureConfig

pytestmark = pytest.mark.long

METHODS = ("dense", "dpxa", "dpxa+delta", "xattention", "delta_xattention", "delta_kv", "streaming")
SHAPE = replace(
    SHAPES["8b"], layers=4, hidden=256, intermediate=3072, vocab=512, positions=262_144
)  # the real numbers of heads, since they decide how work is divided
SMALL: dict[str, Any] = {"layers": 4, "hidden": 256, "vocab": 512, "positions": 262_144}
EIGHT = MixtureConfig(experts=8, per_token=3, normed=True)
EXPERTS = replace(SHAPES["30b-a3b"], **SMALL, mixture=EIGHT)
MIXED = replace(
    SHAPES["air-8"],
    **SMALL,
    intermediate=768,
    mixture=replace(EIGHT, sigmoid=True, shared_width=768, dense_layers=(0,), dense_width=1024),
)
WINDOWS = replace(SHAPES["gemma-12b"], **SMALL, intermediate=3072, window_layers=(0, 2, 3))
SHORTER = {"q_anchors": 32, "k_anchors": 64, "cos": 0.85, "window": 128}
"""Options that README names for prompts of 32,768 tokens."""
WARM: dict[str, dict[str, Any]] = {
    **{name: {"method": name, "warm_up": [name]} for name in METHODS},
    "decode": {},
    "decode, K/V in 8 bits": {"kv_dtype": "int8"},
    "K/V in 8 bits": {"method": "dpxa", "warm_up": ["dpxa"], "kv_dtype": "int8"},
    "options": {"method": "dpxa", "options": SHORTER, "warm_up": ["dpxa", {"dpxa": SHORTER}]},
    "a level": {"method": "dpxa", "options": {"density": 0.1}, "warm_up": ["dpxa"]},
    "8 bits": {"method": "dpxa", "warm_up": ["dpxa"], "quantisation": "fp8"},
    "first stage": {"method": "dpxa", "warm_up": ["dpxa"], "stages": 2},
    "last stage": {"method": "dpxa", "warm_up": ["dpxa"], "stage": 1, "stages": 2},
    "experts": {"method": "dense", "warm_up": ["dense"], "model": "experts"},
    "experts in 8 bits": {"method": "dense", "warm_up": ["dense"], "model": "experts", "quantisation": "fp8"},
    "experts, decode": {"model": "experts"},
    "experts in 8 bits, decode": {"model": "experts", "quantisation": "fp8"},
    "some layers' experts": {"method": "dense", "warm_up": ["dense"], "model": "mixed"},
    "some layers' experts, decode": {"model": "mixed"},
    "some layers' experts in 8 bits": {"model": "mixed", "quantisation": "fp8"},
    "windows": {"method": "dpxa", "warm_up": ["dpxa"], "model": "windows"},
    "windows, decode": {"model": "windows"},
    "windows, decode, K/V in 8 bits": {"model": "windows", "kv_dtype": "int8"},
    "8 bits, first stage": {"method": "dpxa", "warm_up": ["dpxa"], "stages": 2, "quantisation": "fp8"},
    "8 bits, last stage": {
        "method": "dpxa",
        "warm_up": ["dpxa"],
        "stage": 1,
        "stages": 2,
        "quantisation": "fp8",
    },
}
COLD: dict[str, dict[str, Any]] = {
    "cold": {"method": "dpxa"},
    "other options": {"method": "dpxa", "options": SHORTER, "warm_up": ["dpxa"]},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run specialisations.py, and return its result for each case."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, SHAPE, torch.device("cpu"))
    write_model(directory / "experts", EXPERTS, torch.device("cpu"))
    write_model(directory / "mixed", MIXED, torch.device("cpu"))
    write_model(directory / "windows", WINDOWS, torch.device("cpu"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("specialisations.py")
    cases = [json.dumps({"name": name, **case}) for name, case in {**COLD, **WARM}.items()]
    run = subprocess.run(
        [sys.executable, str(script), str(directory), *cases],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {one["name"]: one for one in map(json.loads, run.stdout.splitlines())}


def test_compile_cases_include_a_stage_that_begins_with_an_mlp() -> None:
    """Otherwise the cases would cover no stage that begins with an MLP."""
    first, last = SHAPE.split(2)
    assert first.mlps.stop == last.mlps.start == first.layers.stop - 1


def test_kernels_are_compiled_by_requests_without_a_warm_up(found: dict[str, Any]) -> None:
    """Shows that the other tests here can fail."""
    missing = found["cold"]["missing"]
    assert {"hopper_kernel", "_rule_kernel", "anchors_hopper_kernel", "_fill_kernel"} <= missing.keys()
    assert "linear_hopper_kernel" not in missing, "products are met whatever the methods"
    assert len(missing["_rule_kernel"]) >= 5, "one for each class of length"


def test_options_that_change_kernels_need_their_own_warm_up(found: dict[str, Any]) -> None:
    assert "anchors_hopper_kernel" in found["other options"]["missing"]


@pytest.mark.parametrize("name", WARM)
def test_no_kernel_is_compiled_after_the_warm_up(found: dict[str, Any], name: str) -> None:
    assert found[name]["warm_up"] > 0
    assert found[name]["missing"] == {}


@pytest.mark.parametrize("name", [*COLD, *WARM])
def test_cached_launches_use_the_kernel_that_triton_would_choose(found: dict[str, Any], name: str) -> None:
    assert found[name]["confused"] == []


@pytest.mark.parametrize("name", [name for name, case in WARM.items() if "method" in case])
def test_host_never_waits_while_launching_a_chunk(found: dict[str, Any], name: str) -> None:
    assert found[name]["waits"] == []
    (noticed,) = found[name]["noticed"]
    assert noticed.startswith("tolist at ")
