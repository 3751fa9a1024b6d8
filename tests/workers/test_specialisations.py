"""No request waits for a compiler: what a prompt of any length would have compiled, warm-up has met.

On a GPU that computes nothing (`fake_gpu.py`), in a process of its own, since Triton's interpreter cannot be
left once it is on.
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

pytestmark = pytest.mark.long

METHODS = ("dense", "dpxa", "dpxa+delta", "xattention", "delta_xattention", "delta_kv", "streaming")
SHAPE = replace(
    SHAPES["8b"], layers=3, hidden=256, intermediate=256, vocab=512, positions=262_144
)  # heads as they are: they decide how work is divided


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script tells of each name."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, SHAPE, torch.device("cpu"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("specialisations.py")
    run = subprocess.run(
        [sys.executable, str(script), str(directory), "-dpxa", "decode", *METHODS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {one["name"]: one for one in map(json.loads, run.stdout.splitlines())}


def test_without_a_warm_up_kernels_are_missing(found: dict[str, Any]) -> None:
    """So the others would fail if they could."""
    missing = found["-dpxa"]["missing"]
    assert {"hopper_kernel", "_rule_kernel", "anchors_hopper_kernel", "_fill_kernel"} <= missing.keys()
    assert len(missing["_rule_kernel"]) >= 5, "one for each class of length"


@pytest.mark.parametrize("name", [*METHODS, "decode"])
def test_nothing_is_compiled_after_the_warm_up(found: dict[str, Any], name: str) -> None:
    assert found[name]["warm_up"] > 0
    assert found[name]["missing"] == {}
