"""If a connection breaks during a request, the client resumes, and the answer is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from deltafront.service.client import DeltafrontClient, PrefillFinished
from deltafront.service.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from deltafront.workers.messages.requests import RefusalReason, Refused

from .fakes import EOS
from .inprocess import House
from .test_faults import PROMPT, counter
from .test_requests import collect, expected, ids, nothing_left

pytestmark = pytest.mark.usefixtures("impatient")
CODES = [grpc.StatusCode[name] for name in ("CANCELLED", "UNKNOWN", "INTERNAL", "UNAVAILABLE")]
READ = 6
"""Progress events of PROMPT."""


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("events", [0, 2, READ, READ + 1, READ + 9, READ + 20])
def test_answer_resumes_where_it_stopped(
    house: House, client: DeltafrontClient, events: int, code: grpc.StatusCode
) -> None:
    """Breaks the connection before and during prefill, after the first token, in the middle, and before the
    last event."""
    house.losses = [(events, code), (2, code)]
    answer = list(client.generate(PROMPT, max_tokens=20, request_id="mine"))
    tokens = [event for event in answer if hasattr(event, "token_id")]
    assert [token.index for token in tokens] == list(range(20))
    assert "".join(token.text for token in tokens) == expected(ids(PROMPT), 20)
    assert (answer[-1].reason, answer[-1].request_id) == ("length", "mine")  # type: ignore[union-attr]
    assert answer[-1].usage.completion_tokens == 20  # type: ignore[union-attr]
    assert not house.losses
    nothing_left(house)


def test_streamed_tokens_are_not_generated_again(house: House, client: DeltafrontClient) -> None:
    """The prompt is prefilled as before. The decode worker prefills the answer's tokens densely."""
    house.decode.remembers = False
    house.losses = [(READ + 5, CODES[0])]
    _, _, finish, _ = collect(client.generate(PROMPT, max_tokens=9, seed=7, temperature=1.0))
    first, second = house.group.jobs
    assert second.token_ids == first.token_ids
    assert [len(job.extend_ids) for job in house.decode.jobs] == [0, 4 * 5]
    assert [job.sampling.max_tokens for job in house.decode.jobs] == [9, 4]
    assert {job.sampling.seed for job in house.decode.jobs} == {7}
    assert counter(house, "deltafront_time_to_first_token_seconds_count") == 1
    assert set(finish.timings.parts) == {"tokenize", "transport"}, "before anything was read"
    assert (finish.timings.stages, finish.density.method) == ([], "")


@pytest.mark.parametrize("kept", range(1, 11))
def test_resumed_answer_keeps_held_back_text(house: House, client: DeltafrontClient, kept: int) -> None:
    """A connection may break inside a character and inside a stop string."""
    house.decode.script, house.decode.script_from = [*"aé€🙂STOPx".encode()], len("p") + 1
    house.losses = [(1 + kept, CODES[1])]
    text, _, finish, _ = collect(client.generate("p", max_tokens=16, stop=["STOP"]))
    assert (text, finish.reason) == ("aé€🙂", "stop_string")
    assert len(house.decode.jobs) == 2
    nothing_left(house)


def test_finish_event_lost_with_a_door_is_sent_again(house: House, client: DeltafrontClient) -> None:
    for script, reason in (([*b"all of it", EOS], "stop"), ([*b"all STOP"], "stop_string")):
        house.decode.script = list(script)
        house.losses = [(1 + len(script), CODES[2])]
        text, tokens, finish, _ = collect(client.generate("p", max_tokens=40, stop=["STOP"]))
        assert (finish.reason, len(tokens)) == (reason, len(script))
        assert text == ("all of it" if reason == "stop" else "all ")
    assert len(house.decode.jobs) == 2, "nothing is generated again"


def test_session_request_resumes_after_a_lost_door(house: House, client: DeltafrontClient) -> None:
    house.losses = [(3, CODES[0])]
    *_, made = client.prefill(PROMPT)
    assert isinstance(made, PrefillFinished)
    house.losses = [(5, CODES[0])]
    session = made.session.session_id
    text, _, finish, _ = collect(client.generate(session_id=session, append="q", max_tokens=9))
    assert text == expected(ids(PROMPT) + ids("q", bos=False), 9)
    assert finish.usage.cached_tokens == len(PROMPT) + 1
    client.release(session)
    with pytest.raises(NotFound):
        client.release(session)
    nothing_left(house)


def test_usage_of_a_resumed_answer_counts_its_sessions_tokens(house: House, client: DeltafrontClient) -> None:
    """Usage counts the session's tokens until the session ends."""
    *_, made = client.prefill(PROMPT)
    assert isinstance(made, PrefillFinished)
    session, whole = made.session.session_id, len(PROMPT) + 1
    for released, cached in ((False, whole), (True, 0)):
        house.losses = [(4, CODES[0])]
        stream = client.generate(session_id=session, append="q", max_tokens=4)
        events = [next(stream) for _ in range(4)]
        if released:
            client.release(session)
        _, _, finish, _ = collect([*events, *stream])
        usage = finish.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (cached + 1, 4, cached)
    assert len(house.decode.jobs) == 2, "nothing is generated again"
    nothing_left(house)


@pytest.fixture
def short(make_house: Callable[..., House]) -> House:
    """Start a door whose default answer has 9 tokens."""
    return make_house(default_max_tokens=9)


def test_resumed_answer_that_fills_the_context_is_complete(short: House) -> None:
    """The answer was cut to the positions after the session, whose length the next door does not know."""
    with DeltafrontClient(short.address) as client:
        fill_the_positions(short, client)


def fill_the_positions(house: House, client: DeltafrontClient) -> None:
    *_, made = client.prefill(PROMPT)
    assert isinstance(made, PrefillFinished)
    house.losses = [(4, CODES[0])]
    house.decode.busy = [Refused(reason=RefusalReason.POSITIONS, message="too much", tokens_left=4)]
    stream = client.generate(session_id=made.session.session_id, append="q")
    events = [next(stream) for _ in range(4)]
    house.decode.busy = [Refused(reason=RefusalReason.POSITIONS, message="too much")]
    _, _, finish, _ = collect([*events, *stream])
    assert (finish.reason, finish.usage.completion_tokens) == ("length", 4)
    assert [reservation.max_tokens for reservation in house.decode.reservations[-3:]] == [9, 4, 5]
    client.release(made.session.session_id)
    nothing_left(house)


def test_next_door_resumes_the_answer(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points the client's channel to the next door, as a proxy would."""
    first = make_house()
    second = make_house(others=[first])
    with DeltafrontClient(first.address) as client, DeltafrontClient(second.address) as other:
        first.losses = [(READ + 3, CODES[3])]
        monkeypatch.setattr(client._stub, "Generate", in_turn(client._stub.Generate, other._stub.Generate))
        text, tokens, *_ = collect(client.generate(PROMPT, max_tokens=12))
    assert text == expected(ids(PROMPT), 12)
    assert len(tokens) == 12
    assert not first.losses


def in_turn(*methods: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that calls the next method each time, like a proxy."""
    left = list(methods)

    def call(*given: Any, **more: Any) -> Any:
        return left.pop(0)(*given, **more)

    return call


# --- limits of retries -------------------------------------------------------------------------------------


def test_lost_connection_raises_if_retries_are_off(house: House) -> None:
    house.losses = [(0, CODES[1])]
    with DeltafrontClient(house.address, retry_s=0) as client, pytest.raises(ConnectionLost) as caught:
        list(client.generate(PROMPT))
    assert caught.value.message == "the connection to the service was lost (unknown)"


def test_deadline_covers_all_retries(house: House, client: DeltafrontClient) -> None:
    house.decode.pause_at = 3
    house.losses = [(READ, CODES[0])] * 5
    with pytest.raises(DeadlineExceeded):
        list(client.generate(PROMPT, timeout_s=1.0))
    nothing_left(house)


def test_unreachable_server_fails_at_once() -> None:
    with DeltafrontClient("127.0.0.1:1") as client:
        for call in (client.info, lambda: list(client.generate("x"))):
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
                call()


def test_closing_the_client_is_not_retried(house: House, client: DeltafrontClient) -> None:
    house.decode.pause_at = 2
    stream = client.generate(PROMPT)
    closing = threading.Timer(0.0, client.close)
    for event in stream:
        if getattr(event, "index", -1) == 1:
            closing.start()
            break
    with pytest.raises(Cancelled):
        list(stream)
    closing.join()
    nothing_left(house)


@pytest.mark.parametrize(
    ("answered", "says"),
    [(b"123", "multiple of 4"), (b"\xff\xff\0\0", "vocabulary"), (bytes(4 * 5), "5 tokens are more than")],
)
def test_refuses_bad_answered_token_ids(
    house: House, client: DeltafrontClient, answered: bytes, says: str
) -> None:
    from deltafront.protos.v1 import deltafront_pb2 as pb

    request = pb.GenerateRequest(
        prompt=pb.Prompt(text="x"), sampling=pb.SamplingOptions(max_tokens=4), answered_ids=answered
    )
    with pytest.raises(InvalidArgument, match=says) as caught:
        client._call(lambda *given, **more: list(client._stub.Generate(*given, **more)), request)
    assert caught.value.field == "answered_ids"
