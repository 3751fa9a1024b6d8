"""Prefix hits: how prompts are matched, and which worker prefills the rest."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.methods import lasting_tokens, method_spec
from deltafront.service.request.calls import pack_ids
from deltafront.service.request.run.prefix import (
    PrefixHit,
    Rates,
    _shared,
    hold_most,
    rest_is_long,
    resume_at,
    usable_prefix,
    worth_loading,
)
from deltafront.tests.states import decode_stats
from deltafront.workers.messages.events import Prefix
from deltafront.workers.messages.prompts import LINK_BYTES, chain_of, links_of
from deltafront.workers.messages.states import DecodeStats, PrefillCost

from ....workers.keys import key_of
from ....workers.profiles import make_profile
from ....workers.tiny_model import write_weights
from ...inprocess import write_model

# --- the key -----------------------------------------------------------------------------------------------


def shared_links(a: bytes, b: bytes) -> int:
    pairs = zip(links_of(a), links_of(b), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(st.lists(st.integers(0, 3), max_size=150), st.lists(st.integers(0, 3), max_size=150), st.data())
def test_hash_chains_agree_exactly_over_equal_whole_pages(
    tokens: list[int], tail: list[int], data: st.DataObject
) -> None:
    other = tokens[: data.draw(st.integers(0, len(tokens)))] + tail
    alike = 0
    while alike < min(len(tokens), len(other)) // PAGE_TOKENS:
        page = slice(alike * PAGE_TOKENS, (alike + 1) * PAGE_TOKENS)
        if tokens[page] != other[page]:
            break
        alike += 1
    chains = [chain_of(pack_ids(ids)) for ids in (tokens, other)]
    assert shared_links(*chains) == alike
    assert len(chains[0]) == len(tokens) // PAGE_TOKENS * LINK_BYTES
    cut = data.draw(st.integers(0, len(tokens)))
    assert key_of(tokens[:cut]).longer(pack_ids(tokens[cut:])) == chains[0]


def test_cache_root_depends_on_owner_salt_model_and_method() -> None:
    tokens = [1] * 64
    given: list[dict[str, Any]] = [
        {},
        {"owner": "you"},
        {"salt": "s"},
        {"model": "n"},
        {"method": method_spec("streaming", {"min_tokens": 0})},
        {"method": method_spec("streaming", {"min_tokens": 0, "window": 5})},
        {"method": method_spec("streaming+delta", {"min_tokens": 0})},
    ]
    keys = [key_of(tokens, **each) for each in given]
    assert len({key.root for key in keys}) == len(keys)
    assert len({key.exact_root for key in keys}) == 4, "methods share dense K/V, others nothing"
    short = key_of(tokens, method=method_spec("streaming"))
    assert short == keys[0] and short.exact, "read densely for being short"


def test_lengths_with_other_thresholds_have_other_cache_roots(tmp_path: Path) -> None:
    """The profile has levels for 256 and 1,024 tokens at one density, and only for 1,024 at the other."""
    model = write_model(tmp_path / "model")
    write_weights(model)
    profile = make_profile(model)

    def root(tokens: int, density: float) -> bytes:
        method = method_spec("xattention", {"density": density, "min_tokens": 0})
        return key_of([1] * tokens, method=method, profile=profile).root

    assert root(256, 0.2) == root(300, 0.2) != root(1000, 0.2) == root(4000, 0.2)
    assert root(300, 0.3) != root(1000, 0.3)
    assert root(300, 0.5) == root(1000, 0.5)


@pytest.mark.parametrize(
    ("name", "tokens", "lasting"),
    [
        ("dense", 1000, 1000),
        ("streaming", 1000, 1000),
        ("streaming", 5000, 4992),
        ("dpxa", 5120, 5120),
        ("dpxa+delta", 5120, 4992),
        ("dpxa+delta", 5119, 4864),
    ],
)
def test_number_of_cacheable_tokens_depends_on_the_method(name: str, tokens: int, lasting: int) -> None:
    assert lasting_tokens(method_spec(name), tokens) == lasting


# --- which worker prefills the rest ------------------------------------------------------------------------


def test_prefix_hit_never_covers_the_last_token() -> None:
    assert usable_prefix(found=1024, tokens=1100) == 1024
    assert usable_prefix(found=1024, tokens=1025) == 1024
    assert usable_prefix(found=1024, tokens=1024) == 1008
    assert usable_prefix(found=112, tokens=120) == 0


def test_group_resumes_at_a_multiple_of_its_methods_step() -> None:
    dense, corrected = method_spec("dense"), method_spec("dpxa+delta", {"gamma": 96})
    assert resume_at(1000, 5000, dense) == 896
    assert resume_at(5000, 9000, corrected) == 4992 // 384 * 384
    assert resume_at(8960, 9000, corrected) == 8832 // 384 * 384, "the end of this prompt is read densely"
    assert resume_at(100, 5000, dense) == 0


def test_decode_worker_prefills_few_uncached_tokens_without_rates() -> None:
    unknown = Rates()
    assert not rest_is_long(1024, 1024, 1100, unknown)
    assert rest_is_long(1024, 1024, 1024 + 1025, unknown)
    assert rest_is_long(8192, 8192, 8192 + 2049, unknown)
    assert not rest_is_long(8192, 8192, 8192 + 2048, unknown)


@given(
    st.integers(8, 4000),
    st.integers(1, 4000),
    st.floats(1, 1e5),
    st.floats(1, 1e5),
    st.floats(1, 1e6),
    st.integers(0, 10**6),
)
def test_faster_of_decode_worker_and_group_prefills_uncached_tokens(
    prefix_blocks: int, rest: int, append: float, read: float, fetch: float, queued: int
) -> None:
    prefix, cost = 128 * prefix_blocks, PrefillCost(token_s=1 / read)
    rates = Rates(extend=append, prefill=cost, fetch=fetch, queued_s=queued / read)
    worker_s, group_s = rest / append, queued / read + rest / read + prefix / fetch
    if worker_s != pytest.approx(group_s):
        assert rest_is_long(prefix, prefix, prefix + rest, rates) == (group_s < worker_s)


def test_group_continues_a_prefix_with_a_state_only_where_one_is() -> None:
    corrected = method_spec("dpxa+delta", {"gamma": 96, "min_tokens": 0})
    rates = Rates(extend=1000.0, prefill=PrefillCost(token_s=1 / 4000))
    for method, at, begins in (
        (method_spec("dense"), 8192, 8192),
        (method_spec("dense"), 0, 0),
        (corrected, 8192, 0),
        (corrected, 3840, 3840),
    ):
        prefix = Prefix(tokens=8208, has_state=True, group_tokens=at)
        found = _shared(PrefixHit(worker=None, prefix=prefix), method, 20_000, rates)  # type: ignore[arg-type]
        assert (0 if found is None else found.prefix.tokens) == begins, (method.name, at)
        assert found is None or found.group_prefills


def test_worker_alone_continues_a_prefix_without_a_block_to_begin_at() -> None:
    hit = PrefixHit(worker=None, prefix=Prefix(tokens=8192, has_state=True))  # type: ignore[arg-type]
    pages = PrefixHit(worker=None, prefix=Prefix(tokens=8192))  # type: ignore[arg-type]
    rates = Rates(extend=1000.0, prefill=PrefillCost(token_s=1 / 4000))
    dense, tokens = method_spec("dense"), 8192 + 3000
    group = _shared(pages, dense, tokens, rates)
    assert group is not None and group.group_prefills and group.prefix.tokens == 8192
    assert _shared(hit, dense, tokens, rates) is None, "2.8 s are less than 3"
    worker = _shared(hit, dense, 8192 + 2000, rates)
    assert worker is not None and not worker.group_prefills and worker.prefix.tokens == 8192


def decode(name: str, free: int, total: int = 100) -> DecodeStats:
    return decode_stats(name, pages_total=total, pages_free=free)


def test_prefers_the_longest_prefix_hit_unless_its_worker_is_fuller() -> None:
    workers = [decode("a", 90), decode("b", 60), decode("c", 20)]
    found = {"a": 160, "b": 320}
    assert hold_most(found, workers, 400) == ["b", "a"]
    assert hold_most({**found, "c": 384}, workers, 400) == ["b", "a"], "70% fuller than a"
    assert hold_most({"c": 384}, [decode("c", 20)], 400) == ["c"], "nobody else is there"
    assert hold_most({"b": 160}, [decode("a", 90), decode("b", 60)], 160 + 61 * 16) == [], "a has room"
    assert hold_most({"b": 160}, [decode("a", 10), decode("b", 60)], 160 + 61 * 16) == ["b"], (
        "who has none waits"
    )
    assert hold_most({}, workers, 400) == []


def test_prefills_again_if_faster_than_loading_blocks_from_disk() -> None:
    slow = Prefix(tokens=8192, disk_tokens=4096, disk_s=2.0)
    reads = Rates(prefill=PrefillCost(token_s=1 / 4096))
    assert worth_loading(slow, reads) == Prefix(tokens=4096)
    for sooner in (Rates(prefill=PrefillCost(token_s=1 / 2000)), Rates()):
        assert worth_loading(slow, sooner) == slow
    unknown = Prefix(tokens=8192, disk_tokens=4096)
    assert worth_loading(unknown, reads) == unknown
    for group_tokens, left in ((8192, 0), (2048, 2048)):
        hybrid = replace(slow, has_state=True, group_tokens=group_tokens)
        assert worth_loading(hybrid, reads) == Prefix(tokens=4096, has_state=True, group_tokens=left)
