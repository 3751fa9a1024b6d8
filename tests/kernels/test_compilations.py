"""Tests the counts of kernels compiled or loaded from disk, before and after a worker is ready."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltafront.kernels.compilations import Compilations, added_up, watch

SCRIPT = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deltafront.kernels.compilations import watch

@triton.jit
def kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 0.0)

told = []
triton.knobs.compilation.listener = lambda **what: told.append(what["src"].name)
counted = watch("cuda:0", sys.argv[1])

def make(size):
    source = ASTSource(kernel, {"x_ptr": "*fp32", "N": "constexpr"}, {(1,): size})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))

make(32)
counted.ready = True
make(32)
make(64)
print(counted.phases, told)
"""


def test_counts_compiled_and_cached_kernel_specialisations(tmp_path: Path) -> None:
    script = tmp_path / "counting.py"  # Triton reads a kernel's source from a file
    script.write_text(SCRIPT)
    left_out = ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    cache = tmp_path / "kernels"
    run = subprocess.run(
        [sys.executable, str(script), str(cache)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "(('warm_up', 1), ('serving', 2)) ['kernel', 'kernel', 'kernel']"
    assert len([*cache.rglob("kernel.cubin")]) == 2, "what was compiled is kept where it is asked to be"
    assert "kernel kernel was loaded from disk" in run.stderr
    assert "kernel kernel was compiled" in run.stderr


def test_counts_no_compilations_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    counted = watch("cpu")
    assert counted.phases == (("warm_up", 0), ("serving", 0))
    with caplog.at_level(logging.WARNING):
        counted.count("k", 0.5, loaded=False)
        assert not caplog.records, "compiling before it is ready is what warm-up is for"
        counted.ready = True
        counted.count("k", 0.5, loaded=False)
    assert "kernel k was compiled in 0.500 s while requests may wait" in caplog.text
    assert counted.phases == (("warm_up", 1), ("serving", 1))


def test_adds_up_compilations_of_all_processes() -> None:
    one, two = Compilations(3, 1), Compilations(4, 0)
    assert dict(added_up([one.phases, two.phases])) == {"warm_up": 7, "serving": 1}
    assert added_up([]) == ()
