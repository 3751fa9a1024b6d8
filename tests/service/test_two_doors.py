"""Two doors to the same workers, in this process: clients may use either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from deltafront.service.client import DeltafrontClient, PrefillFinished, Token
from deltafront.service.errors import Cancelled, InvalidArgument, NotFound, Overloaded

from .inprocess import House, wait_until
from .test_faults import PROMPT
from .test_requests import collect, expected, ids, nothing_left


@pytest.fixture
def clients(doors: tuple[House, House]) -> Iterator[tuple[DeltafrontClient, DeltafrontClient]]:
    with (
        DeltafrontClient(doors[0].address, "alpha") as first,
        DeltafrontClient(doors[1].address, "alpha") as second,
    ):
        yield first, second


def test_every_door_serves_a_session(
    doors: tuple[House, House], clients: tuple[DeltafrontClient, DeltafrontClient]
) -> None:
    first, second = clients
    *_, made = first.prefill(PROMPT)
    assert isinstance(made, PrefillFinished)
    session = made.session.session_id
    for client in (second, first):
        text, *_ = collect(client.generate(session_id=session, append="q", max_tokens=5))
        assert text == expected(ids(PROMPT) + ids("q", bos=False), 5)
    with DeltafrontClient(doors[1].address, "beta") as stranger, pytest.raises(NotFound):
        stranger.release(session)
    second.release(session)
    with pytest.raises(NotFound):
        list(first.generate(session_id=session, append="q"))
    for client in clients:
        with pytest.raises(NotFound):
            client.release(session)
    nothing_left(doors[0])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_any_door_cancels_a_request_of_another(
    doors: tuple[House, House], clients: tuple[DeltafrontClient, DeltafrontClient], phase: str
) -> None:
    house = doors[0]
    worker = house.group if phase == "prefill" else house.decode
    for canceller in clients:
        worker.pause_at = 3
        worker.paused.clear()
        ended: list[Exception] = []

        def read(ended: list[Exception] = ended) -> None:
            try:
                list(clients[0].generate(PROMPT, request_id="mine"))
            except Exception as error:
                ended.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert worker.paused.wait(60)
        with DeltafrontClient(doors[1].address, "beta") as stranger:
            assert stranger.cancel("mine") == 0
        assert canceller.cancel("yours") == 0
        assert canceller.cancel("mine") == 1
        assert canceller.cancel("mine") == 0
        reader.join()
        assert isinstance(ended[0], Cancelled)
        assert ended[0].message == "the request was cancelled"
        nothing_left(house)


def test_refuses_a_cancel_without_a_request_id(clients: tuple[DeltafrontClient, DeltafrontClient]) -> None:
    with pytest.raises(InvalidArgument, match="request_id: is empty"):
        clients[0].cancel("")


def test_quota_freed_at_other_doors_is_available_at_once(
    make_house: Callable[..., House],
) -> None:
    """No poll runs in between, so a door's view of the pages is that of its start."""
    first = make_house(refresh_s=3600)
    second = make_house(others=[first], refresh_s=3600)
    first.decode.total, first.decode.remembers = 100, False
    for house in (first, second):
        house.loop.run(house.fleet.refresh())
    with DeltafrontClient(first.address) as one, DeltafrontClient(second.address) as other:
        for letter, client in zip("abcd", (one, other, one, other), strict=True):
            text, *_ = collect(client.generate(letter * 600, max_tokens=400))
            assert len(text) == 400
        first.decode.pause_at = 1
        stream = one.generate("a" * 600, max_tokens=400)
        while not isinstance(next(stream), Token):
            pass
        with pytest.raises(Overloaded, match="no room now"):
            list(other.generate("b" * 600, max_tokens=400))
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: not first.pages_used(), "pages are left")
        first.decode.pause_at = -1
        collect(other.generate("b" * 600, max_tokens=400))
