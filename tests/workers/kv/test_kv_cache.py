"""Compares the paged KV cache with contiguous tensors, for any order of pages and any way of writing."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.layers.kv_int8 import dequantise, quantise
from deltafront.workers.kv.cache import KVCacheError, PagedKVCache, token_bytes

LAYERS, HEADS, DIM, PAGES = range(4, 7), 3, 8, 12


def make(dtype: torch.dtype = torch.float32) -> PagedKVCache:
    return PagedKVCache(LAYERS, HEADS, DIM, PAGES, dtype, "cpu")


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, count, HEADS, DIM, generator=generator))  # type: ignore[return-value]


@pytest.mark.parametrize("cuts", [(50,), (16, 16, 18), (1, 14, 2, 33), (3,) * 16 + (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_tokens_that_were_written_in_pieces(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    cache, table = make(dtype), torch.tensor([9, 2, 11, 0], dtype=torch.int32)
    k_TGD, v_TGD = tokens(50, 1)
    start = 0
    for length in cuts:
        part = slice(start, start + length)
        cache.write(5, table, start, k_TGD[part], v_TGD[part])
        start += length
    for count in (1, 16, 17, 50):
        k_GSD, v_GSD = cache.gather(5, table, count)
        assert torch.equal(k_GSD, k_TGD[:count].transpose(0, 1).to(dtype))
        assert torch.equal(v_GSD, v_TGD[:count].transpose(0, 1).to(dtype))
        assert k_GSD.stride(2) == v_GSD.stride(2) == 1
    untouched = [page for page in range(PAGES) if page not in table.tolist()]
    assert not cache.k_LPSGD[:, untouched].any() and not cache.layer(4)[0].any()


def test_writes_and_views_contiguous_pages_without_a_copy() -> None:
    cache, other = make(), make()
    k_TGD, v_TGD = tokens(50, 1)
    for start, end in ((0, 16), (16, 17), (17, 50)):
        cache.write_run(5, 3, start, k_TGD[start:end], v_TGD[start:end])
        other.write(5, torch.arange(3, 7), start, k_TGD[start:end], v_TGD[start:end])
    assert torch.equal(cache.k_LPSGD, other.k_LPSGD) and torch.equal(cache.v_LPSGD, other.v_LPSGD)
    k_GSD, v_GSD = cache.view_run(5, 3, 50)
    assert torch.equal(k_GSD, k_TGD.transpose(0, 1)) and torch.equal(v_GSD, v_TGD.transpose(0, 1))
    assert k_GSD.data_ptr() == cache.k_LPSGD[1, 3].data_ptr(), "no copy"


@pytest.mark.parametrize("pages", [(3, 4, 5, 6), (9, 2, 3, 4), (9, 2, 11, 0)])
def test_writes_layers_to_contiguous_and_scattered_pages(pages: tuple[int, ...]) -> None:
    cache, other = make(), make()
    k_TGD, v_TGD = tokens(50, 1)
    for start, end in ((0, 16), (16, 17), (17, 40), (40, 50)):
        part = slice(start, end)
        cache.write_layers(pages, start, {layer: (k_TGD[part] + layer, v_TGD[part]) for layer in (4, 6)})
        for layer in (4, 6):
            other.write(layer, torch.tensor(pages), start, k_TGD[part] + layer, v_TGD[part])
    assert torch.equal(cache.k_LPSGD, other.k_LPSGD) and torch.equal(cache.v_LPSGD, other.v_LPSGD)
    for start, kept in ((50, 4), (48, 3), (-1, 4)):
        with pytest.raises(KVCacheError, match="do not fit"):
            cache.write_layers(pages[:kept], start, {4: (k_TGD[:15], v_TGD[:15])})
    with pytest.raises(KVCacheError, match="layer 99 is not one of"):
        cache.write_layers(pages, 0, dict.fromkeys((4, 99), (k_TGD[:15] + 7, v_TGD[:15])))
    assert torch.equal(cache.k_LPSGD, other.k_LPSGD), "nothing is written by a write that is refused"


@pytest.mark.parametrize(("first", "start", "count"), [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (11, 16, 1)])
def test_refuses_to_write_outside_the_cache(first: int, start: int, count: int) -> None:
    k_TGD, v_TGD = tokens(max(count, 0), 1)
    with pytest.raises(KVCacheError, match="do not fit"):
        make().write_run(5, first, start, k_TGD, v_TGD)


def test_pages_have_flashinfers_nhd_layout() -> None:
    cache = make()
    k_TGD, v_TGD = tokens(20, 2)
    cache.write(6, torch.tensor([7, 3]), 0, k_TGD, v_TGD)
    assert cache.k_LPSGD.shape == (3, PAGES, 16, HEADS, DIM)
    assert torch.equal(cache.k_LPSGD[2, 3, 3], k_TGD[19])
    assert torch.equal(cache.v_LPSGD[2, 7, 15], v_TGD[15])


def test_copied_page_is_independent_of_its_source() -> None:
    cache, table = make(), torch.tensor([2])
    k_TGD, v_TGD = tokens(16, 4)
    for layer in LAYERS:
        cache.write(layer, table, 0, k_TGD + layer, v_TGD - layer)
    cache.copy_page(2, 8)
    for layer in LAYERS:
        cache.write(layer, table, 0, v_TGD, k_TGD)
        k_GSD, v_GSD = cache.gather(layer, torch.tensor([8]), 16)
        assert torch.equal(k_GSD, (k_TGD + layer).transpose(0, 1))
        assert torch.equal(v_GSD, (v_TGD - layer).transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pages", [(3, 4, 5, 6), (9, 2, 11, 0)])
def test_int8_kv_is_copied_unchanged_and_gathered_in_model_dtype(
    pages: tuple[int, ...], dtype: torch.dtype
) -> None:
    cache = PagedKVCache(LAYERS, HEADS, DIM, PAGES, dtype, "cpu", int8=True)
    (k_TGD, k_TG), (v_TGD, v_TG) = (quantise(x_TGD) for x_TGD in tokens(50, 1))
    sides = k_TGD, v_TGD, k_TG, v_TG
    for start, end in ((0, 16), (16, 17), (17, 50)):
        cache.write_layers(pages, start, {5: tuple(side_T[start:end] for side_T in sides)})
    assert all(map(torch.equal, cache.read(5, pages, 3, 40), [side_T[3:43] for side_T in sides]))
    k_GSD, v_GSD = cache.gather(5, torch.tensor(pages), 33)
    for found_GSD, numbers_TGD, scales_TG in ((k_GSD, k_TGD, k_TG), (v_GSD, v_TGD, v_TG)):
        wanted = dequantise(numbers_TGD[:33], scales_TG[:33], dtype).transpose(0, 1)
        assert torch.equal(found_GSD, wanted) and found_GSD.is_contiguous()
    rows_T = cache.rows_of(torch.tensor(pages), 20, 9)
    taken = cache.sides_of(5, rows_T)
    assert all(map(torch.equal, taken, [side_T[20:29] for side_T in sides]))
    cache.copy_page(pages[1], 8)
    for side in cache.sides:
        assert torch.equal(side[:, 8], side[:, pages[1]]) and not side[0].any()
    with pytest.raises(ValueError, match="zip"):
        cache.write_run(5, 0, 0, k_TGD, v_TGD)


def test_int8_kv_takes_half_of_16_bits_plus_scales() -> None:
    assert token_bytes(8, 128, torch.bfloat16) == 2 * 8 * 128 * 2
    assert token_bytes(8, 128, torch.uint8) == 2 * 8 * (128 + 1)


def test_refuses_access_outside_page_table_or_layers() -> None:
    cache, table = make(), torch.tensor([0, 1])
    k_TGD, v_TGD = tokens(3, 5)
    with pytest.raises(KVCacheError, match="do not fit"):
        cache.write(4, table, 30, k_TGD, v_TGD)
    with pytest.raises(KVCacheError, match="33 tokens"):
        cache.gather(4, table, 33)
    with pytest.raises(KVCacheError, match="layer 7"):
        cache.layer(7)
    with pytest.raises(KVCacheError, match="ascend"):
        PagedKVCache((3, 2), 1, 8, 1, torch.float32, "cpu")


def test_keeps_kv_of_layers_that_are_not_contiguous() -> None:
    """The layers between them have linear attention."""
    cache, table = PagedKVCache((3, 7), 2, 8, 4, torch.float32, "cpu"), torch.tensor([2, 0])
    k_TGD, v_TGD = torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    cache.write(7, table, 3, k_TGD, v_TGD)
    k_GSD, v_GSD = cache.gather(7, table, 23)
    assert torch.equal(k_GSD[:, 3:].transpose(0, 1), k_TGD) and torch.equal(
        v_GSD[:, 3:].transpose(0, 1), v_TGD
    )
    assert not cache.gather(3, table, 23)[0].any()
    with pytest.raises(KVCacheError, match="layer 5 is not one of layers 3, 7"):
        cache.layer(5)
    assert PagedKVCache((3, 4), 1, 8, 1, torch.float32, "cpu").layers == range(3, 5)
    assert not PagedKVCache((), 1, 8, 1, torch.float32, "cpu").layers, "a stage of linear attention alone"
