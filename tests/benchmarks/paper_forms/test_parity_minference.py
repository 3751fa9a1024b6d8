"""The comparison with MInference's code, as far as it goes without theirs. Stand-ins take their places."""

from __future__ import annotations

import shutil
from types import ModuleType
from typing import Any

import pytest
import torch

from deltafront.benchmarks.paper_forms.parity_minference import (
    HostIndex,
    a_shape,
    as_minference,
    block_sparse,
    their_lines,
    tiles_of_index,
)
from deltafront.benchmarks.paper_forms.parity_rows import ours
from deltafront.benchmarks.whole_prompt.lines import last_attention, single_line_masses
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.methods import load
from deltafront.tests.reference.structured import structured_input

load("deltafront.benchmarks.paper_forms.methods")

KERNEL = """
#include <cuda.h>
__device__ void put(int* list, int value, int& count) { list[count++] = value; }
__global__ void convert_vertical_slash_indexes_kernel(
    const int* seqlens, const int* vertical_indexes, const int* slash_indexes, int* block_count,
    int* block_offset, int* column_count, int* column_index, int N_HEADS, int N_ROWS, int BLOCK_SIZE_M,
    int BLOCK_SIZE_N, int NNZ_V, int NNZ_S
) {
    int row = blockIdx.z * blockDim.x + threadIdx.x, columns = 0, blocks = 0;
    if (row * BLOCK_SIZE_M >= seqlens[0]) return;
    for (int v = 0; v < NNZ_V; v++) put(column_index + row * NNZ_V, vertical_indexes[v], columns);
    put(block_offset + row * NNZ_S, max(row * BLOCK_SIZE_N - slash_indexes[0], 0), blocks);
    column_count[row] = columns;
    block_count[row] = blocks;
}
void convert_vertical_slash_indexes_64x64(int N_HEADS) { launch<<<N_HEADS, 64>>>(); }
"""


def sample(tokens: int = 1024) -> AttentionInput:
    return structured_input(tokens, q_heads=2, kv_heads=1, head_dim=16)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_cuda_kernel_runs_on_the_host_row_by_row() -> None:
    vertical_X, slash_X = (torch.tensor(row, dtype=torch.int32) for row in ([3, 90], [70, 5, 0]))
    block_count_R, offset_RX, column_count_R, column_RX = HostIndex(KERNEL)(vertical_X, slash_X, 200, 64, 64)
    assert block_count_R.tolist() == [1] * 4 and column_count_R.tolist() == [2] * 4
    assert offset_RX.tolist() == [[0, 0, 0], [0, 0, 0], [58, 0, 0], [122, 0, 0]]
    assert column_RX.tolist() == [[3, 90]] * 4


def test_minference_index_maps_to_the_tiles_it_touches() -> None:
    """Four rows of 64, two query blocks. A block at 100 ends in tile 1; one at 192 comes after block 0."""
    offset_RX = torch.tensor([[0, 192], [64, 999], [100, 999], [128, 999]], dtype=torch.int32)
    column_RX = torch.tensor([[5], [5], [5], [5]], dtype=torch.int32)
    counts = torch.tensor([2, 1, 1, 1], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    kept_NM = tiles_of_index((counts[0], offset_RX, counts[1], column_RX), 64, 64, 2)
    assert kept_NM.tolist() == [[True, False], [True, True]]
    alone = torch.tensor([1, 1, 0, 1], dtype=torch.int32)
    kept_NM = tiles_of_index((alone, offset_RX, counts[1], column_RX), 64, 64, 2)
    assert kept_NM.tolist() == [[True, False], [False, True]]
    columns = torch.tensor([0, 0, 1, 0], dtype=torch.int32)
    kept_NM = tiles_of_index((alone, offset_RX, columns, column_RX), 64, 64, 2)
    assert kept_NM.tolist() == [[True, False], [True, True]]


def test_forced_lines_count_among_the_single_ones() -> None:
    x = sample()
    vertical_HS, slash_HS = as_minference(x, 50, 150)
    masses = single_line_masses(last_attention(x, 64))
    for kept_HS, mass_BHS, forced, count in (
        (vertical_HS, masses[0], 30, 50),
        (slash_HS, masses[1], 100, 150),
    ):
        for kept_S, mass_S in zip(kept_HS, mass_BHS[0], strict=True):
            free = sorted(range(forced, 1024), key=lambda line: -float(mass_S[line]))[: count - forced]
            assert kept_S.nonzero()[:, 0].tolist() == [*range(forced), *sorted(free)]


def test_records_the_lines_that_minference_attends_to() -> None:
    def prefill(q: Any, k: Any, v: Any, head: int, layer: int, config: Any) -> None:
        kind, verticals, slashes, _ = config["best_pattern"][layer][str(head)]
        assert kind == "vertical_and_slash" and q.shape == k.shape == v.shape == (1, 1, 1024, 16)
        forward.sum_all_diagonal_matrix(q[:, :, :2])
        forward.vertical_slash_sparse_attention(
            q, k, v, torch.tensor([[[verticals, head]]]), torch.tensor([slashes])
        )

    forward = ModuleType("forward")
    forward.__dict__.update(
        minference_prefill_kernel=prefill,
        sum_all_diagonal_matrix=lambda mass: mass,
        vertical_slash_sparse_attention=None,
    )
    x = sample()
    first, second = their_lines(forward, x, 7, 9)
    assert first.vertical_X.tolist() == [0, 7] and second.vertical_X.tolist() == [1, 7]
    assert first.slash_X.tolist() == [9]
    assert torch.equal(second.mass_LS, x.q_BHTD[0, 1, :2])


@pytest.mark.parametrize("dropped", [0, 1])
def test_blocks_are_compared_with_the_forced_ones_counted(dropped: int) -> None:
    """A stand-in that keeps what ours keep, or the same but for one block of the last row."""
    x, top = sample(), 3
    kept = ours(x, "minference_block_sparse", top=top - 2)
    kept[15] -= set(list(kept[15] - {0, 7})[:dropped])

    def attention(q: Any, k: Any, v: Any, count: int, rows: int, keys: int) -> None:
        index = torch.zeros(1, 2, 1024 // rows, 8, dtype=torch.int32)
        for n, row in enumerate(kept):
            places = torch.tensor([block * (128 // keys) for block in sorted(row)])
            for part in range(128 // rows):
                slots = torch.cat([places, places[:1].expand(8 - len(places))])
                index[0, n // 8, n % 8 * (128 // rows) + part] = slots
        module.__dict__["_triton_block_sparse_attention"](q, k, v, None, index, 1.0, rows, keys)

    module = ModuleType("blocks")
    module.__dict__.update(block_sparse_attention=attention, _triton_block_sparse_attention=None)
    counted, plain, merged = block_sparse(module, x, top)
    assert counted.rows == plain.rows == merged.rows == 16
    assert counted.same == 16 - dropped and counted.theirs == sum(map(len, kept))
    assert plain.same < 16 and plain.theirs == merged.theirs == counted.theirs


@pytest.mark.parametrize(("window", "same"), [(300, 8), (500, 5)])
def test_a_shape_is_recovered_from_the_attention_output(window: int, same: int) -> None:
    def streaming(q: Any, k: Any, v: Any, sink: int, local: int) -> torch.Tensor:
        place = torch.arange(q.shape[2])
        distance = place[:, None] - place
        seen = (distance >= 0) & ((distance < window) | (place < sink))
        return (q @ k.transpose(2, 3)).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    module = ModuleType("streaming")
    module.__dict__["streaming_forward"] = streaming
    found = a_shape(module, sample(), 100, 300)
    assert (found.same, found.rows) == (same, 8)
