"""Workers that die or fail under a request, clients that leave, deadlines: one outcome, nothing left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deltafront.service.client import DeltafrontClient, GenerateFinished, Token
from deltafront.service.errors import Cancelled, DeadlineExceeded, NotFound, Overloaded, Unavailable
from deltafront.service.fleet.links import LocalDirectory
from deltafront.service.fleet.view import Charge, Fleet
from deltafront.service.request import attempt
from deltafront.workers.messages import DecodeStats, FinishReason, RefusalReason, Refused

from .fakes import EOS, FakeDecode, FakeGroup, Speed
from .inprocess import HANG_S, House, wait_until
from .test_requests import collect, expected, ids, nothing_left

PROMPT = "p" * 700


def outcomes(house: House) -> dict[tuple[str, str], float]:
    samples = (s for m in house.metrics.registry().collect() for s in m.samples)
    return {
        (s.labels["method_rpc"], s.labels["outcome"]): s.value
        for s in samples
        if s.name == "deltafront_requests_total"
    }


def counter(house: House, name: str) -> float:
    return sum(s.value for m in house.metrics.registry().collect() for s in m.samples if s.name == name)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_FIRST_PAUSE_S", 0.02)


@pytest.mark.parametrize("chunks", [0, 1, 5])
def test_a_dying_group_is_replaced_unnoticed(house: House, client: DeltafrontClient, chunks: int) -> None:
    spare = house.add_group("prefill:g1")
    house.cut("group").cut_after = -1
    first = house.directory.groups[0]
    first.cut_after = chunks  # type: ignore[attr-defined]
    text, _, finish, _ = collect(client.generate(PROMPT, max_tokens=9))
    assert text == expected(ids(PROMPT), 9)
    assert len(spare.jobs) + len(first.worker.jobs) == 2  # type: ignore[attr-defined]
    assert finish.timings.parts["replay"] > 0
    assert sum(finish.timings.parts.values()) == pytest.approx(finish.timings.ttft_seconds)
    assert counter(house, "deltafront_replays_total") == 1
    nothing_left(house)


def test_a_stage_failure_is_replayed(house: House, client: DeltafrontClient) -> None:
    house.group.fail_after = [2, 0]
    text, *_ = collect(client.generate(PROMPT, max_tokens=5))
    assert text == expected(ids(PROMPT), 5)
    nothing_left(house)


def test_no_more_replays_than_configured(house: House, client: DeltafrontClient) -> None:
    house.group.fail_after = [1, 1, 1]
    with pytest.raises(Unavailable, match="a stage died; gave up after 3 tries"):
        list(client.generate(PROMPT))
    assert outcomes(house) == {("Generate", "unavailable"): 1}
    nothing_left(house)


@pytest.mark.parametrize("events", [0, 1, 2, 7])
def test_a_dying_decode_worker_costs_a_pause(house: House, client: DeltafrontClient, events: int) -> None:
    """The answer goes on where it stopped, token by token as without the fault."""
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
    wait_until(lambda: not house.fleet.in_progress, "requests are left")


def test_a_worker_that_comes_back_is_waited_for(house: House, client: DeltafrontClient) -> None:
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


def test_death_after_the_last_token_repeats_nothing(house: House, client: DeltafrontClient) -> None:
    house.decode.script = [*b"all of it", EOS]
    house.cut("decode").cut_after = 1 + len(house.decode.script)
    text, tokens, finish, _ = collect(client.generate(PROMPT, max_tokens=40))
    assert (text, finish.reason, len(tokens)) == ("all of it", "stop", 10)


def test_sessions_die_with_their_worker(house: House, client: DeltafrontClient) -> None:
    *_, made = client.prefill(PROMPT)
    session = made.session.session_id  # type: ignore[union-attr]
    house.cut("decode").cut_after = 3
    with pytest.raises(NotFound, match="its decode worker died"):
        list(client.generate(session_id=session, append="q", max_tokens=9))
    with pytest.raises(NotFound, match="send the prompt again"):
        list(client.generate(session_id=session, append="q"))
    with pytest.raises(NotFound):
        client.release(session)


def test_a_failed_session_request_goes_on(house: House, client: DeltafrontClient) -> None:
    *_, made = client.prefill("doc")
    house.decode.fail_after = [4]
    session = made.session.session_id  # type: ignore[union-attr]
    text, *_ = collect(client.generate(session_id=session, append="q", max_tokens=10))
    assert text == expected(ids("doc") + ids("q", bos=False), 10)
    client.release(session)
    nothing_left(house)


def test_a_session_of_a_failed_attempt_is_dropped(house: House, client: DeltafrontClient) -> None:
    house.decode.fail_after = [3]
    *_, finish = client.generate(PROMPT, max_tokens=5, session_ttl_s=30)
    assert isinstance(finish, GenerateFinished)
    assert finish.session is not None
    wait_until(lambda: len(house.decode._sessions) == 1, "the failed attempt's session is left")
    client.release(finish.session.session_id)
    nothing_left(house)


def test_a_client_that_leaves_before_the_finish_leaves_no_session(
    house: House, client: DeltafrontClient
) -> None:
    house.decode.pause_at = 5
    stream = client.generate(PROMPT, max_tokens=50, session_ttl_s=30)
    while not isinstance(next(stream), Token):
        pass
    assert house.decode._sessions
    stream.close()  # type: ignore[attr-defined]
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


def test_a_hand_off_is_measured_although_its_worker_died(house: House, client: DeltafrontClient) -> None:
    house.decode.script = [*b"all of it", EOS]
    house.cut("decode").cut_after = 1 + len(house.decode.script)
    collect(client.generate(PROMPT, max_tokens=40))
    assert counter(house, "deltafront_handoff_seconds_sum") == 0.001


# --- leaving and running late --------------------------------------------------------------------------


@pytest.mark.parametrize("rpc", ["generate", "prefill"])
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.1, 0.2, 0.3])
def test_leaving_at_any_moment_frees_everything(
    house: House, client: DeltafrontClient, after_s: float, rpc: str
) -> None:
    """The work has no end, so that leaving is always before it."""
    house.group.speed, house.decode.speed = Speed(chunk=0.03), Speed(token=0.03)
    if rpc == "generate":
        house.decode.pause_at = 20
    else:
        house.group.pause_at = 5
    call = client.generate(PROMPT, max_tokens=50) if rpc == "generate" else client.prefill(PROMPT)
    timer = threading.Timer(after_s, client.close)
    timer.start()
    try:
        for _event in call:
            pass
    except (Cancelled, Unavailable, ValueError):
        pass
    timer.join()
    assert not house.decode._sessions
    nothing_left(house)
    assert set(house.group.cancelled) <= {job.request_id for job in house.group.jobs}


class Gate:
    """Something that a test lets pass when it wants to; `reached` is set once somebody waits there."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.open.wait(HANG_S)

    async def wait_async(self) -> None:
        await asyncio.to_thread(self.wait)


def leaves(client: DeltafrontClient, call: Iterator[object], gate: Gate) -> None:
    """Read a stream until its client leaves, which happens at the gate."""

    def leave() -> None:
        assert gate.reached.wait(HANG_S)
        client.close()

    leaver = threading.Thread(target=leave)
    leaver.start()
    with pytest.raises((Cancelled, ValueError)):
        list(call)
    leaver.join()


def test_leaving_while_tokenizing_takes_nothing(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, gate, encoded = house.door._requests._resources.tokenizer, Gate(), threading.Event()
    encode = tokenizer.encode

    def slow(*arguments: Any, **options: Any) -> bytes:
        gate.wait()
        encoded.set()
        return encode(*arguments, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    leaves(client, client.generate(PROMPT), gate)
    wait_until(lambda: outcomes(house) == {("Generate", "cancelled"): 1}, "the request is not cancelled")
    gate.open.set()
    assert encoded.wait(HANG_S)
    house.loop.run(asyncio.sleep(0.05))
    assert not house.group.jobs
    nothing_left(house)


def test_leaving_while_reserving_gives_the_pages_back(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, gate = house.decode.reserve, Gate()

    async def slow(order: Any) -> object:
        answer = await reserve(order)
        await gate.wait_async()
        return answer

    monkeypatch.setattr(house.decode, "reserve", slow)
    leaves(client, client.generate(PROMPT), gate)
    nothing_left(house)
    gate.open.set()
    assert len(house.decode.cancelled) == 1


def test_leaving_while_a_session_is_kept_leaves_none(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, gate, kept = house.decode.keep, Gate(), []

    async def slow(order: Any) -> object:
        answer = await keep(order)
        kept.append(answer)
        await gate.wait_async()
        return answer

    monkeypatch.setattr(house.decode, "keep", slow)
    leaves(client, client.prefill("short"), gate)
    assert kept
    assert house.decode._sessions
    gate.open.set()
    nothing_left(house)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_deadline_cancels_workers(house: House, client: DeltafrontClient, phase: str) -> None:
    """Work that has no end, however long the machine takes to get there."""
    (house.group if phase == "prefill" else house.decode).pause_at = 3
    with pytest.raises(DeadlineExceeded):
        list(client.generate(PROMPT, max_tokens=100, timeout_s=0.5))
    wait_until(lambda: outcomes(house) == {("Generate", "deadline_exceeded"): 1}, "there is no outcome")
    nothing_left(house)


def test_everything_in_progress_is_renewed(house: House, client: DeltafrontClient) -> None:
    house.group.pause_at = house.decode.pause_at = 3
    stream = client.generate(PROMPT, max_tokens=10)
    next(stream)
    (request_id,) = {job.request_id for job in house.group.jobs}
    for worker in (house.group, house.decode):
        wait_until(lambda worker=worker: (request_id,) in worker.renewed, "it is not renewed")  # type: ignore[misc]
    house.group.pause_at = -1
    assert house.decode.paused.wait(HANG_S)
    seen = len(house.decode.renewed)
    wait_until(lambda: len(house.decode.renewed) > seen + 1, "the answer is not renewed")
    house.decode.pause_at = -1
    list(stream)
    nothing_left(house)
    house.loop.run(house.fleet._renew())  # after any that was on its way
    seen = len(house.decode.renewed)
    house.loop.run(house.fleet._renew())
    assert len(house.decode.renewed) == seen


# --- a no from a worker ------------------------------------------------------------------------------------


def test_the_next_worker_is_asked_when_one_is_full(house: House, client: DeltafrontClient) -> None:
    """Stats are a moment old: d0 says no after all."""
    other = house.add_decode("decode:d1")
    other.total = 2000
    first: FakeDecode = house.directory.workers[0].worker  # type: ignore[attr-defined]
    house.loop.run(house.fleet.refresh())

    async def no(_order: object) -> Refused:
        return Refused(RefusalReason.PAGES, "just taken")

    first.reserve = no  # type: ignore[method-assign,assignment]
    text, *_ = collect(client.generate(PROMPT, max_tokens=4))
    assert text == expected(ids(PROMPT), 4)
    assert other.jobs


def test_a_full_pool_is_refused_with_a_time(house: House, client: DeltafrontClient) -> None:
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
    with pytest.raises(Overloaded, match="more than any worker") as never:
        list(client.generate("b" * 600, max_tokens=2000))
    assert never.value.retry_after_s is None


def test_what_a_worker_has_room_for_is_never_refused_by_an_old_view(
    make_house: Callable[..., House],
) -> None:
    """Back to back, each more than half the pool, and no poll in between."""
    house = make_house(refresh_s=3600)
    house.decode.total = 100
    house.loop.run(house.fleet.refresh())
    with DeltafrontClient(house.address) as client:
        for letter in "abc":
            text, *_ = collect(client.generate(letter * 600, max_tokens=400))
            assert len(text) == 400
    nothing_left(house)


def test_a_worker_giving_up_is_replayed(house: House, client: DeltafrontClient) -> None:
    """CANCELLED that nobody asked for (a lease ran out while the door was stalled)."""
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
    assert FinishReason.CANCELLED not in [job.page_selection for job in house.decode.jobs]


async def test_a_slow_worker_keeps_its_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = FakeDecode("decode:d0")
    fleet = Fleet(LocalDirectory([], [decode]), lambda _view: None)
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:d0"}
    monkeypatch.setattr("deltafront.service.fleet.view._STATS_PATIENCE_S", 0.05)

    async def stuck() -> None:
        await asyncio.Event().wait()

    decode.stats = stuck  # type: ignore[method-assign,assignment]
    await fleet.refresh()
    assert set(fleet.view.workers) == {"decode:d0"}


async def test_a_poll_keeps_what_was_charged_while_it_asked() -> None:
    decode, asked, told = FakeDecode("decode:d0"), asyncio.Event(), asyncio.Event()
    fleet = Fleet(LocalDirectory([FakeGroup("prefill:g0", lambda *_: None)], [decode]), lambda _view: None)
    await fleet.refresh()
    stats = decode.stats

    async def slow() -> DecodeStats:
        state = await stats()
        asked.set()
        await told.wait()
        return state

    decode.stats = slow  # type: ignore[method-assign]
    polls = [asyncio.create_task(fleet.poll()) for _ in range(2)]
    await asked.wait()
    fleet.charge(Charge("prefill:g0", 500, "decode:d0", 96))
    told.set()
    for poll in polls:
        await poll
        assert fleet.view.workers["decode:d0"].pages_free == decode.total - 96
        assert fleet.view.groups["prefill:g0"].waiting_tokens == 500
    await fleet.poll()
    assert fleet.view.workers["decode:d0"].pages_free == decode.total
