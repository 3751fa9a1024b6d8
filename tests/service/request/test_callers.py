"""Quotas of bearer tokens, counted over all doors, and one audit line for each request."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from deltafront.service.client import DeltafrontClient, PrefillFinished, Token
from deltafront.service.errors import InvalidArgument, NotFound, Overloaded, Unauthenticated
from deltafront.service.request.callers import Caller, Callers, Quota
from deltafront.workers.messages.states import OwnerUse

from ..inprocess import House, wait_until


async def test_quota_counts_requests_at_all_doors() -> None:
    uses = [
        OwnerUse(owner="a", door="other", requests=1, tokens=100),
        OwnerUse(owner="a", door="here", requests=9, tokens=9000),
        OwnerUse(owner="b", door="other", requests=5, tokens=500),
    ]
    callers = Callers("here", lambda: uses, nothing_new)
    caller = Caller("a", "a", Quota(requests=3))
    with await callers.request(caller), await callers.request(caller):
        assert callers.requests("a") == 3
        with pytest.raises(Overloaded, match="has 3 requests running") as caught:
            await callers.request(caller)
        assert caught.value.retry_after_s
        with await callers.request(Caller("c", "c", Quota(requests=1))):
            pass
    uses.clear()
    assert callers.requests("a") == 0


async def test_quota_counts_tokens_of_sessions() -> None:
    uses = [
        OwnerUse(owner="a", door="", requests=0, tokens=300),
        OwnerUse(owner="a", door="other", requests=1, tokens=100),
    ]
    callers = Callers("here", lambda: uses, nothing_new)
    caller = Caller("a", "a", Quota(tokens=1000))
    with await callers.request(caller) as first:
        await first.set_tokens(600)
        await first.set_tokens(500)
        assert callers.tokens("a") == 900
        with await callers.request(caller) as second:
            await second.set_tokens(100)
            with pytest.raises(Overloaded, match="holds 900 tokens and may hold 1000: 101 more") as caught:
                await second.set_tokens(101)
            assert caught.value.retry_after_s
            with pytest.raises(Overloaded, match="1001 tokens are more than") as never:
                await second.set_tokens(1001)
            assert never.value.retry_after_s is None
    assert callers.tokens("a") == 400


async def nothing_new() -> None:
    """Let the workers repeat their last answers."""


async def test_asks_workers_again_before_refusing_on_old_usage() -> None:
    """Workers are not asked again if a newer answer could not change the refusal."""
    reported, now, asked = (
        [OwnerUse(owner="a", door="other", requests=1, tokens=900)],
        list[OwnerUse](),
        list[bool](),
    )

    async def ask() -> None:
        asked.append(True)
        reported[:] = now

    callers = Callers("here", lambda: reported, ask)
    caller = Caller("a", "a", Quota(requests=1, tokens=1000))
    with await callers.request(caller) as first:
        assert len(asked) == 1
        reported[:] = [OwnerUse(owner="a", door="", requests=0, tokens=900)]
        await first.set_tokens(200)
        assert len(asked) == 2
        with pytest.raises(Overloaded, match="has 1 requests running"), await callers.request(caller):
            pass
        with pytest.raises(Overloaded, match="1001 tokens are more than"):
            await first.set_tokens(1001)
        assert len(asked) == 2, "only this door's own requests and the limit itself were in the way"
        now[:] = reported[:] = [OwnerUse(owner="a", door="", requests=0, tokens=900)]
        with pytest.raises(Overloaded, match="holds 900 tokens and may hold 1000: 201 more"):
            await first.set_tokens(201)
        assert len(asked) == 3


@pytest.fixture
def doors(make_house: Callable[..., House], tmp_path: Path) -> tuple[House, House]:
    """Start doors that poll the workers once, and then only on demand."""
    tokens = tmp_path / "tokens"
    tokens.write_text("alpha name=ann requests=2 tokens=2000\nbeta\ngamma requests=1\n")
    first = make_house(tokens_file=str(tokens), refresh_s=1e6)
    return first, make_house(others=[first], tokens_file=str(tokens), refresh_s=1e6)


def test_quota_of_a_token_holds_at_every_door(doors: tuple[House, House]) -> None:
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
        with pytest.raises(Overloaded, match="has 2 requests running"):
            list(elsewhere.generate("x"))
        house.decode.pause_at = -1
        for stream in streams:
            list(stream)
        list(elsewhere.generate("x" * 100, max_tokens=2))
        list(stranger.generate("x" * 3000, max_tokens=2))
        with pytest.raises(Overloaded, match="more than this caller may ever hold in the KV cache, 2000"):
            list(elsewhere.generate("x" * 1990, max_tokens=10))
        *_, made = client.prefill("x" * 1500)
        assert isinstance(made, PrefillFinished)
        with pytest.raises(Overloaded, match="holds 1501 tokens and may hold 2000"):
            list(elsewhere.generate("y" * 500, max_tokens=10))
        list(elsewhere.generate("x" * 490, max_tokens=10))  # most tokens are the session's
        elsewhere.release(made.session.session_id)
        list(elsewhere.generate("y" * 500, max_tokens=10))


async def test_requests_accepted_by_two_doors_at_once_count_at_both() -> None:
    """A later request sees the usage of both doors."""
    uses = list[OwnerUse]()
    first, second = (Callers(name, lambda: uses, nothing_new) for name in "ab")
    caller = Caller("c", "c", Quota(requests=1))
    with await first.request(caller), await second.request(caller):
        uses[:] = [
            OwnerUse(owner="c", door="a", requests=1, tokens=10),
            OwnerUse(owner="c", door="b", requests=1, tokens=10),
        ]
        for door in (first, second):
            with pytest.raises(Overloaded, match="has 1 requests running"):
                await door.request(caller)


def test_client_that_changes_doors_is_not_refused(doors: tuple[House, House]) -> None:
    """Sends one request after the other, each as large as the quota."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(DeltafrontClient(door.address, "alpha")) for door in doors]
        for turn in range(12):
            *_, made = clients[turn % 2].prefill(f"{turn}" + "x" * 1800)
            assert isinstance(made, PrefillFinished)
            clients[(turn + 1) % 2 if turn % 3 else turn % 2].release(made.session.session_id)


def test_audit_line_has_no_content(doors: tuple[House, House], caplog: pytest.LogCaptureFixture) -> None:
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
            list(client.generate("a secret", temperature=-1, request_id="wrong"))
        with pytest.raises(InvalidArgument):
            list(client.generate("a secret", request_id="no\nid"))
    with DeltafrontClient(house.address, "wrong") as stranger, pytest.raises(Unauthenticated):
        list(stranger.generate("a secret", request_id="theirs"))
    lines = [json.loads(record.message) for record in caplog.records if record.name == "deltafront.audit"]
    assert all(line.pop("seconds") >= 0 for line in lines)
    names = ("request_id", "token", "rpc", "method", "prompt_tokens", "cached_tokens", "completion_tokens")
    assert [tuple(line[name] for name in (*names, "finish")) for line in lines] == [
        ('my "id"', "ann", "Generate", "dense", 9, 0, 3, "length"),
        ("read", "ann", "Prefill", "streaming", 9, 0, 0, "finished"),
        ("ask", "ann", "Generate", "", 18, 9, 2, "length"),
        ("", "ann", "ReleaseSession", "", 0, 0, 0, "finished"),
        ("", "ann", "ReleaseSession", "", 0, 0, 0, "not_found"),
        ("wrong", "ann", "Generate", "", 0, 0, 0, "invalid_argument"),
        ("", "ann", "Generate", "", 0, 0, 0, "invalid_argument"),
        ("", "", "Generate", "", 0, 0, 0, "unauthenticated"),  # its message was not received
    ]
    assert "secret" not in caplog.text
    assert "alpha" not in caplog.text


def test_cancelled_request_has_an_audit_line(
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
