"""Tests gated delta networks: CPU forms and kernels against token-by-token oracles, row by row, with outputs
that were NaN before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafront.kernels.gated_delta import convolution, gated_norm, step, step_kernels
from deltafront.kernels.gated_delta.chunked import CHUNK, chunked_delta_rule
from deltafront.kernels.gated_delta.layer import gated_delta
from deltafront.kernels.gated_delta.parameters import DeltaParameters, Gates
from deltafront.kernels.gated_delta.sequence import library_delta_rule
from deltafront.kernels.gated_delta.states import LayerStates, SequenceStates, StepStates
from deltafront.kernels.interface import KernelInputError
from deltafront.tests.numerics import (
    ROW_TOLERANCE,
    assert_rows_close,
    poisoned_empty,
    row_errors,
    synchronising_raises,
)
from deltafront.tests.reference import gated_delta as reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
"""Triton's interpreter computes bfloat16 wrongly."""
ROWS = (1, 2, 3, 5, 17, 33)


@dataclass(frozen=True)
class Shape:
    groups: int = 2
    heads: int = 4
    key_dim: int = 16
    dim: int = 24
    inputs: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key_dim + self.heads * self.dim


SHAPES = [Shape(), Shape(groups=1, heads=3, key_dim=12, dim=40, inputs=3), Shape(heads=2, inputs=2)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def make_parameters(shape: Shape, dtype: torch.dtype = torch.float32) -> DeltaParameters:
    """Make decays from almost none to almost all within a row."""
    return DeltaParameters(
        conv_EX=draw(shape.channels, shape.inputs, dtype=dtype),
        decay_H=-torch.logspace(-3, 1, shape.heads, device=DEVICE),
        bias_H=draw(shape.heads),
        norm_D=1 + 0.3 * draw(shape.dim),
        eps=1e-6,
        key_heads=shape.groups,
    )


def make_states(shape: Shape, slots: int, dtype: torch.dtype = torch.float32) -> LayerStates:
    """Make states of one layer among several: slots are apart."""
    conv_SLWE = draw(slots, 2, shape.inputs - 1, shape.channels, dtype=dtype)
    return LayerStates(conv_SLWE[:, 1], draw(slots, 3, shape.heads, shape.key_dim, shape.dim)[:, 1])


def make_rows(
    shape: Shape, rows: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return qkvz_TP and ba_TJ."""
    width = shape.channels + shape.heads * shape.dim
    return draw(rows, width, dtype=dtype), draw(rows, 2 * shape.heads, dtype=dtype)


def wanted_layer(
    shape: Shape,
    qkvz_TP: torch.Tensor,
    ba_TJ: torch.Tensor,
    parameters: DeltaParameters,
    conv_WE: torch.Tensor,
    recurrent_HKD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a layer by the oracles. Return its rows and both states after the last one."""
    cpu = replace(parameters, **{k: v.cpu() for k, v in vars(parameters).items() if torch.is_tensor(v)})
    x_TE, z_TO = torch.split(qkvz_TP.cpu(), [shape.channels, shape.heads * shape.dim], dim=1)
    qkv_TE, conv_WE = reference.convolved(x_TE, cpu.conv_EX, conv_WE.cpu())
    keys = shape.groups * shape.key_dim
    q, k, v = torch.split(qkv_TE, [keys, keys, shape.heads * shape.dim], dim=1)
    q_TGK, k_TGK = (x.view(-1, shape.groups, shape.key_dim) for x in (q, k))
    gates = reference.gates(ba_TJ.cpu(), cpu.decay_H, cpu.bias_H)
    v_THD = v.view(-1, shape.heads, shape.dim)
    out_THD, recurrent_HKD = reference.delta_rule(q_TGK, k_TGK, v_THD, *gates, recurrent_HKD.cpu())
    out_THD = reference.gated_normed(out_THD, z_TO.view(v_THD.shape), cpu.norm_D, cpu.eps)
    return out_THD.flatten(1), conv_WE, recurrent_HKD


def assert_close(
    found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0
) -> None:
    assert_rows_close(found.cpu().double(), wanted.cpu().double(), dtype=dtype, factor=factor)


@pytest.mark.parametrize("rows", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_equal_the_recurrence_row_by_row(shape: Shape, rows: int) -> None:
    q_TGK, k_TGK = draw(rows, shape.groups, shape.key_dim), draw(rows, shape.groups, shape.key_dim)
    v_THD, state_HKD = draw(rows, shape.heads, shape.dim), draw(shape.heads, shape.key_dim, shape.dim)
    gates = Gates.of(draw(rows, 2 * shape.heads), make_parameters(shape))
    before = state_HKD.clone()
    found = chunked_delta_rule(q_TGK, k_TGK, v_THD, gates, state_HKD)
    assert torch.equal(state_HKD, before)
    given = (x.cpu() for x in (q_TGK, k_TGK, v_THD, gates.decay_TH.exp(), gates.beta_TH, state_HKD))
    for one, wanted in zip(found, reference.delta_rule(*given), strict=True):
        assert_close(one, wanted)


def test_gates_equal_the_oracle() -> None:
    parameters, ba_TJ = make_parameters(Shape()), 4 * draw(9, 8)
    gates = Gates.of(ba_TJ, parameters)
    wanted = reference.gates(ba_TJ.cpu(), parameters.decay_H.cpu(), parameters.bias_H.cpu())
    for found, each in zip((gates.decay_TH.exp(), gates.beta_TH), wanted, strict=True):
        assert_close(found, each)


Convolve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("form", [convolution.cpu_convolve, convolution.kernel_convolve])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_equals_the_oracle(dtype: torch.dtype, shape: Shape, rows: int, form: Convolve) -> None:
    if GPU and form is convolution.cpu_convolve:
        pytest.skip("the CPU form takes CPU tensors")
    qkvz_TP, parameters = make_rows(shape, rows, dtype)[0], make_parameters(shape, dtype)
    x_TE, before_WE = qkvz_TP[:, : shape.channels], make_states(shape, 1, dtype).conv_SWE[0]
    with poisoned_empty():
        out_TE = form(x_TE, parameters.conv_EX, before_WE)
    assert out_TE.dtype == dtype
    wanted_TE, _after = reference.convolved(x_TE.cpu(), parameters.conv_EX.cpu(), before_WE.cpu())
    assert_close(out_TE, wanted_TE, dtype)


@pytest.mark.parametrize("form", [gated_norm.cpu_gated_norm, gated_norm.kernel_gated_norm])
@pytest.mark.parametrize(("heads", "dim"), [(4, 24), (3, 128), (40, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm_equals_the_oracle(
    dtype: torch.dtype, heads: int, dim: int, form: Callable[..., torch.Tensor]
) -> None:
    x_THD, rows_TP = draw(5, heads, dim, dtype=dtype), draw(5, 7 + heads * dim, dtype=dtype)
    z_THD, weight_D = rows_TP[:, 7:].view(5, heads, dim), 1 + 0.3 * draw(dim)
    with poisoned_empty():
        out_THD = form(x_THD, z_THD, weight_D, 1e-6)
    assert out_THD.dtype == dtype
    wanted_THD = reference.gated_normed(x_THD.cpu(), z_THD.cpu(), weight_D.cpu(), 1e-6)
    assert_close(out_THD, wanted_THD, dtype)


def check_sequence(shape: Shape, cuts: tuple[tuple[int, int], ...], first: int, slots: int) -> None:
    """Compare outputs and the state of every cut with the oracles, and other slots with what they held."""
    parameters, states, rows = make_parameters(shape), make_states(shape, slots), cuts[-1][0]
    before = LayerStates(states.conv_SWE.clone(), states.recurrent_SHKD.clone())
    qkvz_TP, ba_TJ = make_rows(shape, rows)
    with poisoned_empty():
        out_TO = gated_delta(qkvz_TP, ba_TJ, parameters, SequenceStates(states, first, cuts))
    initial = before.conv_SWE[first], before.recurrent_SHKD[first]
    assert_close(out_TO, wanted_layer(shape, qkvz_TP, ba_TJ, parameters, *initial)[0])
    for end, slot in cuts:
        _out, conv_WE, recurrent_HKD = wanted_layer(shape, qkvz_TP[:end], ba_TJ[:end], parameters, *initial)
        assert torch.equal(states.conv_SWE[slot].cpu().double(), conv_WE)
        assert_close(states.recurrent_SHKD[slot], recurrent_HKD)
    for slot in set(range(slots)) - {slot for _end, slot in cuts}:
        assert torch.equal(states.conv_SWE[slot], before.conv_SWE[slot])
        assert torch.equal(states.recurrent_SHKD[slot], before.recurrent_SHKD[slot])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_equals_the_oracles(shape: Shape, rows: int) -> None:
    check_sequence(shape, ((rows, 1),), first=0, slots=3)


@given(data=st.data())
def test_cuts_change_no_row_and_hold_the_states_after_them(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 80))
    inner = data.draw(st.lists(st.integers(1, rows), max_size=4, unique=True).map(sorted))
    ends = sorted({*inner, rows})
    slots = data.draw(st.permutations(range(len(ends) + 2)))
    first = data.draw(st.sampled_from(range(len(slots))))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    check_sequence(Shape(heads=2, dim=8), tuple(zip(ends, slots, strict=False)), first, len(slots))


Forms = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]
STEPS: dict[str, Forms] = {
    "cpu": (step.cpu_step_convolve, step.cpu_step_delta_rule),
    "kernel": (step_kernels.kernel_step_convolve, step_kernels.kernel_step_delta_rule),
}


@pytest.mark.parametrize("form", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_equals_the_oracles(dtype: torch.dtype, shape: Shape, form: str) -> None:
    """Each row reads and writes its slot. Slots without a row stay as they are."""
    parameters, states = make_parameters(shape, dtype), make_states(shape, 6, dtype)
    before = LayerStates(states.conv_SWE.clone(), states.recurrent_SHKD.clone())
    rows = StepStates(states, torch.tensor([4, 0, 3], device=DEVICE))
    qkvz_RP, ba_RJ = make_rows(shape, 3, dtype)
    convolve, delta_rule = STEPS[form]
    with poisoned_empty():
        qkv_RE = convolve(qkvz_RP[:, : shape.channels], parameters, rows)
        out_RHD = delta_rule(qkv_RE, ba_RJ, parameters, rows)
    assert out_RHD.dtype == dtype
    z_RHD = qkvz_RP[:, shape.channels :].view(3, shape.heads, shape.dim)
    out_RO = gated_norm.gated_norm(out_RHD, z_RHD, parameters.norm_D, parameters.eps).flatten(1)
    for row, slot in enumerate((4, 0, 3)):
        given = qkvz_RP[row : row + 1], ba_RJ[row : row + 1], parameters
        wanted = wanted_layer(shape, *given, before.conv_SWE[slot], before.recurrent_SHKD[slot])
        assert_close(out_RO[row : row + 1], wanted[0], dtype, factor=2.0)  # 2.5% on an H200 in bf16
        assert torch.equal(states.conv_SWE[slot].cpu().double(), wanted[1])
        assert_close(states.recurrent_SHKD[slot], wanted[2], dtype)
    for slot in (1, 2, 5):
        assert torch.equal(states.conv_SWE[slot], before.conv_SWE[slot])
        assert torch.equal(states.recurrent_SHKD[slot], before.recurrent_SHKD[slot])


@pytest.mark.parametrize("rows", [1, 2, 3, CHUNK])
def test_steps_go_on_where_a_sequence_ended(rows: int) -> None:
    shape, steps = Shape(), 5
    parameters, states = make_parameters(shape), make_states(shape, 2)
    qkvz_TP, ba_TJ = make_rows(shape, rows + steps)
    initial = states.conv_SWE[0].clone(), states.recurrent_SHKD[0].clone()
    found = [gated_delta(qkvz_TP[:rows], ba_TJ[:rows], parameters, SequenceStates(states, 0, ((rows, 1),)))]
    at = StepStates(states, torch.tensor([1], device=DEVICE))
    for row in range(rows, rows + steps):
        found.append(gated_delta(qkvz_TP[row : row + 1], ba_TJ[row : row + 1], parameters, at))
    wanted = wanted_layer(shape, qkvz_TP, ba_TJ, parameters, *initial)
    assert_close(torch.cat(found), wanted[0])
    assert torch.equal(states.conv_SWE[1].cpu().double(), wanted[1])
    assert_close(states.recurrent_SHKD[1], wanted[2])


def test_padding_rows_may_share_a_slot() -> None:
    shape = Shape()
    parameters, states = make_parameters(shape), make_states(shape, 3)
    qkvz_RP, ba_RJ = make_rows(shape, 4)
    alone = LayerStates(states.conv_SWE.clone(), states.recurrent_SHKD.clone())
    both = gated_delta(qkvz_RP, ba_RJ, parameters, StepStates(states, torch.tensor([2, 0, 0, 0]).to(DEVICE)))
    one = gated_delta(qkvz_RP[:1], ba_RJ[:1], parameters, StepStates(alone, torch.tensor([2]).to(DEVICE)))
    assert_close(both[:1], one)
    assert_close(states.recurrent_SHKD[2], alone.recurrent_SHKD[2])
    assert torch.equal(states.conv_SWE[2], alone.conv_SWE[2])


def sequence(states: LayerStates, *cuts: tuple[int, int]) -> SequenceStates:
    return SequenceStates(states, 0, cuts)


REFUSED: dict[str, Callable[[LayerStates], Any]] = {
    "cuts after": lambda states: sequence(states, (2, 1)),
    "cuts after ": lambda states: sequence(states, (4, 1), (3, 0)),
    "slots": lambda states: StepStates(states, torch.zeros(3, dtype=torch.int32, device=DEVICE)),
    "slots ": lambda states: StepStates(states, torch.zeros(2, dtype=torch.int64, device=DEVICE)),
    "as a state": lambda states: sequence(replace(states, conv_SWE=states.conv_SWE.half()), (3, 0)),
    "float32": lambda states: sequence(
        replace(states, recurrent_SHKD=states.recurrent_SHKD.double()), (3, 0)
    ),
    "value heads": lambda states: sequence(
        replace(states, recurrent_SHKD=states.recurrent_SHKD[:, :1]), (3, 0)
    ),
    "contiguous": lambda states: sequence(
        replace(states, recurrent_SHKD=states.recurrent_SHKD.mT.contiguous().mT), (3, 0)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_states_that_do_not_fit_the_rows(message: str) -> None:
    shape = Shape()
    rows = REFUSED[message](make_states(shape, 2))
    with pytest.raises(KernelInputError, match=message.strip()):
        gated_delta(*make_rows(shape, 3), make_parameters(shape), rows)


def test_says_what_to_install_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    gates = Gates(torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        library_delta_rule(draw(1, 1, 8), draw(1, 1, 8), draw(1, 2, 8), gates, draw(2, 8, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 63, 64, 200, 1000])
@pytest.mark.parametrize("groups", [2, 4])
def test_the_library_computes_the_same_as_chunks(groups: int, rows: int) -> None:
    pytest.importorskip("fla.ops.gated_delta_rule")
    q, k = (draw(rows, groups, 128, dtype=torch.bfloat16) for _ in "qk")
    v, state = draw(rows, 4, 128, dtype=torch.bfloat16), draw(4, 128, 128)
    gates = Gates.of(draw(rows, 8), make_parameters(Shape(groups, 4, 128, 128)))
    found = library_delta_rule(q, k, v, gates, state)
    wanted = chunked_delta_rule(q, k, v, gates, state)
    for one, other in zip(found, wanted, strict=True):
        errors = row_errors(one.float(), other)
        # On an H200 2% of the rows, mostly of the head whose decay is strongest, differ by 2 to 13%.
        assert float(errors.flatten().quantile(0.95)) <= ROW_TOLERANCE[torch.bfloat16]
        assert float(errors.max()) <= 0.25


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_a_cuda_graph_replays_a_step_for_other_slots() -> None:
    shape = Shape(2, 4, 128, 128)
    parameters, states = make_parameters(shape, torch.bfloat16), make_states(shape, 4, torch.bfloat16)
    (qkvz_RP, ba_RJ), slots_R = make_rows(shape, 2, torch.bfloat16), torch.tensor([0, 1], device="cuda")
    rows = StepStates(states, slots_R)
    gated_delta(qkvz_RP, ba_RJ, parameters, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_RO = gated_delta(qkvz_RP, ba_RJ, parameters, rows)
    other = LayerStates(states.conv_SWE.clone(), states.recurrent_SHKD.clone())
    slots_R.copy_(torch.tensor([3, 2]))
    with synchronising_raises():
        graph.replay()
    wanted_RO = gated_delta(qkvz_RP, ba_RJ, parameters, StepStates(other, slots_R))
    assert torch.equal(out_RO, wanted_RO)
    assert torch.equal(states.recurrent_SHKD, other.recurrent_SHKD)
