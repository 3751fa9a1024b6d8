"""Prefill, Generate, ReleaseSession and GetServerInfo through a real gRPC server, with fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deltafront.service.client import (
    DeltafrontClient,
    GenerateFinished,
    PrefillFinished,
    Progress,
    Token,
)
from deltafront.service.errors import Cancelled, InvalidArgument, NotFound, Overloaded
from deltafront.service.request.run import attempt, request_run
from deltafront.workers.messages.requests import RefusalReason, Refused

from .fakes import EOS, next_token
from .inprocess import HANG_S, House, wait_until


def expected(prompt: bytes, count: int) -> str:
    """Return the fake model's answer to these ids (bytes and BOS)."""
    ids, text = prompt, ""
    for _ in range(count):
        token = next_token(ids)
        ids += token.to_bytes(4, "little")
        text += chr(token)
    return text


def ids(text: str, bos: bool = True) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ([256] if bos else []) + list(text.encode()))


def collect(events: object) -> tuple[str, list[Token], GenerateFinished, list[Progress]]:
    tokens, progress, finish = [], [], None
    for event in events:  # type: ignore[attr-defined]
        assert finish is None, "an event after the finish"
        if isinstance(event, Token):
            tokens.append(event)
        elif isinstance(event, Progress):
            assert not tokens
            progress.append(event)
        else:
            finish = event
    assert finish is not None
    return "".join(t.text for t in tokens) + finish.text, tokens, finish, progress


def nothing_left(house: House) -> None:
    wait_until(
        lambda: not house.pages_used() and not any(house.fleet._held.values()), "pages or requests are left"
    )


def test_prompt_is_prefilled_and_answered(house: House, client: DeltafrontClient) -> None:
    prompt = "x" * 500
    text, tokens, finish, progress = collect(client.generate(prompt, max_tokens=12, request_id="mine"))
    assert text == expected(ids(prompt), 12)
    assert [t.index for t in tokens] == list(range(12))
    assert [chr(t.token_id) for t in tokens] == list(text)
    assert [p.tokens_done for p in progress] == [128, 256, 384, 501]
    assert progress[-1].tokens_total == 501
    assert {tile.layer: tile.density for tile in progress[-1].tiles} == finish.density.layers
    assert (finish.reason, finish.request_id, finish.session) == ("length", "mine", None)
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens) == (
        501,
        12,
        0,
    )
    assert finish.page_share == 0.5
    assert finish.density.method == "dense"
    assert finish.density.mean == 0.75
    assert finish.density.layers == {0: 1.0, 1: 0.5}
    assert finish.density.scoring_overhead == pytest.approx(0.2)
    nothing_left(house)


def test_a_session_answers_many_questions(house: House, client: DeltafrontClient) -> None:
    before = time.time()
    *_, result = client.prefill("some document", session_ttl_s=60)
    assert isinstance(result, PrefillFinished)
    assert result.session.tokens == 14
    assert before + 60 <= result.session.expires <= time.time() + 60
    for question in ("first?", "second?"):
        answer = client.generate(session_id=result.session.session_id, append=question, max_tokens=5)
        text, _, finish, progress = collect(answer)
        assert text == expected(ids("some document") + ids(question, bos=False), 5)
        assert finish.usage.cached_tokens == 14
        assert finish.usage.prompt_tokens == 14 + len(question)
        assert not progress
        assert "queue" not in finish.timings.parts
    client.release(result.session.session_id)
    with pytest.raises(NotFound):
        client.release(result.session.session_id)
    with pytest.raises(NotFound):
        list(client.generate(session_id=result.session.session_id, append="again"))
    nothing_left(house)


def test_refuses_max_tokens_that_do_not_fit_after_a_session(house: House, client: DeltafrontClient) -> None:
    *_, result = client.prefill("some document", session_ttl_s=60)
    session = result.session.session_id
    house.decode.busy = [Refused(reason=RefusalReason.POSITIONS, message="too much", tokens_left=2)]
    with pytest.raises(InvalidArgument, match="append: too much"):
        list(client.generate(session_id=session, append="what?", max_tokens=8))
    client.release(session)
    nothing_left(house)


def test_cuts_a_default_length_answer_to_a_sessions_positions(
    make_house: Callable[..., House],
) -> None:
    """Only the decode worker knows the session's length."""
    house = make_house(default_max_tokens=8)
    with DeltafrontClient(house.address) as client:
        cut_to_what_a_session_leaves(house, client)


def cut_to_what_a_session_leaves(house: House, client: DeltafrontClient) -> None:
    *_, result = client.prefill("some document", session_ttl_s=60)
    session = result.session.session_id
    no = partial(Refused, reason=RefusalReason.POSITIONS, message="too much")
    house.decode.busy = [no(tokens_left=2)]
    text, _, finish, _ = collect(client.generate(session_id=session, append="what?"))
    assert text == expected(ids("some document") + ids("what?", bos=False), 2)
    assert (finish.reason, [reservation.max_tokens for reservation in house.decode.reservations[-2:]]) == (
        "length",
        [8, 2],
    )
    house.decode.busy = [no()]
    with pytest.raises(InvalidArgument, match="too much"):
        list(client.generate(session_id=session, append="what?"))
    client.release(session)
    nothing_left(house)


def test_session_kept_by_generate_ends_before_the_appended_text(client: DeltafrontClient) -> None:
    answer = client.generate("document ", append="question", max_tokens=3, session_ttl_s=30)
    text, _, finish, _ = collect(answer)
    assert text == expected(ids("document question"), 3)
    assert finish.session is not None
    assert finish.session.tokens == len("document ") + 1
    text, _, finish, _ = collect(
        client.generate(session_id=finish.session.session_id, append="question", max_tokens=3)
    )
    assert text == expected(ids("document question"), 3)


@pytest.mark.parametrize("append", [None, [{"role": "user", "content": "why"}], "raw"])
def test_messages_use_the_chat_template(house: House, client: DeltafrontClient, append: object) -> None:
    chat = [{"role": "user", "content": "hi"}]
    collect(client.generate(chat, append=append, max_tokens=2))  # type: ignore[arg-type]
    read = bytes(house.group.jobs[-1].token_ids[::4]).decode()
    end = {None: "[a:", "raw": "raw"}.get(append if isinstance(append, str | None) else "", "[u:why][a:")
    assert read == "[s:be nice][u:hi]" + end


def test_token_ids_are_used_unchanged(house: House, client: DeltafrontClient) -> None:
    text, _, finish, _ = collect(client.generate([1, 2, 257], append=[3], max_tokens=4))
    assert house.group.jobs[-1].token_ids == b"".join(i.to_bytes(4, "little") for i in (1, 2, 257, 3))
    assert finish.usage.prompt_tokens == 4
    assert len(text) == 4


def test_a_stop_string_across_tokens_ends_the_answer(house: House, client: DeltafrontClient) -> None:
    house.decode.script = list(b"abcdSTxSTOPnever")
    text, tokens, finish, _ = collect(client.generate("p", max_tokens=16, stop=["STOP", "STOPPED"]))
    assert (text, finish.reason) == ("abcdSTx", "stop_string")
    assert finish.usage.completion_tokens == len(tokens) == 11
    nothing_left(house)


def test_deadline_after_a_stop_string_changes_nothing(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door cancels on the worker, which may take seconds if the worker hangs."""
    limits: list[asyncio.Timeout] = []

    @contextlib.asynccontextmanager
    async def noted(deadline: float | None) -> AsyncIterator[asyncio.Timeout]:
        async with attempt.deadline_timeout(deadline) as limit:
            limits.append(limit)
            yield limit

    async def cancel(request_id: str) -> None:
        """Let the deadline pass, if there is still one."""
        if limits[-1].when() is not None and not limits[-1].expired():
            limits[-1].reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        await ended(request_id)

    ended = house.decode.cancel
    monkeypatch.setattr(request_run, "deadline_timeout", noted)
    monkeypatch.setattr(house.decode, "cancel", cancel)
    house.decode.script = list(b"abSTOPnever")
    text, _, finish, _ = collect(client.generate("p", max_tokens=16, stop=["STOP"], timeout_s=HANG_S))
    assert (text, finish.reason) == ("ab", "stop_string")


def test_finish_event_flushes_held_back_text(house: House, client: DeltafrontClient) -> None:
    house.decode.script = list(b"abST")
    text, tokens, finish, _ = collect(client.generate("p", max_tokens=4, stop=["STOP"]))
    assert (text, finish.text, finish.reason) == ("abST", "ST", "length")
    assert "".join(t.text for t in tokens) == "ab"


def test_streamed_text_never_cuts_a_character(house: House, client: DeltafrontClient) -> None:
    house.decode.script = [*"aé€🙂".encode(), 0xF0, EOS]
    text, tokens, finish, _ = collect(client.generate("p", max_tokens=20))
    assert text == "aé€🙂\N{REPLACEMENT CHARACTER}"
    assert [t.text for t in tokens if t.text] == ["a", "é", "€", "🙂"]
    assert (finish.reason, finish.text) == ("stop", "\N{REPLACEMENT CHARACTER}")


def test_timings_add_up_to_the_elapsed_time(house: House, client: DeltafrontClient) -> None:
    """The sum is at least the workers' sleep, and at most the client's time."""
    house.group.speed.chunk = 0.05
    started = time.monotonic()
    first, finish = 0.0, None
    for event in client.generate("x" * 1000, max_tokens=3):
        if isinstance(event, Token) and event.index == 0:
            first = time.monotonic() - started
        if isinstance(event, GenerateFinished):
            finish = event
    assert finish is not None
    timings = finish.timings
    assert sum(timings.parts.values()) == pytest.approx(timings.ttft_seconds, abs=1e-9)
    assert set(timings.parts) >= {
        "tokenize",
        "admission",
        "queue",
        "prefill.attention",
        "first_step",
        "transport",
    }
    assert 8 * 0.05 <= timings.ttft_seconds <= first
    prefill = sum(seconds for part, seconds in timings.parts.items() if part.startswith("prefill."))
    assert 8 * 0.05 <= prefill <= timings.ttft_seconds
    assert all(seconds >= 0 for seconds in timings.parts.values())
    assert len(timings.stages) == 2
    assert timings.total_seconds >= timings.ttft_seconds


def test_first_event_tells_when_the_first_token_is_expected(house: House, client: DeltafrontClient) -> None:
    """The group tells it, by its rate and what it has to prefill before, since the door's view of the queue
    is old. The door adds the time that the request has taken, and what follows prefill. Without a rate
    nothing is promised."""
    silent, *_ = client.generate("x" * 1000, max_tokens=1)
    after_prefill = house.door._requests._resources.after_prefill
    assert 0 < after_prefill.expected_s(0) < HANG_S
    for _ in range(16):
        after_prefill.record(0, 7.0)
    house.group.rate, house.group.waiting_tokens = 1000.0, 500
    begun = time.monotonic()
    told, *_ = client.generate("y" * 1000, max_tokens=1)
    taken = time.monotonic() - begun
    assert isinstance(silent, Progress) and isinstance(told, Progress)
    assert silent.tokens_done > 0 == silent.expected_first_token_seconds
    assert told.tokens_done == 0
    least = (500 + told.tokens_total) / 1000 + 7.0
    assert least < told.expected_first_token_seconds < least + taken


def test_info_describes_the_service(house: House, client: DeltafrontClient) -> None:
    info = client.info()
    assert (info.vocabulary, info.max_positions, info.page_tokens) == (258, 8192, 16)
    assert (info.prefill_groups, info.decode_workers, info.prefill_stages) == (1, 1, 2)
    assert info.decode_pages_free == info.decode_pages_total == 4096
    methods = {method.name: method.defaults for method in info.methods}
    assert methods["dpxa"]["cos"] == 0.4
    assert "flex" not in methods


def test_full_door_refuses_requests_but_answers_health_and_cancel(
    make_house: Callable[..., House],
) -> None:
    """Without this limit, Ray Serve would queue any number of requests, and health checks and cancels after
    them."""
    house = make_house(max_requests=2)
    house.decode.pause_at = 1
    with DeltafrontClient(house.address) as client, grpc.insecure_channel(house.address) as channel:
        streams = [client.generate("x", max_tokens=5, request_id=name) for name in ("a", "b")]
        for stream in streams:
            next(stream)
        for more in (client.generate("y", timeout_s=HANG_S), client.prefill("y", timeout_s=HANG_S)):
            with pytest.raises(Overloaded, match="works on 2 requests, as many as it may") as caught:
                list(more)
            assert caught.value.retry_after_s
        assert client.info().decode_workers == 1
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S).status == 1
        assert client.cancel("a") == 1
        with pytest.raises(Cancelled):
            list(streams[0])
        house.decode.pause_at = -1
        for again in (streams[1], client.generate("y", max_tokens=5)):
            assert isinstance([*again][-1], GenerateFinished)
    nothing_left(house)


def test_fork_during_a_request_runs_no_grpc_handler(house: House, capfd: pytest.CaptureFixture[str]) -> None:
    house.decode.pause_at = 1
    with DeltafrontClient(house.address) as client:
        stream = client.generate("hello", max_tokens=5)
        next(stream)
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        house.decode.pause_at = -1
        text, *_ = collect(stream)
    assert text == expected(ids("hello"), 5)
    assert "fork" not in capfd.readouterr().err
