"""Tests attention backends: CPU versions against oracles, kernels against CPU versions, and bad input.

Without a GPU, kernels run in Triton's interpreter (fp32, fp16). With a GPU they run compiled, also in bf16.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from deltafront.kernels.attention import block_sparse, dense
from deltafront.kernels.attention.block_sparse import BlockSparseBackend
from deltafront.kernels.attention.hopper import launch as hopper_launch
from deltafront.kernels.attention.hopper.hopper_plan import BY_LENGTH, LONGEST_ROWS_FIRST, ONE_HEAD_FIRST
from deltafront.kernels.attention.hopper.launch import by_length
from deltafront.kernels.attention.packed import delta_kv, delta_xattention, delta_xattention_kernel
from deltafront.kernels.attention.packed.delta_kv import CHUNK, DeltaKVBackend
from deltafront.kernels.attention.packed.delta_xattention import DeltaXAttentionBackend
from deltafront.kernels.attention.packed.runs import PackedRuns
from deltafront.kernels.interface import AttentionInput, KernelInputError, TileMask, no_phase
from deltafront.kernels.options import DeltaKVOptions, DeltaXAttentionOptions
from deltafront.tests.numerics import (
    assert_rows_close,
    chunk_of,
    full_mask,
    mask_of,
    poisoned_empty,
    random_input,
    random_mask,
    spec_of,
)
from deltafront.tests.reference.anchor_scan import run_starts
from deltafront.tests.reference.attention import mixed_attention, packed_attention, reference_attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
"""Dtypes to test. Triton's interpreter computes bf16 wrongly."""
SHAPES = [
    {"tokens": 300, "q_heads": 3, "kv_heads": 1, "head_dim": 64},
    {"tokens": 388, "rows": 132, "q_heads": 4, "kv_heads": 2, "head_dim": 128},
    {"tokens": 257, "rows": 1, "q_heads": 2, "kv_heads": 2, "head_dim": 32, "batch": 2},
]
MIXED = DeltaXAttentionOptions(cos=0.8, exact_share=0.3)


def on_cpu(x: AttentionInput) -> AttentionInput:
    return as_stored(replace(x, q_BHTD=x.q_BHTD.float(), k_BGSD=x.k_BGSD.float(), v_BGSD=x.v_BGSD.float()))


def as_stored(x: AttentionInput) -> AttentionInput:
    """Copy x to the CPU in its dtype, because packed rows are rounded to the KV cache's dtype."""
    return AttentionInput.of(
        *(t.cpu() for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD)), prompt_tokens=x.prompt_tokens
    )


def mask_on_cpu(mask: TileMask) -> TileMask:
    assert mask.score_BHNM is not None
    return TileMask(mask.index_BHNM.cpu(), mask.count_BHN.cpu(), mask.score_BHNM.cpu())


def state_on_cpu(state: PackedRuns) -> PackedRuns:
    return replace(state, start_BGP=state.start_BGP.cpu(), offset_BGC=state.offset_BGC.cpu())


def with_runs(x: AttentionInput) -> AttentionInput:
    """Make every three consecutive keys similar."""
    k = x.k_BGSD
    k.copy_(0.9 * k[:, :, torch.arange(k.shape[2], device=k.device) // 3 * 3] + 0.3 * k)
    return x


def table_of(x: AttentionInput, mask: TileMask) -> torch.Tensor:
    place = torch.where(mask.index_BHNM < 0, x.key_blocks, mask.index_BHNM.long())
    table = torch.zeros(*place.shape[:3], x.key_blocks + 1, dtype=torch.bool)
    return table.scatter_(3, place, True)[..., :-1]


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_and_block_sparse_on_the_cpu_equal_the_oracle(shape: dict[str, int]) -> None:
    x = random_input(**shape)
    assert_rows_close(dense.cpu_attend(x), reference_attention(x))
    if x.q_start % 128 == 0:
        mask = random_mask(x, 0.5)
        assert_rows_close(block_sparse.cpu_attend(x, mask), reference_attention(x, table_of(x, mask)))


@pytest.mark.usefixtures("split_keys")
def test_dense_attention_takes_any_chunk_start_and_large_logits() -> None:
    whole = random_input(300, q_heads=4, kv_heads=2)
    x = chunk_of(whole, 37, 291)
    x = replace(x, scale=30.0)
    expected = reference_attention(replace(whole, scale=30.0))[:, :, 37:291]
    assert_rows_close(dense.cpu_attend(x), expected)
    y = AttentionInput.of(
        *(t.to(DEVICE) for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD)), q_start=x.q_start, scale=30.0
    )
    with poisoned_empty():
        assert_rows_close(dense.kernel_attend(y).cpu(), expected, factor=2)


@pytest.mark.usefixtures("split_keys")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("start", [127, 255])
def test_attention_is_correct_if_a_rows_first_tile_is_fully_masked(start: int, head_dim: int) -> None:
    """The chunk's first row ends a block of 128 positions; other rows of its tile are in the next block."""
    whole = random_input(420, q_heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.float16, device=DEVICE)
    x = chunk_of(whole, start, 420)
    with poisoned_empty():
        found = dense.kernel_attend(x)
    assert_rows_close(found, reference_attention(whole)[:, :, start:])


@pytest.mark.parametrize("means", [True, False])
def test_delta_kv_weights_each_merged_key_by_its_number_of_keys(means: bool) -> None:
    x = with_runs(random_input(700, q_heads=1, kv_heads=1, head_dim=16))
    backend = DeltaKVBackend(DeltaKVOptions(cos=0.8, means=means, critical=128))
    state = backend.new_state(spec_of(x))
    found = backend.attend(x, None, state, no_phase)
    runs = int(state.offset_BGC[0, 0, -1])
    assert 100 < runs < 300
    starts = [*state.start_BGP[0, 0, :runs].tolist(), *range(512, 700)]
    (found_starts,) = run_starts(x.k_BGSD[:, :, :512], 0.8, CHUNK, "cosine")
    assert starts[:runs] == found_starts
    assert_rows_close(found, packed_attention(x, starts, 128, means=means, chunk=CHUNK))


def test_merging_identical_keys_does_not_change_delta_kv() -> None:
    x = random_input(700, q_heads=2, kv_heads=1)
    x.k_BGSD.copy_(x.k_BGSD[:, :, torch.arange(700) // 5 * 5])
    exact = dense.cpu_attend(x)
    backend = DeltaKVBackend(DeltaKVOptions(cos=0.9999, critical=128))
    state = backend.new_state(spec_of(x))
    assert_rows_close(backend.attend(x, None, state, no_phase), exact)
    assert int(state.offset_BGC[0, 0, -1]) < 200


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("means", [True, False])
def test_tiles_outside_the_exact_share_attend_to_merged_keys(share: float, means: bool) -> None:
    whole = with_runs(random_input(700, q_heads=2, kv_heads=1, head_dim=16))
    x = chunk_of(whole, 128, 690)
    mask = random_mask(x, 0.7)
    backend = DeltaXAttentionBackend(DeltaXAttentionOptions(cos=0.8, exact_share=share, means=means))
    state = backend.new_state(spec_of(whole))
    found = backend.attend(x, mask, state, no_phase)
    runs = int(state.offset_BGC[0, 0, state.chunks])
    assert 100 < runs < 400
    starts = [*state.start_BGP[0, 0, :runs].tolist(), *range(state.chunks * 128, 690)]
    exact = table_of(x, replace(mask, index_BHNM=mask.index_BHNM.where(best_of(mask, share), -1)))
    assert_rows_close(found, mixed_attention(x, exact[0], table_of(x, mask)[0], [starts], means=means))


def best_of(mask: TileMask, share: float) -> torch.Tensor:
    """Mark each list's exact tiles: the last, and the best ceil(share * n) of the n others."""
    assert mask.score_BHNM is not None
    best = torch.zeros(mask.index_BHNM.shape, dtype=torch.bool)
    for row in torch.cartesian_prod(*(torch.arange(size) for size in mask.count_BHN.shape)).tolist():
        others = int(mask.count_BHN[tuple(row)]) - 1
        ranked = sorted(range(others), key=mask.score_BHNM[tuple(row)].tolist().__getitem__, reverse=True)
        for entry in [others, *ranked[: math.ceil(share * others)]]:
            best[(*row, entry)] = True
    return best


@pytest.mark.usefixtures("split_keys")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_kernels_equal_the_cpu_versions(shape: dict[str, int], dtype: torch.dtype) -> None:
    x = with_runs(random_input(**shape, dtype=dtype, device=DEVICE))
    y = on_cpu(x)
    with poisoned_empty():
        found = dense.kernel_attend(x)
    assert_rows_close(found.cpu(), dense.cpu_attend(y), dtype=dtype)
    mask = random_mask(x, 0.5)
    with poisoned_empty():
        found = block_sparse.kernel_attend(x, mask)
    assert_rows_close(found.cpu(), block_sparse.cpu_attend(y, mask_on_cpu(mask)), dtype=dtype)
    mixed = DeltaXAttentionBackend(MIXED)
    state = mixed.new_state(spec_of(x))
    state.extend(x.k_BGSD, 128, mixed.cos)
    exact_BHNM = delta_xattention_kernel.kernel_exact_table(mask, 0.3)
    for means in (True, False):
        with poisoned_empty():
            found = delta_xattention_kernel.kernel_attend(x, mask, state, exact_BHNM, means=means)
        expected = delta_xattention.cpu_attend(
            as_stored(x), mask_on_cpu(mask), state_on_cpu(state), exact_BHNM.cpu(), means=means
        )
        assert_rows_close(found.cpu(), expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("means", [True, False])
def test_merged_key_attention_kernel_equals_the_cpu_version(dtype: torch.dtype, means: bool) -> None:
    x = with_runs(random_input(900, rows=260, q_heads=2, kv_heads=1, dtype=dtype, device=DEVICE))
    state = PackedRuns.empty(spec_of(x), CHUNK)
    state.extend(x.k_BGSD, CHUNK, 0.8)
    with poisoned_empty():
        found = delta_kv.kernel_attend(x, state, critical=128, means=means)
    expected = delta_kv.cpu_attend(as_stored(x), state_on_cpu(state), critical=128, means=means)
    assert_rows_close(found.cpu(), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("critical", [0, 100, 512])
def test_merged_key_kernel_has_the_same_exact_keys_as_the_cpu_version(critical: int, head_dim: int) -> None:
    """A query block has the same exact keys in any chunk."""
    for tokens, starts in ((1700, (0, 384, 1152)), (1000, (0, 128))) if GPU else ((1700, (1152,)),):
        x = with_runs(
            random_input(tokens, q_heads=1, kv_heads=1, head_dim=head_dim, dtype=torch.float16, device=DEVICE)
        )
        state = PackedRuns.empty(spec_of(x), CHUNK)
        state.extend(x.k_BGSD, CHUNK, 0.8)
        options: dict[str, Any] = {"critical": critical, "means": True}
        expected = delta_kv.cpu_attend(as_stored(x), state_on_cpu(state), **options)
        for start in starts:
            with poisoned_empty():
                found = delta_kv.kernel_attend(chunk_of(x, start, tokens), state, **options)
            assert_rows_close(found.cpu(), expected[:, :, start:])


@pytest.mark.usefixtures("split_keys")
def test_kernels_take_queries_and_keys_stored_token_by_token() -> None:
    """Models store (batch, tokens, heads, D). The test also uses an odd row stride."""
    x = random_input(300, q_heads=4, kv_heads=2, device=DEVICE, dtype=torch.float16)
    expected = dense.cpu_attend(on_cpu(x))
    for pad in (0, 1):
        q, k, v = (
            torch.nn.functional.pad(t.transpose(1, 2), (0, pad)).contiguous()[..., :64].transpose(1, 2)
            for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD)
        )
        assert not k.is_contiguous()
        with poisoned_empty():
            found = dense.kernel_attend(AttentionInput.of(q, k, v))
        assert_rows_close(found.cpu(), expected, dtype=torch.float16)


def uneven_mask(x: AttentionInput) -> TileMask:
    """Make a random mask whose heads have densities from 0.01 to 1."""
    heads = x.q_BHTD.shape[1]
    share = torch.logspace(-2, 0, heads, device=x.q_BHTD.device)[:, None, None]
    generator = torch.Generator(x.q_BHTD.device).manual_seed(5)
    keep = torch.rand(heads, x.query_blocks, x.key_blocks, generator=generator, device=x.q_BHTD.device)
    return mask_of(x, keep < share)


def test_orders_work_items_from_the_longest_tile_list_to_the_shortest() -> None:
    x = random_input(1500, q_heads=4, kv_heads=2, batch=2, device=DEVICE)
    count = uneven_mask(x).count_BHN.cpu().reshape(-1)
    entries = by_length(uneven_mask(x)).cpu()
    place = entries & 0xFFFFFFFF
    assert torch.equal(entries >> 32, count.sort(descending=True).values)
    assert torch.equal(place.sort().values, torch.arange(count.numel()))
    assert torch.equal(count[place], (entries >> 32).int())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="the order of Hopper's items")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_order_of_work_items_does_not_change_the_output(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = random_input(7000, q_heads=6, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, device=DEVICE)
    mask = uneven_mask(x)
    found = []
    for order in (ONE_HEAD_FIRST, LONGEST_ROWS_FIRST, BY_LENGTH):
        monkeypatch.setattr(hopper_launch, "_order", lambda *_, order=order: order)
        with poisoned_empty():
            found.append(block_sparse.kernel_attend(x, mask))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    expected = block_sparse.cpu_attend(on_cpu(x), mask_on_cpu(mask))
    assert_rows_close(found[0].cpu(), expected, dtype=torch.bfloat16)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_kernel_marks_the_same_exact_tiles_as_the_cpu_version(share: float) -> None:
    x = random_input(900, q_heads=2, kv_heads=1, head_dim=16, device=DEVICE)
    mask = random_mask(x, 0.7)
    assert mask.score_BHNM is not None
    for scores in (mask.score_BHNM, mask.score_BHNM - 0.5, (4 * mask.score_BHNM).round()):
        scored = replace(mask, score_BHNM=scores)
        with poisoned_empty():
            found = delta_xattention_kernel.kernel_exact_table(scored, share).cpu()
        listed = torch.arange(found.shape[3]) < mask.count_BHN.cpu()[..., None]
        expected = delta_xattention.cpu_exact_table(mask_on_cpu(scored), share)
        assert torch.equal(found & listed, expected & listed)


@pytest.mark.parametrize("share", ["0.07", "0.15", "0.28", "0.3", "0.6"])
def test_the_number_of_exact_tiles_is_rounded_up(share: str) -> None:
    """In float32, 0.6 of 25 tiles is more than 15. In float64, 0.28 of 25 is more than 7."""
    counts = torch.arange(1, 65, dtype=torch.int32)
    score = torch.rand(1, 1, 64, 64)
    mask = TileMask(torch.arange(64, dtype=torch.int16).expand(1, 1, 64, 64), counts[None, None], score)
    on_device = TileMask(*(part.to(DEVICE) for part in (mask.index_BHNM, mask.count_BHN, score)))
    expected = [math.ceil(Fraction(share) * others) + 1 for others in range(64)]
    listed = torch.arange(64) < counts[:, None]
    for table in (
        delta_xattention.cpu_exact_table(mask, float(share)),
        delta_xattention_kernel.kernel_exact_table(on_device, float(share)).cpu(),
    ):
        assert (table[0, 0] & listed).sum(1).tolist() == expected


def test_computed_tiles_count_exact_and_merged_keys() -> None:
    x = with_runs(random_input(1200, q_heads=4, kv_heads=2))
    mask = random_mask(x, 0.4)
    listed = float(mask.count_BHN.sum())
    assert float(BlockSparseBackend().computed_tiles(x, mask, None)) == listed
    everything = DeltaXAttentionBackend(DeltaXAttentionOptions(cos=0.8, exact_share=1.0))
    state = everything.new_state(spec_of(x))
    everything.attend(x, mask, state, no_phase)
    assert float(everything.computed_tiles(x, mask, state)) == listed
    some = DeltaXAttentionBackend(DeltaXAttentionOptions(cos=0.8, exact_share=0.0))
    diagonals = mask.count_BHN.numel()
    assert diagonals + (listed - diagonals) / 4 < float(some.computed_tiles(x, mask, state)) < 0.6 * listed
    packed = DeltaKVBackend(DeltaKVOptions(cos=0.8, critical=128))
    packed_state = packed.new_state(spec_of(x))
    packed.attend(x, None, packed_state, no_phase)
    runs = packed_state.offset_BGC[0].double()
    # Blocks 5..8 take one packed chunk (their critical region begins at token 512 or later), block 9 two.
    expected = 4 * sum(range(1, 11)) - 4 * 4 * 4 - 4 * 8
    expected += 2 * (4 * float(runs[:, 1].sum()) + float(runs[:, 2].sum())) / 128
    assert float(packed.computed_tiles(x, None, packed_state)) == pytest.approx(expected)


def bad_masks(x: AttentionInput) -> dict[str, TileMask | None]:
    good = full_mask(x)
    return {
        "missing": None,
        "index type": replace(good, index_BHNM=good.index_BHNM.int()),
        "count type": replace(good, count_BHN=good.count_BHN.long()),
        "rows": replace(good, index_BHNM=good.index_BHNM[:, :, :1], count_BHN=good.count_BHN[:, :, :1]),
        "heads": replace(good, index_BHNM=good.index_BHNM[:, :1], count_BHN=good.count_BHN[:, :1]),
        "strided": replace(good, index_BHNM=good.index_BHNM.mT.contiguous().mT),
        "device": replace(good, count_BHN=good.count_BHN.to("meta")),
    }


def test_refuses_invalid_masks_before_any_launch() -> None:
    x = random_input(300, device=DEVICE)
    mixed = DeltaXAttentionBackend(MIXED)
    for name, mask in bad_masks(x).items():
        with pytest.raises(KernelInputError, match="block_sparse"):
            BlockSparseBackend().attend(x, mask, None, no_phase)
        with pytest.raises(KernelInputError, match="delta_xattention"):
            mixed.attend(x, mask, mixed.new_state(spec_of(x)), no_phase)
        if name != "missing":
            assert mask is not None
            with pytest.raises(KernelInputError):
                block_sparse.kernel_attend(x, mask)
    unscored = replace(full_mask(x), score_BHNM=None)
    with pytest.raises(KernelInputError, match="exact_share"):
        mixed.attend(x, unscored, mixed.new_state(spec_of(x)), no_phase)


def test_refuses_unaligned_chunks_and_states_of_other_inputs() -> None:
    x = chunk_of(random_input(300, device=DEVICE), 30, 300)
    packed = DeltaKVBackend(DeltaKVOptions(cos=0.8, critical=128))
    with pytest.raises(KernelInputError, match="multiple of 128"):
        packed.attend(x, None, packed.new_state(spec_of(x)), no_phase)
    with pytest.raises(KernelInputError, match="multiple of 128"):
        BlockSparseBackend().attend(x, mask_of(x, torch.ones(3, 3, dtype=torch.bool)), None, no_phase)
    y = random_input(300, device=DEVICE)
    short = packed.new_state(replace(spec_of(y), max_tokens=256))
    with pytest.raises(KernelInputError, match="max_tokens"):
        packed.attend(y, None, short, no_phase)
    with pytest.raises(KernelInputError, match="state is for"):
        packed.attend(y, None, packed.new_state(replace(spec_of(y), kv_heads=2)), no_phase)


def test_attention_kernels_refuse_unsupported_inputs() -> None:
    odd = random_input(130, head_dim=48, device=DEVICE)
    with pytest.raises(KernelInputError, match="head dimension 48"):
        dense.kernel_attend(odd)
    x = random_input(130, device=DEVICE)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(KernelInputError, match="scale"):
            dense.kernel_attend(replace(x, scale=scale))
    many = torch.empty(1, 1, 1, 16, device=DEVICE).expand(1, 1, 1 << 22, 16)
    with pytest.raises(KernelInputError, match="fewer than"):
        dense.kernel_attend(AttentionInput.of(many[:, :, :1], many, many))
    with pytest.raises(KernelInputError, match="not on meta"):
        meta = torch.empty(1, 1, 128, 64, device="meta")
        BlockSparseBackend().attend(
            AttentionInput.of(meta, meta, meta), meta_mask(meta.device), None, no_phase
        )


def meta_mask(device: torch.device) -> TileMask:
    index = torch.empty(1, 1, 1, 1, dtype=torch.int16, device=device)
    return TileMask(index, torch.empty(1, 1, 1, dtype=torch.int32, device=device))
