"""Fixtures: a house's HTTP API, and OpenAI's client for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import pytest
import uvicorn
from ray.serve._private.http_util import RequestIdMiddleware

from deltafront.service.door.http_door import HttpDoor

from ..fakes import EOS
from ..inprocess import HANG_S, House
from .openai_calls import MODEL, Open


class HttpServer:
    """A house's HTTP API on a free port, in the house's event loop, with Serve's server and middleware."""

    def __init__(self, house: House, door: HttpDoor) -> None:
        config = uvicorn.Config(
            RequestIdMiddleware(door.app), host="127.0.0.1", port=0, log_level="warning", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._house = house
        self._serving = house.loop.run(self._start())

    async def _start(self) -> asyncio.Task[None]:
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            assert not serving.done(), serving.result()
            await asyncio.sleep(0.01)
        return serving

    @property
    def address(self) -> str:
        return "http://{}:{}".format(*self._server.servers[0].sockets[0].getsockname())

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._house.loop.run(asyncio.wait_for(self._serving, HANG_S))


@pytest.fixture
def says(house: House) -> Callable[[str], None]:
    """Set the text that the model answers, and then the end token."""

    def script(text: str) -> None:
        house.decode.script = [*text.encode(), EOS]

    return script


@pytest.fixture
def http_doors() -> list[HttpDoor]:
    """Those that `make_http` has made."""
    return []


@pytest.fixture
def make_http(make_house: Callable[..., House], http_doors: list[HttpDoor]) -> Iterator[Callable[..., str]]:
    """Serve a house's HTTP API: make_http(house) returns its address. keep_alive_s: the longest silence of a
    stream. origins: web origins that may call."""
    servers: list[HttpServer] = []

    def make(house: House, keep_alive_s: float = HANG_S, origins: Sequence[str] = (), **more: Any) -> str:
        http_doors.append(HttpDoor(house.door._requests, 1 << 20, keep_alive_s, origins, **more))
        servers.append(HttpServer(house, http_doors[-1]))
        return servers[-1].address

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house(model_name=MODEL)


@pytest.fixture
def address(house: House, make_http: Callable[..., str]) -> str:
    return make_http(house)


@pytest.fixture
def connect() -> Iterator[Open]:
    with contextlib.ExitStack() as clients:

        def client(address: str, token: str = "any") -> openai.OpenAI:
            made = openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0, timeout=HANG_S)
            return clients.enter_context(made)

        yield client


@pytest.fixture
def api(address: str, connect: Open) -> openai.OpenAI:
    return connect(address)
