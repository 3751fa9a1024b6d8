"""Compares the page pool with a model of sets and counters."""

from __future__ import annotations

import pickle
import random

import pytest

from deltafront.workers.kv.pages.pool import OutOfPages, PagePool, first_of_run, pages_for


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (131_072, 8192)])
def test_pages_for_rounds_tokens_up_to_whole_pages(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_refuses_a_negative_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="negative"):
        pages_for(-1)


def test_allocates_freed_pages_as_a_contiguous_run() -> None:
    pool = PagePool(12)
    first, second, third = pool.allocate(3), pool.allocate(4), pool.allocate(2)
    assert [first_of_run(pages) for pages in (first, second, third)] == [0, 3, 7]
    pool.release(second)
    assert pool.allocate(4) == second
    pool.release(first)
    assert first_of_run(pool.allocate(4)) is None, "0, 1, 2 and 9 are not one run"


@pytest.mark.parametrize(
    ("pages", "first"), [((), None), ((5,), 5), ((5, 6, 7), 5), ((7, 6), None), ((5, 7), None)]
)
def test_first_of_run_finds_contiguous_pages_only(pages: tuple[int, ...], first: int | None) -> None:
    assert first_of_run(pages) == first


def test_allocating_too_many_pages_takes_none() -> None:
    pool = PagePool(4)
    pool.allocate(1)
    with pytest.raises(OutOfPages) as caught:
        pool.allocate(4)
    assert (caught.value.needed, caught.value.free) == (4, 3)
    assert (pool.total, pool.used, pool.free) == (4, 1, 3)


def test_out_of_pages_error_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(OutOfPages(9, 2)))
    assert (copy.needed, copy.free) == (9, 2)


def test_shared_page_is_freed_by_its_last_reference() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.incref(pages[:1])
    pool.release(pages)
    assert pool.used == 1 and pool._references[pages[0]] == 1
    pool.release(pages[:1])
    assert pool.used == 0


@pytest.mark.parametrize("pages", [(1,), (0, 0), (7,), (-1,)])
def test_refuses_a_wrong_release_and_changes_nothing(pages: tuple[int, ...]) -> None:
    pool = PagePool(2)
    assert pool.allocate(1) == (0,)
    with pytest.raises(ValueError, match="page"):
        pool.release(pages)
    assert pool.used == 1 and pool._references[0] == 1


def test_refuses_to_share_a_free_page_and_changes_nothing() -> None:
    pool = PagePool(3)
    (held,) = pool.allocate(1)
    with pytest.raises(ValueError, match="free"):
        pool.incref((held, held + 1))
    assert pool._references[held] == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_page_use_agrees_with_plain_reference_counts(seed: int) -> None:
    chance = random.Random(seed)
    pool = PagePool(13)
    counts = dict.fromkeys(range(13), 0)
    for _ in range(400):
        used = [page for page, count in counts.items() if count]
        action = chance.choice(("allocate", "share", "release"))
        if action == "allocate":
            wanted = chance.randint(0, 5)
            if wanted > 13 - len(used):
                with pytest.raises(OutOfPages):
                    pool.allocate(wanted)
            else:
                taken = pool.allocate(wanted)
                assert len(set(taken)) == wanted and not any(counts[page] for page in taken)
                counts.update(dict.fromkeys(taken, 1))
        elif used:
            chosen = chance.sample(used, chance.randint(1, len(used)))
            step = 1 if action == "share" else -1
            (pool.incref if step == 1 else pool.release)(chosen)
            for page in chosen:
                counts[page] += step
        assert pool.used == sum(count > 0 for count in counts.values()) == pool.total - pool.free
        assert all(pool._references[page] == count for page, count in counts.items())
