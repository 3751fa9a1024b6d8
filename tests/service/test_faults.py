"""If workers die, fail or refuse during a request, it has one outcome and leaves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from deltafront.service.client import DeltafrontClient, GenerateFinished, Token
from deltafront.service.errors import NotFound, Overloaded, Unavailable, WorkerFailed, WorkerLost
from deltafront.service.request.run import attempt
from deltafront.workers.messages.requests import RefusalReason, Refused

from .fakes import EOS, FakeDecode
from .inprocess import HANG_S, House, wait_until
from .test_requests import collect, expected, ids, nothing_left

pytestmark = pytest.mark.usefixtures("impatient")
PROMPT = "p" * 700


def outcomes(house: House) -> dict[tuple[str, str], float]:
    samples = (s for m in house.metrics.registry().collect() for s in m.samples)
    return {
        (s.labels["method_rpc"], s.labels["outcome"]): s.value
        for s in samples
        if s.name == "deltafront_requests_total" and s.value
    }


def counter(house: House, name: str) -> float:
    return sum(s.value for m in house.metrics.registry().collect() for s in m.samples if s.name == name)


@pytest.mark.parametrize("kind", ["dead group", "failing group", "decode"])
def test_request_moves_to_a_spare_worker_without_a_pause(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The pause and the poll are an hour each, so either would hang the test."""
    monkeypatch.setattr(attempt, "_FIRST_PAUSE_S", 3600.0)
    house = make_house(refresh_s=3600)
    first = house.cut("decode" if kind == "decode" else "group")
    if kind == "decode":
        house.add_decode("decode:d1").total = 2000
    else:
        house.add_group("prefill:g1")
    house.loop.run(house.fleet.refresh())
    if kind == "failing group":
        first.worker.fail_after = [2]
    else:
        first.cut_after = 2
    with DeltafrontClient(house.address) as client:
        text, *_ = collect(client.generate(PROMPT, max_tokens=9))
    assert text == expected(ids(PROMPT), 9)
    assert counter(house, "deltafront_replays_total") == 1
    wait_until(lambda: not any(house.fleet._held.values()), "requests are left")


def test_request_is_replayed_at_most_as_often_as_configured(house: House, client: DeltafrontClient) -> None:
    house.group.fail_after = [1, 1, 1]
    with pytest.raises(Unavailable, match="a stage died; gave up after 3 tries"):
        list(client.generate(PROMPT))
    assert outcomes(house) == {("Generate", "unavailable"): 1}
    nothing_left(house)


@pytest.mark.parametrize("events", [0, 1, 2, 7])
def test_answer_survives_the_death_of_its_decode_worker(
    house: House, client: DeltafrontClient, events: int
) -> None:
    """The answer resumes where it stopped, with the same tokens as without the fault."""
    house.add_decode("decode:d1")
    dying = house.directory.workers[0]
    dying.cut_after = events  # type: ignore[attr-defined]
    house.directory.workers[1].worker.total = 100  # type: ignore[attr-defined]  # so that d0 is chosen
    text, tokens, finish, _ = collect(client.generate(PROMPT, max_tokens=20))
    assert text == expected(ids(PROMPT), 20)
    assert [t.index for t in tokens] == list(range(20))
    assert finish.usage.completion_tokens == 20
    assert dying.cut  # type: ignore[attr-defined]
    assert counter(house, "deltafront_time_to_first_token_seconds_count") == 1
    wait_until(lambda: not any(house.fleet._held.values()), "requests are left")


def test_request_waits_for_a_worker_that_restarts(house: House, client: DeltafrontClient) -> None:
    house.cut("decode").cut_after = 4

    def come_back() -> None:
        wait_until(lambda: not house.fleet.view.workers, "the death is not noticed")
        house.add_decode("decode:new")

    rebuilding = threading.Thread(target=come_back)
    rebuilding.start()
    text, *_ = collect(client.generate(PROMPT, max_tokens=12))
    rebuilding.join()
    assert text == expected(ids(PROMPT), 12)


def test_without_workers_a_request_is_unavailable(make_house: Callable[..., House]) -> None:
    house = make_house(worker_wait_s=0.3)
    house.cut("decode").cut = True
    with DeltafrontClient(house.address) as client:
        with pytest.raises(Unavailable, match="no decode worker is running") as caught:
            list(client.generate(PROMPT))
        assert caught.value.retry_after_s == 5


def test_worker_death_after_the_last_token_repeats_no_token(house: House, client: DeltafrontClient) -> None:
    house.decode.script = [*b"all of it", EOS]
    house.cut("decode").cut_after = 1 + len(house.decode.script)
    text, tokens, finish, _ = collect(client.generate(PROMPT, max_tokens=40))
    assert (text, finish.reason, len(tokens)) == ("all of it", "stop", 10)


def test_worker_death_after_a_sessions_last_token_loses_nothing(
    house: House, client: DeltafrontClient
) -> None:
    *_, made = client.prefill("doc")
    house.decode.script = [*b"all of it", EOS]
    house.cut("decode").cut_after = 1 + len(house.decode.script)
    session = made.session.session_id  # type: ignore[union-attr]
    text, _, finish, _ = collect(client.generate(session_id=session, append="q", max_tokens=40))
    assert (text, finish.reason, finish.usage.cached_tokens) == ("all of it", "stop", 4)


@pytest.mark.parametrize("wish", [{"max_tokens": 9}, {"max_tokens": 40, "stop": ["all of it"]}])
def test_finish_event_has_no_session_if_the_decode_worker_died(
    house: House, client: DeltafrontClient, wish: dict[str, Any]
) -> None:
    house.decode.script = [*b"all of it"]
    house.cut("decode").cut_after = 1 + len(house.decode.script)
    _, tokens, finish, _ = collect(client.generate(PROMPT, session_ttl_s=30, **wish))
    assert (len(tokens), finish.session) == (9, None)


def test_sessions_end_when_their_decode_worker_dies(house: House, client: DeltafrontClient) -> None:
    *_, made = client.prefill(PROMPT)
    session = made.session.session_id  # type: ignore[union-attr]
    house.cut("decode").cut_after = 3
    with pytest.raises(NotFound, match="its decode worker died"):
        list(client.generate(session_id=session, append="q", max_tokens=9))
    with pytest.raises(NotFound, match="send the prompt again"):
        list(client.generate(session_id=session, append="q"))
    with pytest.raises(NotFound):
        client.release(session)


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        (WorkerLost("decode:d0", "it died"), (NotFound, "no such session")),
        (WorkerFailed("decode:d0", "the worker is shutting down"), (Unavailable, "shutting down")),
    ],
    ids=["dies", "fails"],
)
def test_releasing_a_session_on_a_dying_worker_is_no_internal_error(
    house: House, client: DeltafrontClient, fault: Exception, answer: tuple[type[Exception], str]
) -> None:
    *_, made = client.prefill(PROMPT)

    async def release_session(*_arguments: str) -> bool:
        raise fault

    house.decode.release_session = release_session  # type: ignore[method-assign,assignment]
    with pytest.raises(answer[0], match=answer[1]):
        client.release(made.session.session_id)  # type: ignore[union-attr]


def test_request_finishes_while_rays_control_store_is_silent(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's control store may not answer just after a worker died."""
    failures, generate = list[Unavailable](), house.decode.generate

    async def refresh() -> None:
        failures.append(Unavailable("Ray does not say which workers there are"))
        raise failures[-1]

    def die(*_arguments: Any) -> Any:
        house.decode.generate = generate  # type: ignore[method-assign]
        raise WorkerLost("decode:d0", "it died")

    monkeypatch.setattr(
        house.fleet, "refresh", refresh
    )  # only the request's call hangs; the door still polls
    monkeypatch.setattr(house.decode, "generate", die)
    text, *_ = collect(client.generate(PROMPT, max_tokens=9))
    assert text == expected(ids(PROMPT), 9) and failures


def test_failed_session_request_is_replayed(house: House, client: DeltafrontClient) -> None:
    *_, made = client.prefill("doc")
    house.decode.fail_after = [4]
    session = made.session.session_id  # type: ignore[union-attr]
    text, *_ = collect(client.generate(session_id=session, append="q", max_tokens=10))
    assert text == expected(ids("doc") + ids("q", bos=False), 10)
    client.release(session)
    nothing_left(house)


def test_session_of_a_failed_attempt_is_released(house: House, client: DeltafrontClient) -> None:
    house.decode.fail_after = [3]
    *_, finish = client.generate(PROMPT, max_tokens=5, session_ttl_s=30)
    assert isinstance(finish, GenerateFinished)
    assert finish.session is not None
    wait_until(lambda: len(house.decode._sessions) == 1, "the failed attempt's session is left")
    client.release(finish.session.session_id)
    nothing_left(house)


@pytest.mark.parametrize("tokens", [0, 3])
def test_metrics_count_a_replayed_request_once(house: House, client: DeltafrontClient, tokens: int) -> None:
    house.decode.fail_after = [tokens]
    collect(client.generate(PROMPT, max_tokens=9))
    assert counter(house, "deltafront_replays_total") == 1
    for name in ("request_prefill_time_seconds", "request_queue_time_seconds", "handoff_seconds"):
        assert counter(house, f"deltafront_{name}_count") == 1, name
    for name in ("attention_density_ratio", "scoring_overhead_ratio", "request_prompt_tokens"):
        assert counter(house, f"deltafront_{name}_count") == 1, name
    assert counter(house, "deltafront_handoff_bytes_total") == 100 * (len(PROMPT) + 1)
    assert counter(house, "deltafront_generation_tokens_total") == 9
    assert counter(house, "deltafront_inter_token_latency_seconds_count") == 8


def test_kv_transfer_time_is_recorded_if_its_decode_worker_died(
    house: House, client: DeltafrontClient
) -> None:
    house.decode.script = [*b"all of it", EOS]
    house.cut("decode").cut_after = 1 + len(house.decode.script)
    collect(client.generate(PROMPT, max_tokens=40))
    assert counter(house, "deltafront_handoff_seconds_sum") == 0.001


# --- refusals of workers -----------------------------------------------------------------------------------


def test_reserves_at_the_next_decode_worker_if_the_first_is_full(
    house: House, client: DeltafrontClient
) -> None:
    """The door's view is a moment old, so d0 refuses."""
    other = house.add_decode("decode:d1")
    other.total = 2000
    first: FakeDecode = house.directory.workers[0].worker  # type: ignore[attr-defined]
    house.loop.run(house.fleet.refresh())

    async def no(_order: object) -> Refused:
        return Refused(reason=RefusalReason.PAGES, message="just taken")

    first.reserve = no  # type: ignore[method-assign,assignment]
    text, *_ = collect(client.generate(PROMPT, max_tokens=4))
    assert text == expected(ids(PROMPT), 4)
    assert other.jobs


def test_full_page_pool_refuses_with_a_retry_time(house: House, client: DeltafrontClient) -> None:
    house.decode.total = 100
    house.decode.pause_at = 1
    house.loop.run(house.fleet.refresh())
    stream = client.generate("a" * 600, max_tokens=600)
    next(stream)
    with pytest.raises(Overloaded) as caught:
        list(client.generate("b" * 600, max_tokens=600))
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    stream.close()  # type: ignore[attr-defined]
    nothing_left(house)
    with pytest.raises(Overloaded, match=r"more than any worker can hold: .* raise cache_tokens") as never:
        list(client.generate("b" * 600, max_tokens=2000))
    assert never.value.retry_after_s is None


def busy(seconds: float | None) -> Refused:
    return Refused(reason=RefusalReason.BUSY, message="64 prompts wait already", retry_after_s=seconds)


def test_prefills_at_the_next_group_if_the_queue_of_the_first_is_full(
    house: House, client: DeltafrontClient
) -> None:
    """The next group gets the same reservation. If all refuse, the retry time is the soonest of all
    groups."""
    first, second = house.group, house.add_group("prefill:g1")
    house.decode.remembers = False
    house.loop.run(house.fleet.refresh())
    first.busy, second.busy = [busy(7.0)], []
    text, *_ = collect(client.generate(PROMPT, max_tokens=4))
    assert text == expected(ids(PROMPT), 4)
    assert [len(group.jobs) for group in (first, second)] == [1, 1]
    assert first.jobs[0] == second.jobs[0] and len(house.decode.reservations) == 1
    nothing_left(house)
    first.busy, second.busy = [busy(7.0)], [busy(3.0)]
    with pytest.raises(Overloaded, match="64 prompts wait already") as caught:
        list(client.generate(PROMPT))
    assert caught.value.retry_after_s == 3.0
    first.busy, second.busy = [busy(None)], [busy(None)]
    with pytest.raises(Overloaded) as caught:
        list(client.generate(PROMPT))
    assert caught.value.retry_after_s == 5.0, "nobody knows"
    nothing_left(house)


def test_asks_a_group_whose_queue_looks_full_before_reserving_pages(
    house: House, client: DeltafrontClient
) -> None:
    """A refusal then costs one call. If the group or another one has a place by now, it is used."""
    first, second = house.group, house.add_group("prefill:g1")
    for full in (first, second):
        full.full_with, full.waiting_tokens = busy(6.0 if full is first else 3.0), 100
    house.loop.run(house.fleet.refresh())
    with pytest.raises(Overloaded, match="64 prompts wait already") as caught:
        list(client.generate(PROMPT))
    assert caught.value.retry_after_s == 2.0, "one of both has a place by then"
    assert not house.decode.reservations and not first.jobs and not second.jobs
    second.full_with = None  # the door does not know this yet
    text, *_ = collect(client.generate(PROMPT, max_tokens=4))
    assert text == expected(ids(PROMPT), 4)
    assert (len(first.jobs), len(second.jobs)) == (0, 1)
    nothing_left(house)


@pytest.mark.parametrize("read_meanwhile", [True, False])
def test_door_polls_workers_again_before_refusing_for_a_backlog(
    make_house: Callable[..., House], read_meanwhile: bool
) -> None:
    """The door has polled its workers once, and polls them again before it refuses."""
    house = make_house(refresh_s=1e6)
    house.group.rate, house.group.waiting_tokens = 1000.0, 100_000
    house.loop.run(house.fleet.refresh())
    if read_meanwhile:
        house.group.waiting_tokens = 0
    with DeltafrontClient(house.address) as client:
        asked = client.generate(PROMPT, max_tokens=4, timeout_s=HANG_S)
        if read_meanwhile:
            assert collect(asked)[0] == expected(ids(PROMPT), 4)
        else:
            with pytest.raises(Overloaded, match="the first token is expected in 10"):
                list(asked)
    nothing_left(house)


def test_waits_at_the_decode_worker_whose_pages_are_free_soonest(
    house: House, client: DeltafrontClient
) -> None:
    first, second = house.decode, house.add_decode("decode:d1")
    first.remembers = second.remembers = False
    house.loop.run(house.fleet.refresh())

    def full(seconds: float) -> Refused:
        return Refused(
            reason=RefusalReason.PAGES, message="just taken", needed=40, free=0, retry_after_s=seconds
        )

    first.busy, second.busy = [full(9.0)], [full(2.0)]
    text, *_ = collect(client.generate(PROMPT, max_tokens=4, timeout_s=HANG_S))
    assert text == expected(ids(PROMPT), 4)
    assert [reservation.wait for reservation in first.reservations] == [False]
    assert [reservation.wait for reservation in second.reservations] == [False, True]
    assert all(told.options.deadline is not None for told in first.reservations + second.reservations)
    first.busy, second.busy = [full(9.0)], [full(4.0), full(4.0)]
    with pytest.raises(Overloaded, match="no room now: just taken") as caught:
        list(client.generate(PROMPT))
    assert caught.value.retry_after_s == 4.0
    nothing_left(house)


def test_outdated_worker_state_never_refuses_a_request_that_fits(
    make_house: Callable[..., House],
) -> None:
    """Requests run one after the other without a poll in between. Each takes more than half of the pages."""
    house = make_house(refresh_s=3600)
    house.decode.total = 100
    house.loop.run(house.fleet.refresh())
    with DeltafrontClient(house.address) as client:
        for letter in "abc":
            text, *_ = collect(client.generate(letter * 600, max_tokens=400))
            assert len(text) == 400
    nothing_left(house)


def test_request_that_a_worker_cancels_itself_is_replayed(house: House, client: DeltafrontClient) -> None:
    """A worker cancels a request whose lease has expired because the door was stalled."""
    house.decode.pause_at = 4
    stream = client.generate(PROMPT, max_tokens=10)
    text = ""
    for event in stream:
        if isinstance(event, Token) and event.index == 3:
            house.decode.pause_at = -1
            house.loop.run(house.decode.cancel(house.decode.jobs[0].request_id))
        text += getattr(event, "text", "")
    assert text == expected(ids(PROMPT), 10)
    assert len(house.decode.jobs) == 2
