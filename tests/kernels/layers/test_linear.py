"""Tests GEMMs of linear layers, plain and gated, on the CPU and by the Hopper kernel, against float64, and
the choice between the Hopper kernel and torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.layers import linear_hopper_launch as hopper
from deltafront.kernels.layers.linear import compile_gemms, linear, swiglu_linear
from deltafront.tests.numerics import assert_rows_close, poisoned_empty
from deltafront.tests.reference import layers as reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
MULTIPROCESSORS = 132


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def weights(out: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return draw(out, width, dtype=torch.float32).mul_(width**-0.5).to(dtype)


def gated(product_TJ: torch.Tensor) -> torch.Tensor:
    gate_TO, up_TO = product_TJ.chunk(2, dim=1)
    return F.silu(gate_TO) * up_TO


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_linear_and_swiglu_linear_equal_float64_gemms(dtype: torch.dtype) -> None:
    x_TI, weight_JI = draw(5, 48, dtype=dtype), weights(24, 48, dtype)
    bias_J = draw(24, dtype=dtype)
    wanted_TJ = x_TI.double() @ weight_JI.double().T
    assert_rows_close(linear(x_TI, weight_JI).double(), wanted_TJ, dtype=dtype)
    assert_rows_close(linear(x_TI, weight_JI, bias_J).double(), wanted_TJ + bias_J.double(), dtype=dtype)
    for bias, product_TJ in ((None, wanted_TJ), (bias_J, wanted_TJ + bias_J.double())):
        active_TO = swiglu_linear(x_TI, weight_JI, bias)
        assert_rows_close(active_TO.cpu().double(), reference.swiglu(product_TJ.cpu()), dtype=dtype)


@pytest.mark.parametrize("function", [linear, swiglu_linear])
def test_gemm_refuses_widths_and_dtypes_that_do_not_match(function: Any) -> None:
    weight_OI = weights(4, 6)
    with pytest.raises(KernelInputError, match="their widths differ"):
        function(draw(3, 5), weight_OI)
    with pytest.raises(KernelInputError, match="their widths differ"):
        function(draw(6), weight_OI)
    with pytest.raises(KernelInputError, match="float16"):
        function(draw(3, 6, dtype=torch.float16), weight_OI)


def test_compiles_no_gemm_kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(hopper, "launch", lambda *given, **_form: launched.append(given))
    compile_gemms(torch.zeros(256, 64, dtype=torch.bfloat16))
    assert not launched


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (192, 256), (193, 256), (16_384, 4096), (5000, 28_672)])
def test_computes_the_share_of_gpu_time_spent_on_real_outputs(rows: int, width: int) -> None:
    tiles = [
        min(192, rows - row) * min(256, width - column)
        for row in range(0, rows, 192)
        for column in range(0, width, 256)
    ]
    rounds = [tiles[first : first + MULTIPROCESSORS] for first in range(0, len(tiles), MULTIPROCESSORS)]
    wanted = sum(map(sum, rounds)) / (len(rounds) * MULTIPROCESSORS * 192 * 256)
    assert hopper.filled(rows, width, MULTIPROCESSORS) == pytest.approx(wanted)


@pytest.fixture
def hopper_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_hopper", lambda _device: True)
    monkeypatch.setattr(hopper, "multiprocessors", lambda _device: MULTIPROCESSORS)


@pytest.mark.usefixtures("hopper_without_one")
def test_hopper_gemm_accepts_only_16_bit_gemms_that_fill_the_gpu() -> None:
    def takes(rows: int, out: int = 28_672, *, gated: bool = True, dtype: Any = torch.bfloat16) -> bool:
        x_TI, weight_OI = (torch.empty(count, 64, dtype=dtype) for count in (rows, out))
        return hopper.takes(x_TI, weight_OI, gated=gated)

    assert takes(16_384) and takes(4096) and takes(16_384, dtype=torch.float16)
    assert not takes(16_384, dtype=torch.float32), "the matrix unit takes 16 bits"
    assert not takes(512), "what a decode worker appends"
    assert not takes(1024), "a third of the last round idles"
    assert takes(16_384, 4096, gated=False) and not takes(2048, 4096, gated=False)
    assert not takes(16_384, 4096 + 128, gated=False), "no whole tiles"


@pytest.mark.usefixtures("hopper_without_one")
def test_hopper_gemm_leaves_layouts_that_tma_cannot_address_to_torch() -> None:
    def takes(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
        return hopper.takes(x_TI, weight_OI, gated=False)

    x_TI, weight_OI = (torch.empty(rows, 72, dtype=torch.bfloat16) for rows in (16_384, 4096))
    whole_TI, whole_OI = x_TI[:, :64], weight_OI[:, :64]
    assert takes(whole_TI, whole_OI)
    assert not takes(x_TI[:, 1:65], whole_OI), "begins between 16 bytes"
    assert not takes(whole_TI, weight_OI[:, 1:65])
    assert not takes(torch.empty(64, 16_384, dtype=torch.bfloat16).T, whole_OI), "columns lie apart"
    assert not takes(torch.empty(16_384, 36, dtype=torch.bfloat16), whole_OI), "rows are 72 bytes"


CASES = [(1, 256, 64), (63, 512, 72), (192, 256, 4096), (193, 768, 8), (1000, 512, 576), (2500, 6144, 136)]
"""(rows, outputs, inputs) with partial tiles and steps, several bands, and more tiles than SMs."""


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "out", "width"), CASES)
def test_hopper_gemm_equals_a_float64_gemm(rows: int, out: int, width: int, dtype: torch.dtype) -> None:
    x_TI, weight_OI = draw(rows, width, dtype=dtype), weights(out, width, dtype)
    wanted_TO = x_TI.double() @ weight_OI.double().T
    with poisoned_empty():
        found_TO = hopper.launch(x_TI, weight_OI, gated=False)
        active_TO = hopper.launch(x_TI, weight_OI, gated=True)
    assert_rows_close(found_TO.double(), wanted_TO, dtype=dtype, factor=0.5)
    assert_rows_close(active_TO.double(), gated(wanted_TO), dtype=dtype, factor=0.5)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_gated_gemm_keeps_nan_in_its_row_and_takes_large_gates() -> None:
    """exp(1000) overflows for a gate of -1,000; the output must be 0. NaN must stay in its row."""
    x_TI = torch.zeros(300, 64, device=DEVICE, dtype=torch.bfloat16)
    weight_JI = torch.zeros(512, 64, device=DEVICE, dtype=torch.bfloat16)
    x_TI[:, 0], weight_JI[:256, 0], weight_JI[256:, 0] = 1.0, torch.linspace(-1000, 1000, 256), 2.0
    x_TI[7, 1], weight_JI[:, 1] = float("nan"), 1.0
    active_TO = hopper.launch(x_TI, weight_JI, gated=True)
    assert active_TO[7].isnan().all()
    others_TO = torch.cat((active_TO[:7], active_TO[8:]))
    wanted_O = gated(x_TI[:1].double() @ weight_JI.double().T)
    assert_rows_close(others_TO.double(), wanted_O.expand_as(others_TO), dtype=torch.bfloat16)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("function", [linear, swiglu_linear])
def test_hopper_gemm_is_correct_and_deterministic_at_8b_sizes(function: Any) -> None:
    """The GEMM runs 50 more times and must give the same bits."""
    x_TI, weight_OI = draw(8192, 4096, dtype=torch.bfloat16), weights(28_672, 4096, torch.bfloat16)
    assert hopper.takes(x_TI, weight_OI, gated=function is swiglu_linear)
    with poisoned_empty():
        found = function(x_TI, weight_OI)
    rows = slice(None, None, 97)
    wanted = x_TI[rows].double() @ weight_OI.double().T
    wanted = gated(wanted) if function is swiglu_linear else wanted
    assert_rows_close(found[rows].double(), wanted, dtype=torch.bfloat16, factor=0.5)
    for _ in range(50):
        assert torch.equal(function(x_TI, weight_OI), found)
