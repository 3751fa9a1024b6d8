"""Prompts that begin with what a session holds: found without being told, and only by who may."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.service.client import DeltafrontClient, GenerateFinished, PrefillFinished, retries
from deltafront.service.fleet.session_ids import worker_of
from deltafront.service.request.calls import pack_ids
from deltafront.service.request.run import attempt
from deltafront.service.request.run.prefix import cut_chain, hash_chain, usable_prefix
from deltafront.workers.kv.pages.session_table import shared_links
from deltafront.workers.messages.events import LINK_BYTES
from deltafront.workers.messages.methods import PAGE_TOKENS, method_spec
from deltafront.workers.messages.requests import RefusalReason, Refused

from ...fleet.test_fleet import changed
from ...inprocess import House, wait_until
from ...test_faults import counter
from ...test_requests import collect, expected, ids, nothing_left

DENSE = method_spec("dense")
DOCUMENT = "Call me Ishmael. " * 40


def chain(tokens: list[int], owner: str = "me", model: str = "m", method: str = "dense") -> bytes:
    return hash_chain(pack_ids(tokens), owner, model, method_spec(method))


# --- the chain ---------------------------------------------------------------------------------------------


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
    assert shared_links(chain(tokens), chain(other)) == alike
    assert len(chain(tokens)) == len(tokens) // PAGE_TOKENS * LINK_BYTES
    assert chain(tokens[: 3 * PAGE_TOKENS]) == cut_chain(chain(tokens), 3 * PAGE_TOKENS)


def test_a_chain_is_its_owners_models_and_methods() -> None:
    tokens = list(range(64))
    option = replace(method_spec("streaming"), options=(("window", 5),))
    chains = {
        chain(tokens),
        chain(tokens, owner="you"),
        chain(tokens, model="n"),
        chain(tokens, method="streaming"),
        hash_chain(pack_ids(tokens), "me", "m", option),
    }
    assert len(chains) == 5
    assert all(shared_links(a, b) == 0 for a in chains for b in chains if a is not b)


def test_only_a_prefix_that_saves_more_than_it_costs_is_worth_it() -> None:
    assert usable_prefix(found=1024, tokens=1100, max_rest=2048) == 1024
    assert usable_prefix(found=1024, tokens=1024, max_rest=2048) == 1008
    assert usable_prefix(found=1024, tokens=1024 + 1025, max_rest=2048) == 0
    assert usable_prefix(found=8192, tokens=8192 + 2049, max_rest=2048) == 0
    assert usable_prefix(found=112, tokens=120, max_rest=2048) == 0


# --- through the door --------------------------------------------------------------------------------------


def answer(client: DeltafrontClient, prompt: str, **options: object) -> GenerateFinished:
    """The finish of a Generate, whose text is checked."""
    text, _, finish, _ = collect(client.generate(prompt, max_tokens=6, **options))  # type: ignore[arg-type]
    assert text == expected(ids(prompt), 6)
    assert finish.usage.prompt_tokens == len(prompt) + 1
    return finish


def test_a_prompt_continues_from_its_owners_session(doors: tuple[House, House]) -> None:
    house, other = doors
    with DeltafrontClient(house.address, "alpha") as client, DeltafrontClient(other.address, "alpha") as far:
        *_, made = client.prefill(DOCUMENT)
        assert isinstance(made, PrefillFinished)
        held = (len(DOCUMENT) + 1) // PAGE_TOKENS * PAGE_TOKENS
        jobs = len(house.group.jobs)
        for asking in (client, far):
            finish = answer(asking, DOCUMENT + "Who am I?")
            assert finish.usage.cached_tokens == held
            assert finish.density.method == ""
        # Half of it is the same.
        half = DOCUMENT[:400] + "Something else altogether."
        assert answer(client, half).usage.cached_tokens == 400
        assert len(house.group.jobs) == jobs, "no prefill group read anything"
        assert counter(house, "deltafront_cached_tokens_total") == held + 400
        assert counter(other, "deltafront_cached_tokens_total") == held
        client.release(made.session.session_id)
        assert answer(client, DOCUMENT + "Who am I?").usage.cached_tokens == 0
        assert len(house.group.jobs) == jobs + 1
    nothing_left(house)


def test_nobody_elses_and_no_other_methods(doors: tuple[House, House]) -> None:
    house, _ = doors
    with (
        DeltafrontClient(house.address, "alpha") as client,
        DeltafrontClient(house.address, "beta") as stranger,
    ):
        *_, made = client.prefill(DOCUMENT, method="streaming", options={"window": 256})
        assert (
            answer(stranger, DOCUMENT, method="streaming", options={"window": 256}).usage.cached_tokens == 0
        )
        assert answer(client, DOCUMENT, method="streaming").usage.cached_tokens == 0
        assert answer(client, DOCUMENT).usage.cached_tokens == 0
        finish = answer(client, DOCUMENT, method="streaming", options={"window": 256})
        assert finish.usage.cached_tokens == len(DOCUMENT) // PAGE_TOKENS * PAGE_TOKENS
        client.release(made.session.session_id)  # type: ignore[union-attr]
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


@pytest.mark.parametrize("reason", [RefusalReason.NO_SESSION, RefusalReason.PAGES])
def test_without_the_session_or_room_beside_it_the_prompt_is_read(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch, reason: RefusalReason
) -> None:
    *_, made = client.prefill(DOCUMENT)
    reserve = house.decode.reserve

    async def no(reservation: object) -> object:
        if reservation.session_id is not None:  # type: ignore[attr-defined]
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


def test_a_long_rest_is_read_by_a_prefill_group(house: House, client: DeltafrontClient) -> None:
    *_, made = client.prefill(DOCUMENT)
    random.seed(1)
    rest = "".join(random.choice("abc") for _ in range(len(DOCUMENT) + 20))
    assert answer(client, DOCUMENT + rest).usage.cached_tokens == 0
    client.release(made.session.session_id)  # type: ignore[union-attr]
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
    assert (job.session_id, job.answered_tokens) == (made.session.session_id, 3)
    assert len(job.append_ids) // 4 == 3 + (15 if tokens == 703 else 16)
    client.release(made.session.session_id)
