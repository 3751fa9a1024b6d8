"""Prompts whose beginning is remembered: found without being told and who reads the rest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.service.client import DeltafrontClient, GenerateFinished, PrefillFinished, retries
from deltafront.service.errors import InvalidArgument
from deltafront.service.fleet.session_ids import worker_of
from deltafront.service.request.calls import pack_ids
from deltafront.service.request.run import attempt
from deltafront.service.request.run.prefix import (
    Rates,
    hold_most,
    rest_is_long,
    resume_at,
    usable_prefix,
    worth_loading,
)
from deltafront.workers.messages.events import Prefix
from deltafront.workers.messages.methods import PAGE_TOKENS, lasting_tokens, method_spec
from deltafront.workers.messages.prompts import LINK_BYTES, chain_of, links_of
from deltafront.workers.messages.requests import RefusalReason, Refused, Reservation
from deltafront.workers.messages.states import DecodeStats

from ....workers.keys import key_of
from ....workers.profiles import make_profile
from ....workers.tiny_model import write_weights
from ...fleet.test_fleet import changed
from ...inprocess import House, wait_until, write_model
from ...test_faults import counter
from ...test_requests import collect, expected, ids, nothing_left

DOCUMENT = "Call me Ishmael. " * 40
HELD = (len(DOCUMENT) + 1) // PAGE_TOKENS * PAGE_TOKENS
STREAMING = {"method": "streaming", "options": {"min_tokens": 0}}


# --- the key ------------------------------------------------------------------------------------------------


def shared_links(a: bytes, b: bytes) -> int:
    pairs = zip(links_of(a), links_of(b), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(st.lists(st.integers(0, 3), max_size=150), st.lists(st.integers(0, 3), max_size=150), st.data())
def test_chains_agree_exactly_as_far_as_whole_pages_do(
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


def test_a_root_is_its_owners_models_and_methods() -> None:
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


def test_lengths_whose_thresholds_differ_have_roots_of_their_own(tmp_path: Path) -> None:
    """The profile has levels for 256 and 1,024 tokens at one density, for 1,024 alone at the other."""
    model = write_model(tmp_path / "model")
    write_weights(model)
    profile = make_profile(model)

    def root(tokens: int, density: float) -> bytes:
        method = method_spec("block_pool", {"density": density, "min_tokens": 0})
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
def test_so_much_of_a_prompt_is_the_same_in_a_longer_one(name: str, tokens: int, lasting: int) -> None:
    assert lasting_tokens(method_spec(name), tokens) == lasting


# --- who reads the rest -------------------------------------------------------------------------------------


def test_at_least_the_last_token_is_computed_again() -> None:
    assert usable_prefix(found=1024, tokens=1100) == 1024
    assert usable_prefix(found=1024, tokens=1025) == 1024
    assert usable_prefix(found=1024, tokens=1024) == 1008
    assert usable_prefix(found=112, tokens=120) == 0


def test_a_group_goes_on_where_its_method_can() -> None:
    dense, corrected = method_spec("dense"), method_spec("dpxa+delta", {"gamma": 96})
    assert resume_at(1000, 5000, dense) == 896
    assert resume_at(5000, 9000, corrected) == 4992 // 384 * 384
    assert resume_at(8960, 9000, corrected) == 8832 // 384 * 384, "the end of this prompt is read densely"
    assert resume_at(100, 5000, dense) == 0


def test_without_rates_a_decode_worker_reads_a_short_rest() -> None:
    unknown = Rates()
    assert not rest_is_long(1024, 1024, 1100, 2048, unknown)
    assert rest_is_long(1024, 1024, 1024 + 1025, 2048, unknown)
    assert rest_is_long(8192, 8192, 8192 + 2049, 2048, unknown)
    assert not rest_is_long(8192, 8192, 8192 + 2048, 2048, unknown)


@given(
    st.integers(8, 4000),
    st.integers(1, 4000),
    st.floats(1, 1e5),
    st.floats(1, 1e5),
    st.floats(1, 1e6),
    st.integers(0, 10**6),
)
def test_with_rates_whoever_is_sooner_reads_the_rest(
    prefix_blocks: int, rest: int, append: float, read: float, fetch: float, queued: int
) -> None:
    prefix, rates = 128 * prefix_blocks, Rates(append=append, read=read, fetch=fetch, queued=queued)
    worker_s, group_s = rest / append, queued / read + rest / read + prefix / fetch
    if worker_s != pytest.approx(group_s):
        assert rest_is_long(prefix, prefix, prefix + rest, 2048, rates) == (group_s < worker_s)


def decode(name: str, free: int, total: int = 100) -> DecodeStats:
    return DecodeStats(name=name, pages_total=total, pages_free=free, running=0, waiting=0, sessions=0)


def test_the_one_that_holds_most_is_asked_unless_it_is_much_fuller() -> None:
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


def test_what_a_disk_brings_back_later_than_a_group_reads_it_is_left_there() -> None:
    slow = Prefix(tokens=8192, disk_tokens=4096, disk_s=2.0)
    reads = Rates(read=4096.0)
    assert worth_loading(slow, reads) == Prefix(tokens=4096)
    for sooner in (Rates(read=2000.0), Rates()):
        assert worth_loading(slow, sooner) == slow
    unknown = Prefix(tokens=8192, disk_tokens=4096)
    assert worth_loading(unknown, reads) == unknown


# --- through the door --------------------------------------------------------------------------------------


def answer(client: DeltafrontClient, prompt: str, **options: object) -> GenerateFinished:
    """The finish of a Generate, whose text is checked."""
    text, _, finish, _ = collect(client.generate(prompt, max_tokens=6, **options))  # type: ignore[arg-type]
    assert text == expected(ids(prompt), 6)
    assert finish.usage.prompt_tokens == len(prompt) + 1
    return finish


def test_a_prompt_continues_from_what_its_owner_has_sent(doors: tuple[House, House]) -> None:
    house, other = doors
    with DeltafrontClient(house.address, "alpha") as client, DeltafrontClient(other.address, "alpha") as far:
        assert answer(client, DOCUMENT).usage.cached_tokens == 0
        for asking in (client, far):
            finish = answer(asking, DOCUMENT + "Who am I?", skip_cache=False)
            assert finish.usage.cached_tokens >= HELD
            assert finish.density.method == ""
        # Half of it is the same.
        half = DOCUMENT[:400] + "Something else altogether."
        assert answer(client, half).usage.cached_tokens == 400
        assert len(house.group.jobs) == 1, "no prefill group read anything more"
        assert counter(house, "deltafront_cached_tokens_total") == HELD + 400
        assert counter(other, "deltafront_cached_tokens_total") >= HELD
        house.decode._entries.clear()
        assert answer(client, DOCUMENT + "Who am I?").usage.cached_tokens == 0
        assert len(house.group.jobs) == 2
    nothing_left(house)


def test_nobody_elses_and_no_other_methods(doors: tuple[House, House]) -> None:
    house, _ = doors
    with (
        DeltafrontClient(house.address, "alpha") as client,
        DeltafrontClient(house.address, "beta") as stranger,
    ):
        assert answer(client, DOCUMENT, **STREAMING).usage.cached_tokens == 0
        assert answer(stranger, DOCUMENT, **STREAMING).usage.cached_tokens == 0
        narrow = {"method": "streaming", "options": {"window": 256, "min_tokens": 0}}
        assert answer(client, DOCUMENT, **narrow).usage.cached_tokens == 0
        assert answer(client, DOCUMENT, **STREAMING).usage.cached_tokens == 640, "its whole blocks"
        assert answer(client, DOCUMENT).usage.cached_tokens == 0
        wide = {"method": "xattention", "options": {"min_tokens": 0}}
        assert answer(client, DOCUMENT, **wide).usage.cached_tokens == (len(DOCUMENT)) // 16 * 16, "dense K/V"
    nothing_left(house)


def test_sessions_are_made_of_what_was_continued(house: House, client: DeltafrontClient) -> None:
    """By Prefill, and by Generate; each is found in turn."""
    longer = DOCUMENT + "And so on. " * 10
    *_, first = client.prefill(DOCUMENT)
    *_, second = client.prefill(longer)
    assert isinstance(first, PrefillFinished)
    assert isinstance(second, PrefillFinished)
    assert second.usage.cached_tokens == (len(DOCUMENT) + 1) // PAGE_TOKENS * PAGE_TOKENS
    assert second.session.tokens == len(longer) + 1
    assert len(house.group.jobs) == 1
    third = answer(client, longer + "The end.", session_ttl_s=30)
    assert third.usage.cached_tokens == (len(longer) + 1) // PAGE_TOKENS * PAGE_TOKENS
    assert third.session is not None
    last = answer(client, longer + "The end." + "x" * 40)
    assert last.usage.cached_tokens == (len(longer + "The end.") + 1) // PAGE_TOKENS * PAGE_TOKENS
    text, *_ = collect(client.generate(session_id=second.session.session_id, append="q", max_tokens=5))
    assert text == expected(ids(longer) + ids("q", bos=False), 5)
    for session in (first.session, second.session, third.session):
        client.release(session.session_id)
    nothing_left(house)


def test_it_can_be_switched_off(make_house: Callable[..., House]) -> None:
    house = make_house(prefix_reuse=False)
    with DeltafrontClient(house.address) as client:
        *_, made = client.prefill(DOCUMENT)
        assert answer(client, DOCUMENT).usage.cached_tokens == 0
        client.release(made.session.session_id)  # type: ignore[union-attr]
    nothing_left(house)


@pytest.mark.parametrize("reason", [RefusalReason.NO_PREFIX, RefusalReason.PAGES])
def test_without_the_prefix_or_room_beside_it_the_prompt_is_read(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch, reason: RefusalReason
) -> None:
    *_, made = client.prefill(DOCUMENT)
    reserve = house.decode.reserve

    async def no(reservation: object) -> object:
        if reservation.prefix_tokens:  # type: ignore[attr-defined]
            return Refused(reason=reason, message="gone")
        return await reserve(reservation)  # type: ignore[arg-type]

    monkeypatch.setattr(house.decode, "reserve", no)
    assert answer(client, DOCUMENT).usage.cached_tokens == 0
    client.release(made.session.session_id)  # type: ignore[union-attr]
    nothing_left(house)


def test_a_failed_continuation_is_replayed_and_leaves_no_session(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltafront.service.request.run.attempt._FIRST_PAUSE_S", 0.02)
    list(client.prefill(DOCUMENT))
    house.decode.fail_after = [3]
    assert answer(client, DOCUMENT, session_ttl_s=30).session is not None
    house.decode.fail_after = [1]
    *_, again = client.prefill(DOCUMENT + "more")
    assert isinstance(again, PrefillFinished)
    wait_until(lambda: len(house.decode._sessions) == 3, "a failed attempt's session is left")


def noise(tokens: int) -> str:
    random.seed(1)
    return "".join(random.choice("abc") for _ in range(tokens))


def test_a_long_rest_is_read_by_a_prefill_group(house: House, client: DeltafrontClient) -> None:
    """From where its method can go on, over the pages that are there."""
    answer(client, DOCUMENT)
    longer = DOCUMENT + noise(len(DOCUMENT) + 20)
    finish = answer(client, longer)
    assert finish.usage.cached_tokens == HELD // 128 * 128
    job, reservation = house.group.jobs[-1], house.decode.reservations[-1]
    assert (job.start, job.token_ids) == (640, ids(longer))
    assert (reservation.prefix_tokens, reservation.prompt_tokens) == (640, len(longer) + 1 - 640)
    assert finish.density.method == "dense"
    assert counter(house, "deltafront_prefill_tokens_total") == len(DOCUMENT) + 1 + len(longer) + 1 - 640
    *_, made = client.prefill(longer + noise(2000)[:1500])
    assert isinstance(made, PrefillFinished) and made.usage.cached_tokens == len(longer) // 128 * 128
    client.release(made.session.session_id)
    nothing_left(house)


@pytest.mark.parametrize("reason", [RefusalReason.NO_PREFIX, RefusalReason.PAGES])
def test_a_long_rest_without_room_beside_its_prefix_is_read_anew(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch, reason: RefusalReason
) -> None:
    answer(client, DOCUMENT)
    reserve = house.decode.reserve

    async def no(reservation: Reservation) -> object:
        if reservation.prefix_tokens:
            return Refused(reason=reason, message="gone")
        return await reserve(reservation)

    monkeypatch.setattr(house.decode, "reserve", no)
    assert answer(client, DOCUMENT + noise(len(DOCUMENT) + 20)).usage.cached_tokens == 0
    assert house.group.jobs[-1].start == 0
    nothing_left(house)


@pytest.mark.parametrize("chunks", [0, 2])
def test_a_long_rest_goes_on_behind_its_prefix_when_a_group_dies(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    monkeypatch.setattr(attempt, "_FIRST_PAUSE_S", 0.02)
    answer(client, DOCUMENT)
    house.group.fail_after = [chunks]
    finish = answer(client, DOCUMENT + noise(len(DOCUMENT) + 20))
    assert finish.usage.cached_tokens == 640
    assert [job.start for job in house.group.jobs] == [0, 640, 640 + 128 * chunks]
    assert house.decode.resumed == [640 + 128 * chunks]
    nothing_left(house)


def test_what_it_costs_decides_who_reads_the_rest(house: House, client: DeltafrontClient) -> None:
    """A group that reads fast, and one behind which much waits."""
    answer(client, DOCUMENT)
    house.decode.append_rate = 100.0
    for rate, waiting, who in ((1000.0, 0, "group"), (1000.0, 100_000, "worker"), (10.0, 0, "worker")):
        house.group.rate, house.group.waiting_tokens = rate, waiting
        house.loop.run(house.fleet.refresh())
        jobs = len(house.group.jobs)
        asked = DOCUMENT + noise(300) + who + str(waiting)
        assert answer(client, asked, retain_s=0).usage.cached_tokens == (640 if who == "group" else HELD)
        assert len(house.group.jobs) - jobs == (who == "group")


def test_where_fetching_is_slower_than_reading_all_is_read(house: House, client: DeltafrontClient) -> None:
    answer(client, DOCUMENT)
    house.decode.append_rate, house.group.rate, house.group.fetch_rate = 100.0, 1000.0, 900.0
    house.loop.run(house.fleet.refresh())
    assert answer(client, DOCUMENT + noise(300), retain_s=0).usage.cached_tokens == 0
    house.group.fetch_rate = 2000.0
    house.loop.run(house.fleet.refresh())
    assert answer(client, DOCUMENT + noise(300), retain_s=0).usage.cached_tokens == 640


def test_opting_out_of_being_remembered_and_of_being_served_from_memory(
    house: House, client: DeltafrontClient
) -> None:
    answer(client, DOCUMENT, retain_s=0)
    assert answer(client, DOCUMENT).usage.cached_tokens == 0
    assert answer(client, DOCUMENT, skip_cache=True).usage.cached_tokens == 0
    assert answer(client, DOCUMENT, cache_salt="x").usage.cached_tokens == 0
    assert answer(client, DOCUMENT).usage.cached_tokens == HELD - 16 * (len(DOCUMENT) + 1 == HELD)
    with pytest.raises(InvalidArgument, match="retain_s"):
        answer(client, DOCUMENT, retain_s=-1)


def test_those_who_trust_each_other_share_what_is_remembered(
    make_house: Callable[..., House], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha\nbeta\n")
    house = make_house(tokens_file=str(tokens), prefix_scope="all")
    with DeltafrontClient(house.address, "alpha") as one, DeltafrontClient(house.address, "beta") as other:
        answer(one, DOCUMENT)
        assert answer(other, DOCUMENT + "?").usage.cached_tokens == HELD
    nothing_left(house)


def test_nothing_is_continued_on_a_worker_that_drains(house: House, client: DeltafrontClient) -> None:
    """A session made there would go with it. Where nobody else is, it serves on."""
    *_, made = client.prefill(DOCUMENT)
    changed(house.decode, draining=True)
    house.loop.run(house.fleet.refresh())
    assert answer(client, DOCUMENT).usage.cached_tokens > 0
    house.add_decode("decode:d1")
    house.loop.run(house.fleet.refresh())
    *_, read = client.prefill(DOCUMENT)
    assert isinstance(made, PrefillFinished) and isinstance(read, PrefillFinished)
    assert (worker_of(read.session.session_id), read.usage.cached_tokens) == ("decode:d1", 0)
    text, *_ = collect(client.generate(session_id=made.session.session_id, append="q", max_tokens=5))
    assert text == expected(ids(DOCUMENT) + ids("q", bos=False), 5)
    for session in (made.session, read.session):
        client.release(session.session_id)
    nothing_left(house)


@pytest.mark.parametrize("tokens", [703, 704])
@pytest.mark.parametrize("dies", ["worker", "door"])
def test_an_answer_goes_on_where_a_session_holds_its_whole_prompt(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch, tokens: int, dies: str
) -> None:
    """704 tokens are whole pages: of them the last is read again, before what was answered."""
    monkeypatch.setattr(attempt, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(retries, "_FIRST_PAUSE_S", 0.01)
    prompt = "p" * (tokens - 1)
    *_, made = client.prefill(prompt)
    assert isinstance(made, PrefillFinished)
    if dies == "worker":
        house.decode.fail_after = [3]
    else:
        house.losses = [(3, grpc.StatusCode.UNAVAILABLE)]
    text, *_ = collect(client.generate(prompt, max_tokens=9))
    assert text == expected(ids(prompt), 9)
    job = house.decode.jobs[-1]
    assert (job.session_id, job.answered_tokens) == (None, 3)
    assert house.decode.reservations[-1].prefix_tokens == 688
    assert len(job.append_ids) // 4 == 3 + (15 if tokens == 703 else 16)
    client.release(made.session.session_id)
