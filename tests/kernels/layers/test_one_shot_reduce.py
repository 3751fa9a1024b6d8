"""Tests the one-shot all-reduce: every GPU gets the same bits, for any size, also in a CUDA graph."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from deltafront.kernels.layers.fp8 import Fp8Rows
from deltafront.kernels.layers.norm import kernel_add_norm
from deltafront.kernels.layers.one_shot_reduce import ROOM, OneShotAddNorm, OneShotReduce, own_memory

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

RANK = """
import sys
import torch, torch.distributed as dist
from deltafront.kernels.layers.norm import kernel_add_norm
from deltafront.workers.decode.ranks import one_shots

rank, ranks, port = map(int, sys.argv[1:])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
reduce, both = one_shots(rank, ranks, device)
sizes = [1, 7, 1024, 4096, 5000, 4 * 8192, 131072, 1 << 20]

def numbers(call, of, size, dtype):
    generator = torch.Generator().manual_seed(1000 * call + of)
    return torch.randn(size, generator=generator).to(dtype).to(device)

def expected(call, size, dtype, maximum):
    parts = [numbers(call, of, size, dtype).float() for of in range(ranks)]
    acc = parts[0]
    for part in parts[1:]:
        acc = torch.maximum(acc, part) if maximum else acc + part
    return acc.to(dtype)

torch.cuda.synchronize()
for call in range(240):
    size = sizes[call * 5 % len(sizes)]
    dtype = (torch.bfloat16, torch.float32, torch.float16)[call % 3]
    x = numbers(call, rank, size, dtype)
    assert reduce.takes(x)
    if (call // 8 + rank) % 2:  # one rank is ahead of the other by as many calls as it may be
        torch.cuda._sleep(200_000)
    out = reduce(x, call % 2 == 1)
    if call % 8 == 7:
        assert torch.equal(out, expected(call, size, dtype, call % 2 == 1)), (call, size, dtype)
for call in range(2000):
    if rank == call // 100 % ranks and call % 10 == 0:
        torch.cuda._sleep(50_000)
    size, dtype = sizes[call % len(sizes)], (torch.bfloat16, torch.float32)[call % 2]
    x = torch.full((size,), float(rank + call % 50), dtype=dtype, device=device)
    out = reduce(x, False)
    total = float(sum(of + call % 50 for of in range(ranks)))
    torch._assert_async((out == total).all())
torch.cuda.synchronize()

for call in range(300):
    rows, width = ((1, 4096), (4, 4096), (3, 5120), (16, 8192), (128, 8192))[call % 5]
    parts = [numbers(call, of, (rows, width), torch.bfloat16) for of in range(ranks)]
    hidden, weight = numbers(call, 9, (rows, width), torch.bfloat16), numbers(call, 10, width, torch.bfloat16)
    if (call // 8 + rank) % 2:
        torch.cuda._sleep(100_000)
    assert both.takes(parts[rank])
    fp8 = call % 3 == 0
    sums, normed = both(hidden, parts[rank], weight, 1e-5, fp8)
    acc = parts[0].float()
    for part in parts[1:]:
        acc = acc + part.float()
    wanted_sums, wanted = kernel_add_norm(hidden, acc.bfloat16(), weight, 1e-5, fp8)
    assert torch.equal(sums, wanted_sums), (call, rows, width)
    if fp8:
        assert torch.equal(normed.scale_T1, wanted.scale_T1)
        normed, wanted = normed.values_TI.float(), wanted.values_TI.float()
    assert torch.equal(normed, wanted), (call, rows, width)

x = torch.zeros(4096, dtype=torch.bfloat16, device=device)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    out = x
    for _ in range(8):
        out = reduce(out * 0.5, False)
for call in range(50):
    x.fill_(float(call) * (rank + 1))
    graph.replay()
    total = sum(call * (of + 1) for of in range(ranks)) * 0.5
    for _ in range(7):
        total = total * 0.5 * ranks
    wanted = torch.full((4096,), total, device=device)
    assert torch.allclose(out.float(), wanted, rtol=1e-2), (call, out[:4], total)

began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
x = x.view(1, 4096)
weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
for name, one in (
    ("one-shot", lambda: reduce(x, False)),
    ("nccl", lambda: dist.all_reduce(x)),
    ("one-shot, then norm", lambda: kernel_add_norm(x, reduce(x, False), weight, 1e-5, False)),
    ("one-shot with norm", lambda: both(x, x, weight, 1e-5, False)),
):
    one()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(64):
            one()
    graph.replay()
    torch.cuda.synchronize()
    began.record()
    for _ in range(20):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    print(rank, name, round(began.elapsed_time(ended) / 20 / 64 * 1000, 2), "us a call of 8 KiB")
torch.cuda.synchronize()
del graph  # NCCL's group would wait for its end
print("ok", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduce_gives_every_gpu_the_same_sum(ranks: int) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    commands = [[sys.executable, "-c", RANK, str(rank), str(ranks), "29571"] for rank in range(ranks)]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in commands]
    try:
        said = [one.communicate(timeout=120)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    print(*said)
    assert all(text.strip().endswith("ok") for text in said)


def rank_of(rank: int, ranks: int) -> tuple[OneShotReduce, list[tuple[torch.Tensor, torch.Tensor]]]:
    memory = [own_memory(ranks, torch.device("cuda" if GPUS else "cpu")) for _ in range(ranks)]
    return OneShotReduce(rank, memory), memory


@pytest.mark.parametrize("before", [0, 1, 6, 2**31 - 1, -3], ids=lambda calls: f"after {calls} calls")
def test_all_reduce_does_not_wait_for_a_peer_one_call_ahead(before: int) -> None:
    """The peer's flag has the number of its next call. Numbers of calls may overflow int32."""
    reduce, memory = rank_of(0, 2)
    places, flags = memory[0]
    x = torch.arange(5, dtype=torch.float32, device=places.device)
    reduce._calls.fill_(before)
    call = (before + 1 + 2**31) % 2**32 - 2**31
    places[(call & 1) * 2 * ROOM + ROOM :][:5] = 10.0
    flags.fill_((call + 1 + 2**31) % 2**32 - 2**31)
    assert torch.equal(reduce(x, False), x + 10)
    assert memory[1][1][0] == call, "the other hears of this call"


@pytest.mark.parametrize("ranks", [2, 4])
def test_consecutive_all_reduces_write_to_different_memory(ranks: int) -> None:
    """A slow rank may still read one call's numbers while another rank writes those of the next call."""
    written = {}
    for rank in range(ranks):
        for dtype in (torch.float32, torch.float16):
            for call in (1, 2):
                reduce, memory = rank_of(rank, ranks)
                reduce._calls.fill_(call - 1)
                memory[rank][1].fill_(call)
                reduce(torch.ones(3000, dtype=dtype, device=memory[0][0].device), False)
                places = memory[(rank + 1) % ranks][0]
                written[rank, dtype, call & 1] = {*places.nonzero()[:, 0].tolist()}
    for (rank, _, half), theirs in written.items():
        for (other, _, other_half), ours in written.items():
            assert (rank, half) == (other, other_half) or not theirs & ours


def test_reduce_accepts_only_tensors_that_fit_its_buffer() -> None:
    memory = own_memory(1, torch.device("cpu"))
    reduce = OneShotReduce(0, [memory])
    assert reduce.takes(torch.zeros(ROOM)) and not reduce.takes(torch.zeros(ROOM + 1))
    assert not reduce.takes(torch.zeros(0)) and not reduce.takes(torch.zeros(4, dtype=torch.int64))


def test_reduce_over_one_rank_returns_the_input() -> None:
    reduce = OneShotReduce(0, [own_memory(1, torch.device("cuda" if GPUS else "cpu"))])
    x = torch.arange(3000, dtype=torch.float32, device=reduce._calls.device)
    for maximum in (False, True):
        assert torch.equal(reduce(x, maximum), x)
    assert reduce._calls[:3].tolist() == [2, 2, 2] and reduce._calls[3] == 0


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 80), (5, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_all_reduce_and_norm_equals_separate_kernels(
    rows: int, width: int, dtype: torch.dtype, fp8: bool
) -> None:
    """The test runs rank 0 of two, after the peer has sent its part."""
    device = torch.device("cuda" if GPUS else "cpu")
    memory = [own_memory(2, device) for _ in range(2)]
    both = OneShotAddNorm(0, memory)
    hidden_TC, ours_TC, theirs_TC = (torch.randn(rows, width, dtype=dtype, device=device) for _ in "abc")
    weight_C, block = torch.randn(width, dtype=dtype, device=device), 1 << (width - 1).bit_length()
    places, flags = memory[0]
    assert both.takes(ours_TC)
    for call in (1, 2):
        places.fill_(float("nan"))
        flags.fill_(call)
        start = (call & 1) * 2 * ROOM + ROOM
        for row in range(rows):
            room = places[start + row * block :].view(dtype)
            room[:width] = theirs_TC[row]
        sum_TC, normed = both(hidden_TC, ours_TC, weight_C, 1e-5, fp8)
        update_TC = (ours_TC.float() + theirs_TC.float()).to(dtype)
        wanted_TC, wanted = kernel_add_norm(hidden_TC, update_TC, weight_C, 1e-5, fp8)
        assert torch.equal(sum_TC, wanted_TC)
        if isinstance(normed, Fp8Rows) and isinstance(wanted, Fp8Rows):
            assert torch.equal(normed.scale_T1, wanted.scale_T1)
            normed, wanted = normed.values_TI.float(), wanted.values_TI.float()
        assert isinstance(normed, torch.Tensor) and isinstance(wanted, torch.Tensor)
        assert torch.equal(normed, wanted)
        other_half = places[(1 - (call & 1)) * 2 * ROOM :][: 2 * ROOM]
        assert other_half.isnan().all(), "the next call's numbers lie apart"
        assert (memory[1][1][:rows] == call).all(), "the other hears of each row"


def test_add_norm_refuses_rows_that_are_too_wide_or_too_many() -> None:
    both = OneShotAddNorm(0, [own_memory(1, torch.device("cpu"))])
    assert both.takes(torch.zeros(128, 8192)) and not both.takes(torch.zeros(129, 8192))
    assert not both.takes(torch.zeros(1, 8193)) and not both.takes(torch.zeros(0, 64))
