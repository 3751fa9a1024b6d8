"""Recomputed blocks: the jobs of decode workers, and the reported numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from deltafront.service.client import DeltafrontClient, PrefillFinished
from deltafront.service.errors import Overloaded
from deltafront.workers.messages.requests import recompute_pages

from .fakes import needed, pages
from .inprocess import House, settings
from .test_faults import counter
from .test_requests import collect, expected, ids, nothing_left

pytestmark = pytest.mark.usefixtures("impatient")
PROMPT = "p" * 700
SPARSE: dict[str, Any] = {"method": "streaming", "options": {"min_tokens": 0}}
EXACT: dict[str, dict[str, Any]] = {"dense": {"method": "dense"}, "short": {"method": "streaming"}}


@pytest.fixture
def session(client: DeltafrontClient) -> Iterator[str]:
    """Make a session of PROMPT, prefilled with a sparse method."""
    *_, made = client.prefill(PROMPT, **SPARSE)
    assert isinstance(made, PrefillFinished)
    yield made.session.session_id
    client.release(made.session.session_id)


def test_decode_worker_gets_the_token_ids_of_a_sparse_prompt(house: House, client: DeltafrontClient) -> None:
    asked = client.generate(PROMPT, append="why?", max_tokens=5, recompute_blocks=3, **SPARSE)
    text, _, finish, _ = collect(asked)
    assert text == expected(ids(PROMPT + "why?"), 5)
    (reservation,), (job,) = house.decode.reservations, house.decode.jobs
    assert reservation.options.recompute_blocks == 3
    assert (job.prompt_ids, job.answered_tokens) == (ids(PROMPT + "why?"), 0)
    assert finish.recomputed_tokens == counter(house, "deltafront_recomputed_tokens_total") == 3 * 128
    assert finish.timings.parts["recompute"] == pytest.approx(3 * 128e-6)
    nothing_left(house)


@pytest.mark.parametrize("kind", EXACT)
def test_dense_prefill_recomputes_nothing(house: House, client: DeltafrontClient, kind: str) -> None:
    _, _, finish, _ = collect(client.generate(PROMPT, max_tokens=5, recompute_blocks=3, **EXACT[kind]))
    (reservation,), (job,) = house.decode.reservations, house.decode.jobs
    assert (reservation.options.recompute_blocks, job.prompt_ids) == (0, b"")
    assert finish.recomputed_tokens == counter(house, "deltafront_recomputed_tokens_total") == 0


@pytest.mark.parametrize(("asked", "blocks"), [(None, 2), (0, 0), (4, 4)])
def test_request_without_recompute_blocks_gets_the_default(
    make_house: Callable[..., House], model: Path, asked: int | None, blocks: int
) -> None:
    """Without recomputation, the ids are sent only if the prompt is kept as a session."""
    config = settings(model)
    config = config.model_copy(update={"decode": replace(config.decode, recompute_blocks=2)})
    house = make_house(config)
    with DeltafrontClient(house.address) as client:
        collect(client.generate(PROMPT, max_tokens=2, recompute_blocks=asked, **SPARSE))
        anew = {"skip_cache": True, **SPARSE}
        kept = client.generate(PROMPT, max_tokens=2, recompute_blocks=0, session_ttl_s=9, **anew)
        client.release(collect(kept)[2].session.session_id)
        assert client.info().recompute_blocks == 2
    assert [told.options.recompute_blocks for told in house.decode.reservations] == [blocks, 0]
    said = [job.prompt_ids for job in house.decode.jobs]
    assert said == [ids(PROMPT) if blocks else b"", ids(PROMPT)]


def test_model_without_a_profile_is_prefilled_densely(make_house: Callable[..., House], model: Path) -> None:
    house = make_house(settings(model, default_method=""))
    with DeltafrontClient(house.address) as client:
        for asked in ({}, SPARSE):
            collect(client.generate(PROMPT, max_tokens=2, skip_cache=True, **asked))
        assert client.info().default_method == "dense"
    unnamed, named = (job.method for job in house.group.jobs)
    assert (unnamed.name, named.name) == ("dense", SPARSE["method"])
    assert [told.options.recompute_blocks for told in house.decode.reservations] == [0, 32]


def test_accepts_the_maximum_of_recompute_blocks(house: House, client: DeltafrontClient) -> None:
    collect(client.generate(PROMPT, max_tokens=2, recompute_blocks=64, **SPARSE))
    assert house.decode.reservations[-1].options.recompute_blocks == 64


# --- sessions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", *EXACT])
def test_session_keeps_the_token_ids_of_a_sparse_prompt(
    house: House, client: DeltafrontClient, kind: str
) -> None:
    """Questions to it are sent unchanged: only its worker knows how the prompt was prefilled."""
    *_, made = client.prefill(PROMPT, **EXACT.get(kind, SPARSE))
    assert isinstance(made, PrefillFinished)
    assert [keep.prompt_ids for keep in house.decode.kept] == [ids(PROMPT) if kind == "sparse" else b""]
    asked = client.generate(session_id=made.session.session_id, append="q", max_tokens=3, recompute_blocks=2)
    text, _, finish, _ = collect(asked)
    assert text == expected(ids(PROMPT + "q"), 3)
    (job,) = house.decode.jobs
    assert house.decode.reservations[-1].options.recompute_blocks == 2
    assert job.prompt_ids == b""
    assert finish.recomputed_tokens == (256 if kind == "sparse" else 0)
    client.release(made.session.session_id)
    nothing_left(house)


def test_prompt_after_a_sparse_prefix_recomputes_its_blocks(house: House, client: DeltafrontClient) -> None:
    document = "d" * 5000
    collect(client.generate(document, max_tokens=1, **SPARSE))
    asked = client.generate(document[:900] + "why?", max_tokens=8, recompute_blocks=2, **SPARSE)
    text, _, finish, _ = collect(asked)
    assert text == expected(ids(document[:900] + "why?"), 8)
    assert finish.usage.cached_tokens == 896 and len(house.group.jobs) == 1
    assert house.decode.reservations[-1].options.recompute_blocks == 2
    assert house.decode.jobs[-1].prompt_ids == ids(document[:895])
    nothing_left(house)


@pytest.mark.parametrize("kind", EXACT)
def test_prompt_after_a_dense_prefix_recomputes_nothing(
    house: House, client: DeltafrontClient, kind: str
) -> None:
    """Holds for a sparse prompt, too."""
    collect(client.generate(PROMPT, max_tokens=1, **EXACT[kind]))
    asked = client.generate(PROMPT + "why?", max_tokens=8, recompute_blocks=2, **SPARSE)
    _, _, finish, _ = collect(asked)
    assert finish.usage.cached_tokens == 688
    reservation, job = house.decode.reservations[-1], house.decode.jobs[-1]
    assert (reservation.options.recompute_blocks, job.prompt_ids) == (0, b"")


def test_session_kept_after_a_sparse_prefix_recomputes_nothing(
    house: House, client: DeltafrontClient, session: str
) -> None:
    """The session gets the ids, because a later question may ask for recomputation."""
    *_, made = client.prefill(PROMPT + "and on", **SPARSE)
    assert isinstance(made, PrefillFinished) and made.usage.cached_tokens == 640
    reservation, (job,) = house.decode.reservations[-1], house.decode.jobs
    assert (reservation.options.recompute_blocks, job.prompt_ids) == (0, ids(PROMPT)[: 4 * 640])
    client.release(made.session.session_id)


# --- after deaths ------------------------------------------------------------------------------------------


def test_replayed_job_counts_answered_tokens_apart_from_its_prompt(
    house: House, client: DeltafrontClient
) -> None:
    house.decode.fail_after = [4]
    text, _, finish, _ = collect(client.generate(PROMPT, max_tokens=9, recompute_blocks=1, **SPARSE))
    assert text == expected(ids(PROMPT), 9)
    assert [job.answered_tokens for job in house.decode.jobs] == [0, 4]
    assert [job.prompt_ids for job in house.decode.jobs] == [ids(PROMPT)] * 2
    assert [told.options.recompute_blocks for told in house.decode.reservations] == [1, 1]
    assert finish.recomputed_tokens == counter(house, "deltafront_recomputed_tokens_total") == 2 * 128


def test_job_resumed_after_a_door_death_counts_answered_tokens(
    house: House, client: DeltafrontClient
) -> None:
    house.losses = [(6 + 5, grpc.StatusCode.UNAVAILABLE)]  # after the progress events and five tokens
    text, *_ = collect(client.generate(PROMPT, max_tokens=9, recompute_blocks=1, **SPARSE))
    assert text == expected(ids(PROMPT), 9)
    assert [job.answered_tokens for job in house.decode.jobs] == [0, 5]


def test_session_job_counts_answered_tokens_apart_from_the_question(
    house: House, client: DeltafrontClient, session: str
) -> None:
    house.decode.fail_after = [4]
    collect(client.generate(session_id=session, append="why?", max_tokens=9, recompute_blocks=1))
    assert [job.answered_tokens for job in house.decode.jobs] == [0, 4]
    assert [len(job.extend_ids) // 4 for job in house.decode.jobs] == [4, 8]


# --- pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1])
def test_admission_counts_pages_for_recomputation(
    house: House, client: DeltafrontClient, missing: int
) -> None:
    """A request is refused before anything is reserved, or gets exactly the pages that it needs."""
    house.decode.total = pages(701 + 4) + recompute_pages(4, 701, appended=False) - missing
    house.loop.run(house.fleet.refresh())
    asked = client.generate(PROMPT, max_tokens=4, recompute_blocks=4, **SPARSE)
    if missing:
        with pytest.raises(Overloaded, match=r"4 of answer, with \d+ computed again, are more"):
            list(asked)
        assert not house.decode.reservations and not house.group.jobs
    else:
        assert collect(asked)[0] == expected(ids(PROMPT), 4)
        assert needed(house.decode.reservations[-1]) == house.decode.total
    nothing_left(house)
