"""What a token may have at once, counted over doors; and one line in the audit log for each request."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from deltafront.service.client import DeltafrontClient, PrefillFinished, Token
from deltafront.service.errors import InvalidArgument, NotFound, Overloaded, Unauthenticated
from deltafront.service.request.callers import Allowance, Caller, Callers
from deltafront.workers.messages.states import OwnerUse

from ..inprocess import House, wait_until
from ..test_requests import nothing_left


def test_requests_are_counted_here_and_elsewhere() -> None:
    uses = [OwnerUse("a", "other", 1, 100), OwnerUse("a", "here", 9, 9000), OwnerUse("b", "other", 5, 500)]
    callers = Callers("here", lambda: uses)
    caller = Caller("a", "a", Allowance(requests=3))
    with callers.request(caller), callers.request(caller):
        assert callers.requests("a") == 3
        with pytest.raises(Overloaded, match="has 3 requests running") as caught, callers.request(caller):
            pass
        assert caught.value.retry_after_s
        with callers.request(Caller("c", "c", Allowance(requests=1))):
            pass
    uses.clear()
    assert callers.requests("a") == 0


def test_tokens_are_counted_with_sessions() -> None:
    uses = [OwnerUse("a", "", 0, 300), OwnerUse("a", "other", 1, 100)]
    callers = Callers("here", lambda: uses)
    caller = Caller("a", "a", Allowance(tokens=1000))
    with callers.request(caller) as share:
        share.take(600)
        share.take(500)
        assert callers.tokens("a") == 900
        with callers.request(caller) as second:
            second.take(100)
            with pytest.raises(Overloaded, match="holds 900 tokens and may hold 1000: 101 more") as caught:
                second.take(101)
            assert caught.value.retry_after_s
            with pytest.raises(Overloaded, match="1001 tokens are more than") as never:
                second.take(1001)
            assert never.value.retry_after_s is None
    assert callers.tokens("a") == 400


@pytest.fixture
def doors(make_house: Callable[..., House], tmp_path: Path) -> tuple[House, House]:
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha name=ann requests=2 tokens=2000\nbeta\n")
    first = make_house(tokens_file=str(tokens))
    return first, make_house(others=[first], tokens_file=str(tokens))


def test_a_token_has_its_limits_at_every_door(doors: tuple[House, House]) -> None:
    house, other = doors
    house.decode.pause_at = 1
    with (
        DeltafrontClient(house.address, "alpha") as client,
        DeltafrontClient(other.address, "alpha") as elsewhere,
        DeltafrontClient(other.address, "beta") as stranger,
    ):
        streams = [client.generate("x" * 100, max_tokens=50) for _ in range(2)]
        for stream in streams:
            while not isinstance(next(stream), Token):
                pass
        with pytest.raises(Overloaded, match="has 2 requests running"):
            list(client.generate("x"))
        wait_until(lambda: uses(other) == {("door0", 2)}, "the other door does not hear of them")
        with pytest.raises(Overloaded, match="has 2 requests running"):
            list(elsewhere.generate("x"))
        assert elsewhere.info().vocabulary == 258
        house.decode.pause_at = -1
        for stream in streams:
            list(stream)
        list(stranger.generate("x" * 3000, max_tokens=2))
        with pytest.raises(Overloaded, match="more than this token may hold at all, 2000"):
            list(elsewhere.generate("x" * 1990, max_tokens=10))
        nothing_left(house)
        wait_until(lambda: not uses(other), "the other door does not hear of their end")
        *_, made = client.prefill("x" * 1500)
        assert isinstance(made, PrefillFinished)
        wait_until(lambda: uses(other) == {("", 0)}, "the other door does not hear of the session")
        with pytest.raises(Overloaded, match="holds 1501 tokens and may hold 2000"):
            list(elsewhere.generate("y" * 500, max_tokens=10))
        list(elsewhere.generate("x" * 490, max_tokens=10))  # most of it is the session's
        elsewhere.release(made.session.session_id)
        wait_until(lambda: not uses(other), "the other door does not hear of the release")
        list(elsewhere.generate("y" * 500, max_tokens=10))


def uses(house: House) -> set[tuple[str, int]]:
    """Doors and requests of which a door has heard."""
    return {(use.door, use.requests) for worker in house.fleet.view.workers.values() for use in worker.uses}


def test_every_request_has_a_line_and_no_content(
    doors: tuple[House, House], caplog: pytest.LogCaptureFixture
) -> None:
    house, _ = doors
    caplog.set_level(logging.INFO, "deltafront.audit")
    with DeltafrontClient(house.address, "alpha") as client:
        list(client.generate("a secret", max_tokens=3, request_id='my "id"'))
        *_, made = client.prefill("a secret", method="streaming", request_id="read")
        session = made.session.session_id  # type: ignore[union-attr]
        list(client.generate(session_id=session, append="a secret?", max_tokens=2, request_id="ask"))
        client.release(session)
        with pytest.raises(NotFound):
            client.release(session)
        with pytest.raises(InvalidArgument):
            list(client.generate("a secret", temperature=-1))
    with DeltafrontClient(house.address, "wrong") as stranger, pytest.raises(Unauthenticated):
        list(stranger.generate("a secret"))
    lines = [json.loads(record.message) for record in caplog.records if record.name == "deltafront.audit"]
    assert all(line.pop("seconds") >= 0 for line in lines)
    names = ("request_id", "token", "rpc", "method", "prompt_tokens", "cached_tokens", "completion_tokens")
    assert [tuple(line[name] for name in (*names, "finish")) for line in lines] == [
        ('my "id"', "ann", "Generate", "dense", 9, 0, 3, "length"),
        ("read", "ann", "Prefill", "streaming", 9, 0, 0, "finished"),
        ("ask", "ann", "Generate", "", 18, 9, 2, "length"),
        ("", "ann", "ReleaseSession", "", 0, 0, 0, "finished"),
        ("", "ann", "ReleaseSession", "", 0, 0, 0, "not_found"),
        ("", "ann", "Generate", "", 0, 0, 0, "invalid_argument"),
        ("", "", "Generate", "", 0, 0, 0, "unauthenticated"),
    ]
    assert "secret" not in caplog.text
    assert "alpha" not in caplog.text


def test_a_cancelled_request_has_its_line_too(
    doors: tuple[House, House], caplog: pytest.LogCaptureFixture
) -> None:
    house, _ = doors
    caplog.set_level(logging.INFO, "deltafront.audit")
    house.decode.pause_at = 2
    with DeltafrontClient(house.address, "alpha") as client:
        stream = client.generate("x" * 100, request_id="left")
        while not (isinstance(event := next(stream), Token) and event.index == 1):
            pass
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: "left" in caplog.text, "there is no line")
    line = json.loads(next(r.message for r in caplog.records if r.name == "deltafront.audit"))
    assert (line["finish"], line["prompt_tokens"], line["completion_tokens"]) == ("cancelled", 101, 2)
