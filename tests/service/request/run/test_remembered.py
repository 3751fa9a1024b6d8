"""Prompts with a prefix hit, through a door."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.service.client import DeltafrontClient, GenerateFinished, PrefillFinished, retries
from deltafront.service.errors import InvalidArgument
from deltafront.service.fleet.session_ids import worker_of
from deltafront.service.request.run import attempt
from deltafront.workers.messages.requests import RefusalReason, Refused, Reservation

from ...fleet.test_fleet import changed
from ...inprocess import House, wait_until
from ...test_faults import counter
from ...test_requests import collect, expected, ids, nothing_left

DOCUMENT = "Call me Ishmael. " * 40
HELD = (len(DOCUMENT) + 1) // PAGE_TOKENS * PAGE_TOKENS
STREAMING = {"method": "streaming", "options": {"min_tokens": 0}}


def answer(client: DeltafrontClient, prompt: str, **options: object) -> GenerateFinished:
    """Run a Generate, check its text and return its last event."""
    text, _, finish, _ = collect(client.generate(prompt, max_tokens=6, **options))  # type: ignore[arg-type]
    assert text == expected(ids(prompt), 6)
    assert finish.usage.prompt_tokens == len(prompt) + 1
    return finish


def test_prompt_reuses_its_owners_cached_prefix(doors: tuple[House, House]) -> None:
    house, other = doors
    with DeltafrontClient(house.address, "alpha") as client, DeltafrontClient(other.address, "alpha") as far:
        assert answer(client, DOCUMENT).usage.cached_tokens == 0
        for asking in (client, far):
            finish = answer(asking, DOCUMENT + "Who am I?", skip_cache=False)
            assert finish.usage.cached_tokens >= HELD
            assert finish.density.method == ""
        # The first half is the same.
        half = DOCUMENT[:400] + "Something else altogether."
        assert answer(client, half).usage.cached_tokens == 400
        assert len(house.group.jobs) == 1, "no prefill group read anything more"
        assert counter(house, "deltafront_cached_tokens_total") == HELD + 400
        assert counter(other, "deltafront_cached_tokens_total") >= HELD
        house.decode._entries.clear()
        assert answer(client, DOCUMENT + "Who am I?").usage.cached_tokens == 0
        assert len(house.group.jobs) == 2
    nothing_left(house)


def test_reuses_no_prefix_of_another_owner_or_method(doors: tuple[House, House]) -> None:
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


def test_prompt_with_a_prefix_hit_can_become_a_session(house: House, client: DeltafrontClient) -> None:
    """Prefill and Generate keep one each, and later prompts hit both."""
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


def test_prefix_cache_can_be_switched_off(make_house: Callable[..., House]) -> None:
    house = make_house(prefix_reuse=False)
    with DeltafrontClient(house.address) as client:
        *_, made = client.prefill(DOCUMENT)
        assert answer(client, DOCUMENT).usage.cached_tokens == 0
        client.release(made.session.session_id)  # type: ignore[union-attr]
    nothing_left(house)


def test_failed_request_on_a_prefix_is_replayed_and_leaves_no_session(
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


def test_prefill_group_prefills_many_uncached_tokens(house: House, client: DeltafrontClient) -> None:
    """The group starts where its method can resume, with the KV that is cached."""
    answer(client, DOCUMENT)
    longer = DOCUMENT + noise(len(DOCUMENT) + 20)
    finish = answer(client, longer)
    assert finish.usage.cached_tokens == HELD // 128 * 128
    job, reservation = house.group.jobs[-1], house.decode.reservations[-1]
    assert (job.start, job.token_ids) == (640, ids(longer))
    assert (reservation.prefix_tokens, reservation.new_tokens) == (640, len(longer) + 1 - 640)
    assert finish.density.method == "dense"
    assert counter(house, "deltafront_prefill_tokens_total") == len(DOCUMENT) + 1 + len(longer) + 1 - 640
    *_, made = client.prefill(longer + noise(2000)[:1500])
    assert isinstance(made, PrefillFinished) and made.usage.cached_tokens == len(longer) // 128 * 128
    client.release(made.session.session_id)
    nothing_left(house)


@pytest.mark.parametrize("reason", [RefusalReason.NO_PREFIX, RefusalReason.PAGES])
@pytest.mark.parametrize("rest", [0, len(DOCUMENT) + 20], ids=["no rest", "long rest"])
def test_prefills_all_if_the_prefix_was_evicted_or_does_not_fit(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch, reason: RefusalReason, rest: int
) -> None:
    answer(client, DOCUMENT)
    reserve = house.decode.reserve

    async def no(reservation: Reservation) -> object:
        if reservation.prefix_tokens:
            return Refused(reason=reason, message="gone")
        return await reserve(reservation)

    monkeypatch.setattr(house.decode, "reserve", no)
    assert answer(client, DOCUMENT + noise(rest)).usage.cached_tokens == 0
    assert [job.start for job in house.group.jobs] == [0, 0]
    nothing_left(house)


@pytest.mark.parametrize("chunks", [0, 2])
def test_resumes_after_the_cached_prefix_when_a_prefill_group_dies(
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


def test_faster_of_group_and_decode_worker_prefills_uncached_tokens(
    house: House, client: DeltafrontClient
) -> None:
    """Tries a fast idle group, a fast group with a long queue, and a slow group."""
    answer(client, DOCUMENT)
    house.decode.append_rate = 100.0
    for rate, waiting, who in ((1000.0, 0, "group"), (1000.0, 100_000, "worker"), (10.0, 0, "worker")):
        house.group.rate, house.group.waiting_tokens = rate, waiting
        house.loop.run(house.fleet.refresh())
        jobs = len(house.group.jobs)
        asked = DOCUMENT + noise(300) + who + str(waiting)
        assert answer(client, asked, retain_s=0).usage.cached_tokens == (640 if who == "group" else HELD)
        assert len(house.group.jobs) - jobs == (who == "group")


def test_prefills_everything_if_fetching_the_prefix_is_slower(house: House, client: DeltafrontClient) -> None:
    answer(client, DOCUMENT)
    house.decode.append_rate, house.group.rate, house.group.fetch_rate = 100.0, 1000.0, 900.0
    house.loop.run(house.fleet.refresh())
    assert answer(client, DOCUMENT + noise(300), retain_s=0).usage.cached_tokens == 0
    house.group.fetch_rate = 2000.0
    house.loop.run(house.fleet.refresh())
    assert answer(client, DOCUMENT + noise(300), retain_s=0).usage.cached_tokens == 640


def test_retain_s_0_and_skip_cache_opt_out_of_the_prefix_cache(
    house: House, client: DeltafrontClient
) -> None:
    answer(client, DOCUMENT, retain_s=0)
    assert answer(client, DOCUMENT).usage.cached_tokens == 0
    assert answer(client, DOCUMENT, skip_cache=True).usage.cached_tokens == 0
    assert answer(client, DOCUMENT, cache_salt="x").usage.cached_tokens == 0
    assert answer(client, DOCUMENT).usage.cached_tokens == HELD - 16 * (len(DOCUMENT) + 1 == HELD)
    with pytest.raises(InvalidArgument, match="retain_s"):
        answer(client, DOCUMENT, retain_s=-1)


def test_prefix_scope_all_shares_the_prefix_cache_among_callers(
    make_house: Callable[..., House], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha\nbeta\n")
    house = make_house(tokens_file=str(tokens), prefix_scope="all")
    with DeltafrontClient(house.address, "alpha") as one, DeltafrontClient(house.address, "beta") as other:
        answer(one, DOCUMENT)
        assert answer(other, DOCUMENT + "?").usage.cached_tokens == HELD
    nothing_left(house)


def test_reuses_no_prefix_on_a_draining_worker(house: House, client: DeltafrontClient) -> None:
    """A session made there would end with the worker. If there is no other worker, it is used."""
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
def test_resumed_answer_reuses_a_session_of_its_whole_prompt(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch, tokens: int, dies: str
) -> None:
    """The prompt of 704 tokens fills whole pages. Its last token is prefilled again, before the answered
    tokens."""
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
    assert (house.decode.reservations[-1].session_id, job.answered_tokens) == (None, 3)
    assert house.decode.reservations[-1].prefix_tokens == 688
    assert len(job.extend_ids) // 4 == 3 + (15 if tokens == 703 else 16)
    client.release(made.session.session_id)
