"""Tests paged decode attention and page scores: CPU versions against oracles, kernels against those."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.paged_decode import cpu, dispatch, launch
from deltafront.kernels.paged_decode.launch import SplitPlan
from deltafront.kernels.paged_decode.page_selection import select_pages
from deltafront.kernels.paged_decode.pages import PagedInput, SelectedPages
from deltafront.tests.numerics import assert_rows_close, poisoned_empty, synchronising_raises
from deltafront.tests.reference.paged_decode import paged_attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float32, torch.float16]
SHAPES = [(2, 2, 64), (9, 3, 64), (4, 1, 128), (16, 2, 64), (4, 2, 256)]
"""(query heads, key heads, D), with 1, 3, 4, 8 and 2 query heads per key head."""
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


@dataclass(frozen=True)
class Shape:
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    spare_columns: int = 3
    dtype: torch.dtype = torch.float32
    seed: int = 0


def make(lengths: list[int], shape: Shape | None = None, sharpness: float = 1.0) -> PagedInput:
    """Make requests with shuffled pages. Unused slots have NaN, unused table columns an invalid page id."""
    s = shape or Shape()
    generator = torch.Generator().manual_seed(s.seed)
    pages = [-(-tokens // PAGE_TOKENS) for tokens in lengths]
    columns = max(pages) + s.spare_columns
    ids = torch.randperm(sum(pages) + 2, generator=generator)[: sum(pages)].split(pages)
    table_RP = torch.full((len(lengths), columns), 1 << 28, dtype=torch.int32)
    size = (sum(pages) + 2, PAGE_TOKENS, s.kv_heads, s.head_dim)
    k_PSGD, v_PSGD = torch.full(size, float("nan")), torch.full(size, float("nan"))
    for request, (tokens, own) in enumerate(zip(lengths, ids, strict=True)):
        table_RP[request, : len(own)] = own
        for page, start in zip(own.tolist(), range(0, tokens, PAGE_TOKENS), strict=True):
            filled = min(PAGE_TOKENS, tokens - start)
            k_PSGD[page, :filled] = torch.randn(filled, *size[2:], generator=generator)
            v_PSGD[page, :filled] = torch.randn(filled, *size[2:], generator=generator)
    q_RHD = sharpness * torch.randn(len(lengths), s.q_heads, s.head_dim, generator=generator)
    floats = [x.to(DEVICE, s.dtype) for x in (q_RHD, k_PSGD, v_PSGD)]
    return PagedInput(*floats, table_RP.to(DEVICE), integers(lengths), s.head_dim**-0.5)  # type: ignore[call-arg]


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def fp32(x: PagedInput) -> PagedInput:
    """Convert x to fp32, from which the CPU version computes the expected output."""
    return replace(x, q_RHD=x.q_RHD.float(), k_PSGD=x.k_PSGD.float(), v_PSGD=x.v_PSGD.float())


def choose(x: PagedInput, columns: list[list[int]]) -> SelectedPages:
    width = max(map(len, columns))
    padded = [row + [0] * (width - len(row)) for row in columns]
    return SelectedPages(
        x,
        torch.tensor(padded, dtype=torch.int32, device=DEVICE),
        integers([len(row) for row in columns]),
    )


def test_paged_attention_on_the_cpu_equals_the_oracle() -> None:
    x = make([1, 16, 37])
    out_RHD, lse_RH, score_RP = cpu.paged_attention_scored(x)
    plain_RHD, plain_RH = cpu.paged_attention(x)
    assert torch.equal(plain_RHD, out_RHD)
    assert torch.equal(plain_RH, lse_RH)
    for request, pages in enumerate([1, 1, 3]):
        out_HD, lse_H, weights = paged_attention(x, request, list(range(pages)))
        assert_rows_close(out_RHD[request].cpu(), out_HD, dtype=torch.float32)
        torch.testing.assert_close(lse_RH[request].cpu().double(), lse_H, rtol=1e-5, atol=1e-5)
        expected = torch.zeros(score_RP.shape[1], dtype=torch.float64)
        expected[:pages] = weights.amax(0).sum(-1)
        torch.testing.assert_close(score_RP[request].cpu().double(), expected, rtol=1e-5, atol=1e-7)


def test_sparse_decode_on_the_cpu_attends_only_to_selected_pages() -> None:
    x = make([37, 80])
    columns = [[0, 2], [1, 3, 4]]
    out_RHD, lse_RH = cpu.paged_attention_sparse(choose(x, columns))
    for request, chosen in enumerate(columns):
        out_HD, lse_H, _ = paged_attention(x, request, chosen)
        assert_rows_close(out_RHD[request].cpu(), out_HD, dtype=torch.float32)
        torch.testing.assert_close(lse_RH[request].cpu().double(), lse_H, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
def test_paged_attention_kernel_equals_the_cpu_version(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [8192, 4097, 4080, 1] if GPU else [1, 100, 144]
    x = make(lengths, Shape(q_heads, kv_heads, head_dim, dtype=dtype), sharpness=2.0)
    cut = None if GPU else SplitPlan(32, 2, score_blocks=2)
    with poisoned_empty():
        out_RHD, lse_RH, score_RP = launch.paged_attention_scored(x, cut)
        plain_RHD, plain_RH = launch.paged_attention(x, cut)
    expected_RHD, expected_RH, expected_RP = cpu.paged_attention_scored(fp32(x))
    assert_rows_close(out_RHD, expected_RHD)
    assert_rows_close(score_RP, expected_RP, dtype=dtype)
    torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=1e-3)
    assert_rows_close(plain_RHD, expected_RHD)
    torch.testing.assert_close(plain_RH, lse_RH)
    assert (score_RP[-1, -(-lengths[-1] // PAGE_TOKENS) :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
def test_sparse_paged_attention_kernel_equals_the_cpu_version(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    x = make([100, 144, 5], Shape(q_heads, kv_heads, head_dim, dtype=dtype), sharpness=2.0)
    selection = choose(x, [[0, 3, 6], [1, 2, 4, 5], [0]])
    with poisoned_empty():
        out_RHD, lse_RH = launch.paged_attention_sparse(selection, None if GPU else SplitPlan(32, 2))
    expected_RHD, expected_RH = cpu.paged_attention_sparse(choose(fp32(x), [[0, 3, 6], [1, 2, 4, 5], [0]]))
    assert_rows_close(out_RHD, expected_RHD)
    torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cut", [SplitPlan(16, 1), SplitPlan(64, 5), SplitPlan(32, 16, score_blocks=4)])
def test_split_plan_does_not_change_the_output(cut: SplitPlan) -> None:
    x = make([70, 129], Shape(dtype=DTYPES[0]))
    with poisoned_empty():
        out_RHD, _, score_RP = launch.paged_attention_scored(x, cut)
    expected_RHD, _, expected_RP = cpu.paged_attention_scored(fp32(x))
    assert_rows_close(out_RHD, expected_RHD)
    assert_rows_close(score_RP, expected_RP, dtype=x.q_RHD.dtype)


@pytest.mark.parametrize("lengths", [[1, 700, 16, 1], [300], [5, 5, 5, 5, 5], [17, 200, 90]])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_divides_keys_of_all_requests_among_programs(lengths: list[int], splits: int) -> None:
    """The test has requests with all pages and with selected pages."""
    x, cut = make(lengths, Shape(dtype=DTYPES[0])), SplitPlan(32, splits)
    chosen = [list(range(0, -(-tokens // PAGE_TOKENS), 2)) for tokens in lengths]
    selection = choose(x, chosen)
    mixed = replace(selection, counts_R=selection.counts_R * integers([n % 2 for n in range(len(lengths))]))
    with poisoned_empty():
        plain_RHD, plain_RH = launch.paged_attention(x, cut)
        mixed_RHD, mixed_RH = launch.paged_attention_sparse(mixed, cut)
    for (out_RHD, lse_RH), (expected_RHD, expected_RH) in (
        ((plain_RHD, plain_RH), cpu.paged_attention(fp32(x))),
        ((mixed_RHD, mixed_RH), cpu.paged_attention_sparse(replace(mixed, x=fp32(x)))),
    ):
        assert_rows_close(out_RHD, expected_RHD)
        torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=1e-3)


def test_finds_its_share_among_more_requests_than_it_loads_at_once() -> None:
    lengths = [3] * 100 + [90, 1] + [20] * 30
    x = make(lengths, Shape(q_heads=1, kv_heads=1, dtype=DTYPES[0]))
    with poisoned_empty():
        out_RHD, lse_RH = launch.paged_attention(x, SplitPlan(32, 7))
    expected_RHD, expected_RH = cpu.paged_attention(fp32(x))
    assert_rows_close(out_RHD, expected_RHD)
    torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=1e-3)


def test_float32_queries_attend_to_16_bit_pages() -> None:
    x = make([70], Shape(dtype=torch.float16))
    wide = replace(x, q_RHD=x.q_RHD.float())
    out_RHD, _ = launch.paged_attention(wide)
    assert out_RHD.dtype == torch.float32
    assert_rows_close(out_RHD, cpu.paged_attention(fp32(x))[0], dtype=torch.float16)
    assert_rows_close(cpu.paged_attention(wide)[0], cpu.paged_attention(fp32(x))[0])


def run_all(x: PagedInput) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return [cpu.paged_attention_scored(x), launch.paged_attention_scored(x)]


def test_paged_decode_handles_large_logits_and_equal_keys() -> None:
    x = make([150], Shape(dtype=DTYPES[0]), sharpness=200.0)
    expected_RHD, expected_RH, expected_RP = cpu.paged_attention_scored(fp32(x))
    for out_RHD, lse_RH, score_RP in run_all(x):
        assert_rows_close(out_RHD, expected_RHD)
        torch.testing.assert_close(lse_RH, expected_RH, rtol=1e-3, atol=1e-2)
        assert_rows_close(score_RP, expected_RP, dtype=x.q_RHD.dtype)
    x.k_PSGD.fill_(1.0)  # equal keys: a page's score is its share of the tokens
    for _, _, score_RP in run_all(x):
        share = torch.tensor([16 / 150] * 9 + [6 / 150], device=DEVICE)
        torch.testing.assert_close(score_RP[0, :10], share, rtol=5e-3, atol=0)


def test_page_scores_of_one_head_sum_to_one() -> None:
    x = make([150, 31], Shape(q_heads=1, kv_heads=1, dtype=DTYPES[0]))
    for _, _, score_RP in run_all(x):
        torch.testing.assert_close(score_RP.sum(1), torch.ones(2, device=DEVICE), rtol=5e-3, atol=0)


def test_selecting_every_page_equals_full_attention() -> None:
    x = make([70, 33])
    selection = choose(x, [list(range(5)), list(range(3))])
    for module in (cpu, launch):
        sparse, full = module.paged_attention_sparse(selection), module.paged_attention(x)
        assert_rows_close(sparse[0], full[0])
        torch.testing.assert_close(sparse[1], full[1])


def test_outputs_over_two_sets_of_pages_merge_by_their_lse() -> None:
    """Outputs of two disjoint selections, weighted by exp(lse), add up to the output of all pages."""
    x = make([150])
    for module in (cpu, launch):
        halves = [module.paged_attention_sparse(choose(x, [list(range(first, 10, 2))])) for first in (0, 1)]
        out_HalfRHD, lse_HalfRH = (torch.stack(part) for part in zip(*halves, strict=True))
        merged_RHD = (lse_HalfRH.softmax(0)[..., None] * out_HalfRHD).sum(0)
        full_RHD, full_RH = module.paged_attention(x)
        assert_rows_close(merged_RHD, full_RHD)
        torch.testing.assert_close(lse_HalfRH.logsumexp(0), full_RH)


def test_a_request_without_selected_pages_attends_to_all_pages() -> None:
    """Other requests of the same batch select pages."""
    x = make([150, 5, 70], Shape(dtype=DTYPES[0]))
    selection = choose(x, [[1, 9], [0], [2, 4]])
    mixed = replace(selection, counts_R=integers([2, 0, 0]))
    for module in (cpu, launch):
        full, sparse = module.paged_attention(x), module.paged_attention_sparse(selection)
        out_RHD, lse_RH = module.paged_attention_sparse(mixed)
        assert_rows_close(out_RHD, torch.cat([sparse[0][:1], full[0][1:]]))
        torch.testing.assert_close(lse_RH, torch.cat([sparse[1][:1], full[1][1:]]))
    with pytest.raises(KernelInputError, match="not its own"):
        cpu.paged_attention_sparse(replace(selection, counts_R=integers([2, -1, 1])))


def test_sparse_decode_touches_only_selected_pages() -> None:
    x = make([150])
    selection = choose(x, [[1, 4, 9]])
    expected, _ = cpu.paged_attention_sparse(selection)
    for column in set(range(10)) - {1, 4, 9}:
        page = int(x.table_RP[0, column])
        x.k_PSGD[page] = x.v_PSGD[page] = float("nan")
    for module in (cpu, launch):
        assert_rows_close(module.paged_attention_sparse(selection)[0], expected)


def test_paged_decode_accepts_strided_queries_and_pages() -> None:
    """Queries are slices of a fused projection, pages are slices of a tensor with both K and V."""
    x = make([70, 33])
    kv = torch.stack([x.k_PSGD, x.v_PSGD], dim=2)
    wide = torch.cat([x.q_RHD, torch.full_like(x.q_RHD, float("nan"))], dim=1)
    y = replace(x, q_RHD=wide[:, :4], k_PSGD=kv[:, :, 0], v_PSGD=kv[:, :, 1])
    assert not y.k_PSGD.is_contiguous()
    expected = cpu.paged_attention(x)[0]
    for module in (cpu, launch):
        assert_rows_close(module.paged_attention(y)[0], expected)


def test_page_scores_of_one_layer_select_pages_for_the_next() -> None:
    x = make([150, 40])
    args = (x.q_RHD, x.k_PSGD, x.v_PSGD, x.table_RP, x.lengths_R)
    out_RHD, lse_RH, score_RP = dispatch.paged_attention_scored(*args, scale=x.scale)
    full_RHD, full_RH = dispatch.paged_attention(*args, scale=x.scale)
    assert_rows_close(out_RHD, full_RHD)
    torch.testing.assert_close(lse_RH, full_RH)
    selected_RK, counts_R = select_pages(score_RP, x.lengths_R, budget=4, recency=2)
    assert counts_R.tolist() == [4, 3]
    assert selected_RK[0, 2:].tolist() == [8, 9]
    top = torch.topk(score_RP[0, :8], 2).indices.sort().values
    assert selected_RK[0, :2].tolist() == top.tolist()
    sparse_RHD, _ = dispatch.paged_attention_sparse(
        *args, selected_RK=selected_RK, counts_R=counts_R, scale=x.scale
    )
    expected, _ = cpu.paged_attention_sparse(choose(x, [selected_RK[0].tolist(), [0, 1, 2]]))
    assert_rows_close(sparse_RHD, expected)


def corrupt(x: PagedInput, **changes: object) -> None:
    values = {name: getattr(x, name) for name in x.__dataclass_fields__} | changes
    scale = values.pop("scale")
    dispatch.paged_attention(**values, scale=scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"q_RHD": x.q_RHD[0]}, "q must have 3 dimensions"),
        (lambda x: {"q_RHD": x.q_RHD[:0]}, "q must have 3 dimensions"),
        (lambda x: {"q_RHD": x.q_RHD[:, :3]}, "not a multiple"),
        (lambda x: {"q_RHD": x.q_RHD[..., :32]}, "head dimension 32"),
        (lambda x: {"q_RHD": x.q_RHD.half()}, "q is torch.float16"),
        (lambda x: {"q_RHD": x.q_RHD.long()}, "q: dtype torch.int64"),
        (lambda x: {"q_RHD": x.q_RHD.to("meta")}, "on meta"),
        (lambda x: {"q_RHD": x.q_RHD.mT.contiguous().mT}, "must be contiguous"),
        (lambda x: {"k_PSGD": x.k_PSGD[:, :8], "v_PSGD": x.v_PSGD[:, :8]}, "must hold 16 tokens"),
        (lambda x: {"k_PSGD": x.k_PSGD[1:]}, "differ"),
        (lambda x: {"v_PSGD": x.v_PSGD.half()}, "differ"),
        (lambda x: {"table_RP": x.table_RP.long()}, "table must be int32"),
        (lambda x: {"table_RP": x.table_RP[:1]}, "the first 2"),
        (lambda x: {"table_RP": x.table_RP[:, :0]}, "none of them 0"),
        (lambda x: {"table_RP": x.table_RP.T.contiguous().T}, "table: the last dimension"),
        (lambda x: {"lengths_R": x.lengths_R.float()}, "lengths must be int32"),
        (lambda x: {"lengths_R": x.lengths_R[None]}, "lengths must have 1 dimensions"),
        (lambda x: {"scale": float("nan")}, "scale nan"),
    ],
)
def test_paged_decode_refuses_bad_tensors(change: object, message: str) -> None:
    x = make([70, 33])
    with pytest.raises(KernelInputError, match=message):
        corrupt(x, **change(x))  # type: ignore[operator]


def test_paged_decode_refuses_bad_values_and_page_selections() -> None:
    x = make([70, 33])
    with pytest.raises(KernelInputError, match="selected must be int32"):
        SelectedPages(x, torch.zeros(2, 3, device=DEVICE), integers([1, 1]))
    with pytest.raises(KernelInputError, match="counts must have 1"):
        SelectedPages(x, integers([[0], [0]]), integers([1]))  # type: ignore[list-item]
    with pytest.raises(KernelInputError, match="not its own"):
        cpu.paged_attention_sparse(choose(x, [[0], [0, 3]]))
    with pytest.raises(KernelInputError, match="request 1 has 0 tokens"):
        cpu.paged_attention(replace(x, lengths_R=integers([70, 0])))
    with pytest.raises(KernelInputError, match="head dimension 48"):
        launch.paged_attention(make([5], Shape(head_dim=48)))


@needs_gpu
def test_a_cuda_graph_stays_valid_for_new_lengths_and_page_tables() -> None:
    """The graph has a Δ-layer, page selection and a sparse layer. It is replayed with other requests."""
    long = make([4000, 100], Shape(8, 2, 128, dtype=torch.bfloat16, spare_columns=0))
    other = make([1700, 4000], Shape(8, 2, 128, dtype=torch.bfloat16, spare_columns=0, seed=1))
    tensors = {name: each for name, each in vars(long).items() if isinstance(each, torch.Tensor)}
    x = replace(long, **{name: each.clone() for name, each in tensors.items()})
    pool = max(long.k_PSGD.shape[0], other.k_PSGD.shape[0])
    x = replace(x, k_PSGD=x.k_PSGD.new_empty(pool, 16, 2, 128), v_PSGD=x.k_PSGD.new_empty(pool, 16, 2, 128))

    def fill(source: PagedInput) -> None:
        for name in ("k_PSGD", "v_PSGD"):
            getattr(x, name)[: len(getattr(source, name))] = getattr(source, name)
        for name in ("q_RHD", "table_RP", "lengths_R"):
            getattr(x, name).copy_(getattr(source, name))

    def step() -> tuple[torch.Tensor, ...]:
        out_RHD, _, score_RP = launch.paged_attention_scored(x)
        selected_RK, counts_R = select_pages(score_RP, x.lengths_R, budget=64, recency=8)
        sparse_RHD, _ = launch.paged_attention_sparse(SelectedPages(x, selected_RK, counts_R))
        return out_RHD, score_RP, selected_RK, counts_R, sparse_RHD

    fill(long)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    with synchronising_raises():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_RHD, score_RP, selected_RK, counts_R, sparse_RHD = step()
    for source in (other, long):
        fill(source)
        for result in (out_RHD, score_RP, sparse_RHD):
            result.fill_(float("nan"))
        graph.replay()
        expected_RHD, _, expected_RP = cpu.paged_attention_scored(fp32(source))
        assert_rows_close(out_RHD, expected_RHD)
        assert_rows_close(score_RP, expected_RP, dtype=torch.bfloat16)
        wanted_RK, wanted_R = cpu.select_pages(score_RP, source.lengths_R, budget=64, recency=8)
        assert torch.equal(selected_RK, wanted_RK)
        assert torch.equal(counts_R, wanted_R)
        selection = SelectedPages(fp32(source), selected_RK, counts_R)
        assert_rows_close(sparse_RHD, cpu.paged_attention_sparse(selection)[0])
